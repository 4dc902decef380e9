"""Pairs the layers of a student with layers of its teacher, where they are of different depths.

With S layers in the student and T in the teacher, both counted from 0:

    uniform   s -> floor((s + 1) T / S) - 1   the last from the last; TinyBERT, Jiao et al. 2020 (arXiv 1909.10351):
                                              g(m) = m T / S counted from 1, where that is whole
    last      s -> T - S + s                  the teacher's last S; "PKD-last", Sun et al. 2019 (arXiv 1908.09355)
    final     S - 1 -> T - 1                  one pair; MiniLM, Wang et al. 2020 (arXiv 2002.10957)
"""

from collections.abc import Sequence
from typing import Literal, get_args

from compress.errors import InputError, one_of

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
