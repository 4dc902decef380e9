"""A linear map from the student's width to the teacher's, to be trained with the student and left behind.

FitNets calls it the regressor (arXiv 1412.6550, section 2.2). It begins with W^T W = I (or W W^T = I, to a smaller
width): lengths are kept, nothing is known of the teacher.

Shapes: D the student's width, E the teacher's.
"""

import torch
from torch import nn


def projector(
    width: int, teacher_width: int, *, bias: bool = False, generator: torch.Generator | None = None
) -> nn.Linear:
    """[E, D] with orthogonal rows or columns, float32 on the CPU."""
    made = nn.Linear(width, teacher_width, bias=bias)
    nn.init.orthogonal_(made.weight, generator=generator)
    if bias:
        nn.init.zeros_(made.bias)
    return made
