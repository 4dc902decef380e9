"""Knowledge distillation on logits (Hinton, Vinyals, Dean 2015, arXiv 1503.02531, section 2).

With z the student's logits of a token, v the teacher's, y the token that is to be predicted:

    a t^2 D(softmax(v / t), softmax(z / t))  -  (1 - a) log softmax(z)_y

D is a divergence (`divergence.py`), over the whole vocabulary or as far as the teacher's top k tell (`top_k.py`). t^2
makes up for gradients that shrink with 1 / t^2, so that a means the same at every temperature.

Logits of a token are those that predict its label: callers with a sequence's logits and tokens shift one of them. Both
terms count the same tokens. `logits_loss` takes logits and is the reference; `chunked.py` makes them a few tokens at a
time.

Shapes: T tokens, V vocabulary, k kept tokens; [T, V] stands for [..., V].
"""

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from compress.base.errors import InputError, one_of
from compress.train.losses.divergence import FLOOR, Kind, divergence
from compress.train.losses.loss_sum import Summed, rows_of, same_shape, same_width, valid_rows, wide
from compress.train.losses.top_k import Tail, TopK, coarse_student, coarse_teacher

Teacher = Tensor | TopK


@dataclass(frozen=True, kw_only=True)
class LogitsLoss:
    """The options of a loss on the student's logits."""

    kind: Kind = "forward"
    temperature: float = 1.0
    """above 0: t, of both softmaxes of the divergence."""

    alpha: float = 1.0
    """0 to 1: a, the divergence's share; the rest is cross entropy with the labels."""

    beta: float = 0.5
    """above 0, below 1: the teacher's share of the mixture of Jensen-Shannon; no effect on other divergences."""

    tail: Tail = "bucket"
    """Treatment of the tokens beyond a teacher's top k; no effect where the whole distribution is known."""

    def __post_init__(self) -> None:
        one_of("divergence", self.kind, get_args(Kind))
        one_of("tail", self.tail, get_args(Tail))
        if not 0 < self.temperature < float("inf"):
            raise InputError(f"temperature {self.temperature}; allowed: above 0")
        if not 0 <= self.alpha <= 1:
            raise InputError(f"alpha {self.alpha}; allowed: 0 (cross entropy alone) to 1 (the divergence alone)")
        if not 0 < self.beta < 1:
            raise InputError(f"beta {self.beta}; allowed: above 0, below 1; at the ends are 'forward' and 'reverse'")


def logits_loss(
    student_TV: Tensor,
    teacher: Teacher | None = None,
    *,
    labels_T: Tensor | None = None,
    mask_T: Tensor | None = None,
    how: LogitsLoss | None = None,
) -> Summed:
    """Sum over the valid tokens: those of a label other than -100 and of a mask other than 0, where these are given.

    teacher: logits, or log-probabilities (which are logits), [..., V]; or its top k [..., k]; no gradient goes there.
    labels_T: int64 [...], needed where alpha < 1. mask_T: [...].
    """
    how = how or LogitsLoss()
    check(student_TV, teacher, labels_T, how)
    rows = valid_rows(student_TV, labels_T, mask_T)
    labels = None if labels_T is None else labels_T.flatten()[rows]
    total = token_losses(rows_of(student_TV, rows), teacher_rows(teacher, rows), labels, how).sum()
    return Summed(total, torch.tensor(len(rows), device=total.device))


def check(student_TV: Tensor, teacher: Teacher | None, labels_T: Tensor | None, how: LogitsLoss) -> None:
    """Raises InputError for inputs that do not fit. student_TV: any tensor of the tokens' shape and of V columns."""
    if how.alpha < 1 and labels_T is None:
        raise InputError(f"alpha {how.alpha} asks for cross entropy, which needs labels")
    if how.alpha > 0 and teacher is None:
        raise InputError(f"alpha {how.alpha} asks for a divergence, which needs a teacher")
    if isinstance(teacher, Tensor):
        same_width("tokens of the vocabulary", student_TV, teacher, "leave out what only one of them has")
        same_shape("logits", student_TV, teacher)
    elif teacher is not None and teacher.log_probs_Tk.shape[:-1] != student_TV.shape[:-1]:
        shapes = [*teacher.log_probs_Tk.shape], [*student_TV.shape[:-1]]
        raise InputError(f"the teacher's top k of shape {shapes[0]} for tokens of shape {shapes[1]}")


def teacher_rows(teacher: Teacher | None, rows: Tensor) -> Teacher | None:
    """The teacher's rows for some tokens; None without a teacher."""
    if teacher is None:
        return None
    if isinstance(teacher, Tensor):
        return rows_of(teacher.detach(), rows)
    return TopK(rows_of(teacher.log_probs_Tk.detach(), rows), rows_of(teacher.indices_Tk, rows), teacher.temperature)


def token_losses(student_TV: Tensor, teacher: Teacher | None, labels_T: Tensor | None, how: LogitsLoss) -> Tensor:
    """[T] the loss of every token; none may be padding."""
    logits_TV = wide(student_TV)
    found_T = logits_TV.new_zeros(len(logits_TV))
    if how.alpha > 0 and teacher is not None:
        t = how.temperature
        if isinstance(teacher, TopK):
            log_q = coarse_student(logits_TV / t, teacher.indices_Tk, how.tail)
            log_p = coarse_teacher(teacher, logits_TV.shape[-1], t, how.tail)
        else:
            log_q, log_p = ((z if t == 1 else z / t).log_softmax(-1) for z in (logits_TV, wide(teacher)))
        found_T = found_T + how.alpha * t**2 * divergence(log_p.to(log_q.dtype), log_q, how.kind, how.beta)
    if how.alpha < 1 and labels_T is not None:
        log_q_T = logits_TV.log_softmax(-1).gather(-1, labels_T.unsqueeze(-1)).squeeze(-1)
        found_T = found_T - (1 - how.alpha) * log_q_T.masked_fill(log_q_T == -float("inf"), FLOOR)
    return found_T
