"""Finds the form of a decoder block: which products it has, what stands between them, and how.

Nothing is concluded from names of classes. A trial (`trace.py`) has what each module was given and returned; a form is
known if every number of the trial follows from the numbers before it by the operations of steps.

    norm -> q, k, v -> (norms of heads) -> (rotary embedding) -> cache, attention -> o -> (norm) -> + x
         -> norm -> gate, up -> act(gate) up, or act(up) -> down -> (norm) -> +

or with the MLP beside attention. An MLP of another form (a mixture of experts) is called as it is.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, scaled_dot_product_attention, silu

from compress.inference.steps.parts import (
    TOLERANCE,
    AttentionForm,
    BlockForm,
    MlpForm,
    NormForm,
    ProductColumns,
    States,
    addend,
    error,
    itself_and_norms,
    multiplies,
    near,
    same,
)
from compress.inference.steps.trace import Called, Trace, UnknownFormError
from compress.kernels.step_functions import Activation


def form_of(trace: Trace) -> BlockForm:
    """The form of a block. Raises UnknownFormError."""
    if trace.x.dtype not in TOLERANCE:
        raise UnknownFormError(f"it computes in {trace.x.dtype}")
    attention, a = attention_form(trace)
    mlp, m, parallel = mlp_form(trace, attention, a)
    orders = _totals(trace, a, m, parallel).items()
    return BlockForm(attention, mlp, parallel, next(order for order, total in orders if same(total, trace.out)))


class ProductPart(NamedTuple):
    """Columns of a product, and what they held in the trial."""

    columns: ProductColumns
    out: Tensor


def attention_form(trace: Trace) -> tuple[AttentionForm, Tensor]:
    """(The first half of a block, what it adds to the residual stream). Raises UnknownFormError."""
    first, rest = ([c for c in calls if multiplies(c)] for calls in (trace.before, trace.after))
    if len(first) not in (1, 3) or not rest or not all(same(called.x, first[0].x) for called in first):
        raise UnknownFormError("attention does not begin with products q, k and v of one input, or one for all")
    norm = next((n for n, out in itself_and_norms(trace.before, trace.x) if same(out, first[0].x)), False)
    if isinstance(norm, bool):
        raise UnknownFormError("what attention reads is no norm of the block's input that is known")
    if trace.attended.beside:
        raise UnknownFormError(f"attention takes {', '.join(sorted(trace.attended.beside))}")
    query, (key, value) = trace.attended.query, trace.kept
    states, output = _states(trace, first), rest[0]
    # Of loud queries and keys, sums in another order tell another token the likeliest.
    given = (query, trace.keys, trace.values, trace.mask)
    result = scaled_dot_product_attention(*given, scale=trace.attended.scale, enable_gqa=True)
    attends = trace.loud or near(output.x.flatten(), _flat(result).flatten())
    if output.out.numel() != trace.x.numel() or not attends:
        raise UnknownFormError("what follows attention does not read its result, and nothing else")
    after, a = addend(trace.after, output.out)
    return AttentionForm(
        norm=norm,
        products=tuple(called.module for called in first),
        states=states,
        heads=query.shape[1],
        key_heads=key.shape[1],
        size=query.shape[3],
        value_size=value.shape[3],
        scale=trace.attended.scale,
        output=output.module,
        after=after,
    ), a


def _flat(states: Tensor) -> Tensor:
    """[batch, heads, 1, size] as [batch, heads * size]."""
    return states.transpose(1, 2).flatten(1)


def _states(trace: Trace, first: Sequence[Called]) -> States:
    """Find how queries, keys and values are made of products. Raises UnknownFormError."""
    query, (key, value) = trace.attended.query, trace.kept
    for parts in _thirds(first, [states.shape[1] * states.shape[3] for states in (query, key, value)]):
        of_query, of_key = _fit_states(trace, parts[0], query), _fit_states(trace, parts[1], key)
        if of_query and of_key and of_query[1] == of_key[1] and same(parts[2].out, _flat(value)):
            query_columns, key_columns, value_columns = (part.columns for part in parts)
            return States(query_columns, key_columns, value_columns, of_query[0], of_key[0], of_query[1])
    raise UnknownFormError("queries, keys and values are not those products, normalized and rotated by halves")


def _thirds(first: Sequence[Called], widths: Sequence[int]) -> Iterator[list[ProductPart]]:
    """Ways to take queries, keys and values, of these widths, from products."""
    if len(first) == 1:
        out, start, parts = first[0].out.flatten(1), 0, []
        for width in widths:
            parts.append(
                ProductPart(ProductColumns(first[0].module, start, start + width), out[:, start : start + width])
            )
            start += width
        if out.shape[1] == start:
            yield parts
        return
    for order in permutations(first):
        if all(called.out.shape[-1] == width for called, width in zip(order, widths, strict=True)):
            yield [
                ProductPart(ProductColumns(called.module, 0, called.out.shape[-1]), called.out.flatten(1))
                for called in order
            ]


def rotate_by_halves(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first numbers of each head [batch, heads, 1, size], as many as there are cosines."""
    turning, left = states[..., : cos.shape[-1]], states[..., cos.shape[-1] :]
    a, b = turning.chunk(2, -1)
    turned = turning * cos.unsqueeze(1) + torch.cat([-b, a], -1) * sin.unsqueeze(1)
    return torch.cat([turned, left], -1)


