"""Hidden states that are to be like the teacher's (FitNets, Romero et al. 2015, arXiv 1412.6550).

With s a token's hidden state in the student (behind a projector where widths differ), t the teacher's,
D their width:

    mse        |s - t|^2 / D                              TinyBERT, Jiao et al. 2020 (arXiv 1909.10351), L_hidn
    unit       |s/|s| - t/|t||^2 = 2 - 2 cos(s, t)        of directions alone
    relative   |s - t|^2 / |t|^2                          each token counts alike, however long its hidden state
    cosine     1 - cos(s, t)                              DistilBERT, Sanh et al. 2019 (arXiv 1910.01108), section 2

Bare squares are the business of the few tokens and channels of a decoder that are a hundred times larger than others
(Sun et al. 2024, arXiv 2402.17762); the other three are not.

Shapes: T tokens, D width; [T, D] stands for [..., D].

`layer_pairs` says which layer learns from which. With S layers in the student and T in the teacher, counted from 0:

    uniform   s -> floor((s + 1) T / S) - 1   the last from the last; TinyBERT: g(m) = m T / S counted from 1, where
                                              that is whole
    last      s -> T - S + s                  the teacher's last S; "PKD-last", Sun et al. 2019 (arXiv 1908.09355)
    final     S - 1 -> T - 1                  one pair; MiniLM, Wang et al. 2020 (arXiv 2002.10957)
"""

from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor

from compress.base.errors import InputError, one_of
from compress.train.losses.loss_sum import Summed, rows_of, same_shape, same_width, sum_of, valid_rows, wide

Distance = Literal["mse", "unit", "relative", "cosine"]

LEAST_SQUARE = 1e-12  # is added to a hidden state's squared length: one of zeros has no direction, but a gradient


def features_loss(
    student_TD: Tensor, teacher_TD: Tensor, *, mask_T: Tensor | None = None, distance: Distance = "mse"
) -> Summed:
    """Sum over tokens whose mask [...] is not 0, all without one. No gradient goes to the teacher."""
    one_of("distance", distance, get_args(Distance))
    same_width("widths", student_TD, teacher_TD, "a projector of the student's takes one to the other")
    same_shape("hidden states", student_TD, teacher_TD)
    rows = valid_rows(student_TD, None, mask_T)
    student, teacher = wide(rows_of(student_TD, rows)), wide(rows_of(teacher_TD.detach(), rows))
    if distance == "mse":
        return sum_of((student - teacher).square().mean(-1))
    if distance == "relative":
        return sum_of((student - teacher).square().sum(-1) / (teacher.square().sum(-1) + LEAST_SQUARE))
    cosine = (unit(student) * unit(teacher)).sum(-1)
    return sum_of((1 - cosine) * (2 if distance == "unit" else 1))


def unit(x: Tensor) -> Tensor:
    """Divided by its length over the last dimension; zeros stay zeros."""
    return x * (x.square().sum(-1, keepdim=True) + LEAST_SQUARE).rsqrt()


Mapped = Literal["uniform", "last", "final"]
Pair = tuple[int, int]


def layer_pairs(student: int, teacher: int, how: Mapped | Sequence[Pair] = "uniform") -> list[Pair]:
    """(layer of the student, layer of the teacher), in the student's order; or those given, if there are such layers.

    student, teacher: how many layers each has. A student deeper than its teacher needs explicit pairs.
    """
    for whose, layers in (("student", student), ("teacher", teacher)):
        if layers < 1:
            raise InputError(f"a {whose} of {layers} layers; allowed: 1 or more")
    if not isinstance(how, str):
        return _checked(student, teacher, [(int(s), int(t)) for s, t in how])
    one_of("map of layers", how, get_args(Mapped))
    if how == "final":
        return [(student - 1, teacher - 1)]
    if student > teacher:
        raise InputError(
            f"the student has {student} layers, the teacher {teacher}; '{how}' takes no more layers than the teacher "
            f"has: name pairs (layer of the student, layer of the teacher), or use 'final'"
        )
    if how == "last":
        return [(s, teacher - student + s) for s in range(student)]
    return [(s, (s + 1) * teacher // student - 1) for s in range(student)]


def _checked(student: int, teacher: int, pairs: list[Pair]) -> list[Pair]:
    if not pairs:
        raise InputError("no pairs of layers; give at least one (layer of the student, layer of the teacher)")
    for pair in pairs:
        for whose, layer, layers in zip(("student", "teacher"), pair, (student, teacher), strict=True):
            if not 0 <= layer < layers:
                raise InputError(f"pair {pair}: the {whose} has no layer {layer}; allowed: 0 to {layers - 1}")
        if pairs.count(pair) > 1:
            raise InputError(f"pair {pair} is given twice; a weight says what counts more")
    return sorted(pairs)
