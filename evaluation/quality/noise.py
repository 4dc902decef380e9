"""The noise floor: the cost of rounding in the original's own arithmetic, in the same figures as a model's.

A checkpoint of bfloat16 or float16 is normally run in that dtype, and every product, norm and softmax is then rounded
to 8 or 11 bits. Its figures against itself in float32, the same weights without that rounding, on the same
windows, are the floor: a compressed model with a KL near it is as close to the original as the original is to itself.
They are measured as a model's are, by `measure`, and have the same names.

A checkpoint of float32 has no such floor: these figures are computed in float32 themselves. Nor has a float32 original
in memory, whose stored dtype is not known.
"""

import copy
from typing import Any

import torch
from torch import nn

from compress.checkpoint.read.pretrained import read_config
from compress.checkpoint.read.source import Source

NARROW = (torch.bfloat16, torch.float16)


def own_dtype(reference: nn.Module | Source) -> torch.dtype | None:
    """The 16-bit dtype that a reference is stored in; None where it is not a 16-bit one."""
    if isinstance(reference, Source):
        config: Any = read_config(reference)
        dtype = getattr(config, "dtype", None)
    else:
        dtype = next(reference.parameters()).dtype
    return dtype if dtype in NARROW else None


def why_none(reference: nn.Module | Source) -> str:
    """The reason why there is no noise floor."""
    where = "is stored" if isinstance(reference, Source) else "in memory is"
    return f"the reference {where} in float32, as these figures are: its rounding cannot be told from theirs"


def exact(reference: nn.Module) -> nn.Module:
    """A copy of a model in memory that computes in float32."""
    return copy.deepcopy(reference).float()
