"""The loss on logits from hidden states, without the logits: they are made a few tokens at a time, and never kept.

    forward:  for every chunk of tokens   z = h W^T + b;  total += sum l(z);  g = dl/dz
                                          dh = g W;  dW += g^T h;  db += sum g
    backward: dh, dW, db times the gradient of the total

The gradients are taken while a chunk's logits are there, so that none of [T, V] is ever whole: peak memory is a dozen
tensors of a chunk, and what the gradients of h and W take anyway (dW in float32). This is how fused linear cross
entropy works (Liger Kernel, Hsu et al. 2024, arXiv 2410.10989); the loss of a chunk
is `logits.token_losses`, differentiated by autograd.

Matrix products have the dtype of hidden states and weights, as the model's own head; everything else is float32.
Under FSDP2 the weights must be whole: the loss is called inside the forward of the unit that holds the head.

Shapes: T tokens, D width, V vocabulary; [T, D] stands for [..., D].
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from compress.base.errors import InputError
from compress.model.vocabulary import over_vocabulary
from compress.train.losses.logits import LogitsLoss, Teacher, check, teacher_rows, token_losses
from compress.train.losses.loss_sum import Summed, rows_of, valid_rows, wide

CHUNK_VALUES = 2**24  # logits at a time: 64 MiB of float32, 128 tokens of a vocabulary of 131072


class Head(NamedTuple):
    """weight_VD, bias_V; then `scale` times (Cohere, Granite), then softcap tanh(z / softcap) (Gemma 2)."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def product(self, hidden_TD: Tensor) -> Tensor:
        """[T, V] before `finish`."""
        return linear(hidden_TD, self.weight_VD, self.bias_V)

    def finish(self, product_TV: Tensor) -> Tensor:
        """[T, V] logits, float32 or float64."""
        logits_TV = wide(product_TV)
        if self.scale != 1:
            logits_TV = logits_TV * self.scale
        return logits_TV if self.softcap is None else self.softcap * (logits_TV / self.softcap).tanh()


class HiddenTeacher(NamedTuple):
    """A teacher by its last hidden states [..., E] and its head; its logits, too, are made chunk by chunk. vocabulary:
    the student's, where it is padded to another length."""

    hidden_TE: Tensor
    head: Head
    vocabulary: int | None = None


def chunked_logits_loss(
    hidden_TD: Tensor,
    head: Head,
    teacher: Teacher | HiddenTeacher | None = None,
    *,
    labels_T: Tensor | None = None,
    mask_T: Tensor | None = None,
    how: LogitsLoss | None = None,
    chunk_values: int | None = None,
) -> Summed:
    """`logits_loss` of the student's logits head(hidden), in a part of the memory. Not differentiable twice.

    chunk_values: logits at a time, 1 or more (`CHUNK_VALUES`); at least those of one token.
    """
    how = how or LogitsLoss()
    _check(hidden_TD, head, teacher, labels_T, how)
    rows = valid_rows(hidden_TD, labels_T, mask_T)

    def total_of(product_CV: Tensor, chunk: slice) -> Tensor:
        here = rows[chunk]
        labels = None if labels_T is None else labels_T.flatten()[here]
        return token_losses(head.finish(product_CV), _teacher_of(teacher, here), labels, how).sum()

    needed = torch.is_grad_enabled()
    weight, bias = head.weight_VD, head.bias_V
    tokens = max(1, (chunk_values or CHUNK_VALUES) // len(weight))
    hidden = rows_of(hidden_TD, rows)
    total = cast(Tensor, _Chunked.apply(hidden, weight, bias, total_of, tokens, needed))
    return Summed(total, torch.tensor(len(rows), device=total.device))


def _check(
    hidden_TD: Tensor, head: Head, teacher: Teacher | HiddenTeacher | None, labels_T: Tensor | None, how: LogitsLoss
) -> None:
    heads = [head, *([teacher.head] if isinstance(teacher, HiddenTeacher) else [])]
    if any(isinstance(each.weight_VD, DTensor) for each in heads):
        raise InputError(
            "the head's weight is sharded; call the loss inside the forward of the FSDP unit that holds it"
        )
    meta = torch.empty(*hidden_TD.shape[:-1], len(head.weight_VD), device="meta")
    if not isinstance(teacher, HiddenTeacher):
        check(meta, teacher, labels_T, how)
        return
    width = teacher.vocabulary or len(teacher.head.weight_VD)
    theirs = torch.empty(*teacher.hidden_TE.shape[:-1], width, device="meta")
    check(meta, theirs, labels_T, how)


@torch.no_grad()
def _teacher_of(teacher: Teacher | HiddenTeacher | None, rows: Tensor) -> Teacher | None:
    if isinstance(teacher, HiddenTeacher):
        logits_TV = teacher.head.finish(teacher.head.product(rows_of(teacher.hidden_TE, rows)))
        return logits_TV if teacher.vocabulary is None else over_vocabulary(logits_TV, teacher.vocabulary)
    return teacher_rows(teacher, rows)


class _Chunked(torch.autograd.Function):
    """total_of(z, chunk) is a chunk's total, a function of its products z [C, V] that autograd can follow."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        total_of: Callable[[Tensor, slice], Tensor],
        tokens: int,
        needed: bool,
    ) -> Tensor:
        wanted = [needed and want for want in ctx.needs_input_grad[:3]]
        like = wide(hidden_TD[:0]).dtype
        total = torch.zeros((), dtype=like, device=hidden_TD.device)
        hidden_grad = torch.empty_like(hidden_TD) if wanted[0] else None
        weight_grad = torch.zeros_like(weight_VD, dtype=like) if wanted[1] else None
        bias_grad = torch.zeros_like(bias_V, dtype=like) if wanted[2] and bias_V is not None else None
        for first in range(0, len(hidden_TD), tokens):
            chunk = slice(first, first + tokens)
            product_CV = linear(hidden_TD[chunk], weight_VD, bias_V)
            if not any(wanted):
                total += total_of(product_CV, chunk)
                continue
            with torch.enable_grad():
                found = total_of(product_CV.requires_grad_(), chunk)
                (slope_CV,) = torch.autograd.grad(found, product_CV)
            total += found.detach()
            del product_CV, found
            if hidden_grad is not None:
                hidden_grad[chunk] = slope_CV @ weight_VD
            if weight_grad is not None:
                _add_outer(weight_grad, slope_CV, hidden_TD[chunk].to(slope_CV.dtype), tokens)
            if bias_grad is not None:
                bias_grad += slope_CV.sum(0, dtype=like)
        ctx.save_for_backward(hidden_grad, weight_grad, bias_grad)
        ctx.dtypes = [None if each is None else each.dtype for each in (hidden_TD, weight_VD, bias_V)]
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = []
        for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            # Rounded to the parameter's dtype only here: a sum over tokens may not fit float16, its mean does.
            found.append(None if grad is None else torch.mul(grad, slope, out=torch.empty_like(grad, dtype=dtype)))
        return *found, None, None, None


def _add_outer(sum_VD: Tensor, slope_CV: Tensor, hidden_CD: Tensor, tokens: int) -> None:
    """sum += slope^T hidden; products of a lesser dtype than the sum's are added by slices of the vocabulary."""
    if sum_VD.dtype == slope_CV.dtype:
        sum_VD.addmm_(slope_CV.T, hidden_CD)
        return
    step = max(1, tokens * len(sum_VD) // sum_VD.shape[1])  # as many values as a chunk of logits
    for first in range(0, len(sum_VD), step):
        piece = slice(first, first + step)
        sum_VD[piece] += slope_CV[:, piece].T @ hidden_CD