def _fit_states(trace: Trace, part: ProductPart, expected: Tensor) -> tuple[NormForm | None, int] | None:
    """(Norm, numbers of a head that turn) that make queries or keys of a part of a product; None where none do."""
    batch, heads, _, size = expected.shape
    cos, sin = trace.cos, trace.sin
    for norm, out in itself_and_norms(trace.before, part.out):
        if norm is not None and norm.size not in (heads * size, size):
            continue
        states = out.reshape(batch, heads, 1, size)
        if same(states, expected):
            return norm, 0
        if cos is None or sin is None or cos.shape[-1] > size or cos.dtype != states.dtype:
            continue
        if near(rotate_by_halves(states, cos, sin), expected):
            return norm, cos.shape[-1]
    return None


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: silu,
    Activation.GELU_TANH: lambda x: gelu(x, approximate="tanh"),
    Activation.GELU: gelu,
    Activation.RELU: relu,
}


def mlp_form(trace: Trace, attention: AttentionForm, a: Tensor) -> tuple[MlpForm, Tensor, bool]:
    """(The second half, what it adds, whether it stands beside attention)."""
    rest = [called for called in trace.after if multiplies(called)][1:]
    for parallel in (False, True):
        x = trace.x if parallel else trace.x + a
        for norm, out in itself_and_norms([*trace.before, *trace.after], x):
            shared = parallel and norm is not None and norm == attention.norm
            for form, m in _mlps(trace, rest, norm, out, shared):
                if any(same(total, trace.out) for total in _totals(trace, a, m, parallel).values()):
                    return form, m, parallel
    raise UnknownFormError("its MLP reads or adds something else than the residual stream, or a known norm of it")


def _mlps(
    trace: Trace, rest: Sequence[Called], norm: NormForm | None, x: Tensor, shared: bool
) -> Iterator[tuple[MlpForm, Tensor]]:
    """MLPs that read x, with what they add."""
    own = None if shared else norm
    first = [called for called in rest[:-1] if same(called.x, x)]
    if rest and first and len(first) == len(rest) - 1:
        for gate, up, activation in _gates(first, rest[-1].x) if rest[-1].out.numel() == trace.x.numel() else ():
            after, m = addend(trace.after, rest[-1].out)
            products = tuple(called.module for called in first)
            yield MlpForm(own, shared, None, products, gate, up, activation, rest[-1].module, after), m
    for called in trace.after:
        if called.alone and same(called.x, x) and called.out.numel() == trace.x.numel() and not multiplies(called):
            after, m = addend(trace.after, called.out)
            yield MlpForm(own, shared, called.module, (), None, None, Activation.SILU, None, after), m


def _gates(first: Sequence[Called], y: Tensor) -> Iterator[tuple[ProductColumns, ProductColumns | None, Activation]]:
    """Ways to make y of products of one input; the nearest, if any is near enough."""
    outs = [called.out for called in first]
    width = y.shape[-1]
    ways: list[tuple[ProductColumns, Tensor, ProductColumns | None, Tensor | None]] = []
    if len(first) == 1 and outs[0].shape[-1] == width:
        ways = [(ProductColumns(first[0].module, 0, width), outs[0], None, None)]
    elif len(first) == 1 and outs[0].shape[-1] == 2 * width:
        halves = [(ProductColumns(first[0].module, s, s + width), outs[0][..., s : s + width]) for s in (0, width)]
        ways = [(*halves[0], *halves[1]), (*halves[1], *halves[0])]
    elif len(first) == 2 and all(out.shape[-1] == width for out in outs):
        whole = [(ProductColumns(called.module, 0, width), called.out) for called in first]
        ways = [(*whole[0], *whole[1]), (*whole[1], *whole[0])]
    fits = []
    for gate, x, up, times in ways:
        for activation, act in ACTIVATIONS.items():
            made = act(x) if times is None else act(x) * times
            fits.append((error(made.reshape(y.shape), y), gate, up, activation))
    if fits:
        least, *best = min(fits, key=lambda entry: entry[0])
        if least <= TOLERANCE[y.dtype]:
            yield tuple(best)  # type: ignore[misc]


SUMS = {False: (("xa", "sm"),), True: (("xa", "sm"), ("am", "sx"), ("xm", "sa"))}


def _totals(trace: Trace, a: Tensor, m: Tensor, parallel: bool) -> dict[tuple[str, str], Tensor]:
    """The block's result for each order of the two additions."""
    shape = trace.out.shape
    terms = {"x": trace.x, "a": a.reshape(shape), "m": m.reshape(shape)}
    found = {}
    for one, two in SUMS[parallel]:
        terms["s"] = terms[one[0]] + terms[one[1]]
        found[one, two] = terms[two[0]] + terms[two[1]]
    return found
