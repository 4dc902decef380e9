"""The result of every loss, and the selection of the tokens that count."""

from typing import NamedTuple

import torch
from torch import Tensor

from compress.base.errors import InputError

IGNORED = -100  # the label of a token that is not to be predicted, as torch's cross entropy has it


class Summed(NamedTuple):
    """total: a scalar, float32 (float64 for float64 inputs), differentiable. count: how many terms it has, int64.

    Where nothing counts, both are zero, and the total still has a gradient (of zeros): a rank whose tokens are all
    padding goes backward like the others, which collectives need. A tuple, since FSDP looks for the tensors that a
    forward returns in containers that torch's pytree knows.
    """

    total: Tensor
    count: Tensor  # type: ignore[assignment]  # takes the place of tuple.count

    def mean(self) -> Tensor:
        """The total over the count; zero where nothing counts. For one process and one batch: see the package."""
        return self.total / self.count.clamp(min=1)


def wide(x: Tensor) -> Tensor:
    """x in the dtype that sums are taken in: float64 if it is that already, else float32."""
    return x if x.dtype == torch.float64 else x.float()


def sum_of(values: Tensor) -> Summed:
    """The sum of one value per token or pair, with their number."""
    return Summed(wide(values).sum(), torch.tensor(values.numel(), device=values.device))


def valid_rows(like: Tensor, labels: Tensor | None, mask: Tensor | None) -> Tensor:
    """int64 positions, among all tokens in their order, of those that count.

    like: [..., D], whose leading dimensions are the tokens. A token counts unless its label is -100 or its mask 0.
    """
    shape = like.shape[:-1]
    valid = torch.ones(shape, dtype=torch.bool, device=like.device)
    for name, given in (("labels", labels), ("mask", mask)):
        if given is not None and given.shape != shape:
            raise InputError(f"{name} of shape {[*given.shape]} for tokens of shape {[*shape]}; they must be the same")
    if labels is not None:
        valid = valid & (labels != IGNORED)
    if mask is not None:
        valid = valid & (mask != 0)
    return valid.flatten().nonzero().squeeze(-1)


def rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """[R, D] the given tokens of [..., D]. The values of other tokens, NaN included, reach neither values nor
    gradients."""
    return x.flatten(0, -2).index_select(0, rows)


def same_width(what: str, student: Tensor, teacher: Tensor, remedy: str) -> None:
    if student.shape[-1] != teacher.shape[-1]:
        raise InputError(f"{what}: {student.shape[-1]} of the student, {teacher.shape[-1]} of the teacher; {remedy}")


def same_shape(what: str, student: Tensor, teacher: Tensor) -> None:
    if student.shape != teacher.shape:
        raise InputError(f"{what}: {[*student.shape]} of the student, {[*teacher.shape]} of the teacher must be alike")
