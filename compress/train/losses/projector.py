"""A linear map from the student's width to the teacher's, to be trained with the student and left behind.

FitNets calls it the regressor (arXiv 1412.6550, section 2.2). Two ways to begin:

    orthogonal      W^T W = I (or W W^T = I, to a smaller width): lengths are kept, nothing is known of the teacher
    least squares   argmin_W  sum_t |W s_t + b - y_t|^2 + r |W|_F^2 over hidden states of both: training begins where a
                    projector trained alone would end; then the student learns what a linear map lacks

Shapes: T tokens, D the student's width, E the teacher's; [T, D] stands for [..., D].
"""

import torch
from torch import Tensor, nn

from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.train.losses.loss_sum import rows_of, valid_rows

RIDGE = 1e-4  # of the mean variance of a channel: enough to tell apart channels that are copies of each other


def projector(
    width: int, teacher_width: int, *, bias: bool = False, generator: torch.Generator | None = None
) -> nn.Linear:
    """[E, D] with orthogonal rows or columns, float32 on the CPU."""
    made = nn.Linear(width, teacher_width, bias=bias)
    nn.init.orthogonal_(made.weight, generator=generator)
    if bias:
        nn.init.zeros_(made.bias)
    return made


class ProjectorFit:
    """Sums over tokens, whose least-squares solution is a projector. width: D; teacher_width: E; like: a tensor on
    the device of the hidden states."""

    def __init__(self, width: int, teacher_width: int, like: Tensor) -> None:
        own, both = (width + 1, width + 1), (width + 1, teacher_width)  # the last row is of ones: sums and the count
        self.own, self.both = (torch.zeros(*size, dtype=torch.float64, device=like.device) for size in (own, both))

    @torch.no_grad()
    def add(self, student_TD: Tensor, teacher_TE: Tensor, mask_T: Tensor | None = None) -> None:
        """Add the tokens whose mask is not 0."""
        rows = valid_rows(student_TD, None, mask_T)
        s_TD, y_TE = rows_of(student_TD, rows).double(), rows_of(teacher_TE, rows).double()
        left = torch.cat([s_TD, torch.ones_like(s_TD[:, :1])], 1)
        self.own += left.T @ left
        self.both += left.T @ y_TE

    @torch.no_grad()
    def projector(self, *, ridge: float = RIDGE, comm: Comm | None = None) -> nn.Linear:
        """[E, D] and a bias, float32, where the hidden states are. Raises InputError without a token on any rank.

        ridge: 0 or more, of the mean variance of the student's channels. comm: over ranks that have added different
        tokens; every rank then makes the same projector. A collective.
        """
        own, both = ((comm or Comm()).all_reduce(each.clone()) for each in (self.own, self.both))
        count = float(own[-1, -1])
        if count == 0:
            raise InputError("a projector cannot be fitted to no tokens; give some whose mask is not 0")
        mean_D, mean_E = own[-1, :-1] / count, both[-1] / count
        own_DD = own[:-1, :-1] / count - mean_D.outer(mean_D)
        cross_DE = both[:-1] / count - mean_D.outer(mean_E)
        damp = ridge * own_DD.diagonal().mean().clamp(min=torch.finfo(torch.float64).tiny)
        own_DD.diagonal().add_(damp)
        driver = "gelsd" if own_DD.device.type == "cpu" else "gels"
        weight_DE = torch.linalg.lstsq(own_DD, cross_DE, driver=driver).solution
        made = nn.Linear(len(mean_D), len(mean_E), device=own.device)
        made.weight.copy_(weight_DE.T)
        made.bias.copy_(mean_E - mean_D @ weight_DE)
        return made
