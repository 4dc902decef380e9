"""Finds the form of the first half of a block: up to what attention adds to the residual stream."""

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from compress.inference.steps.norm_form import added, itself_and_norms, norms_of
from compress.inference.steps.parts import AttentionForm, NormForm, ProductColumns, States, multiplies, near, same
from compress.inference.steps.trace import Called, Trace, UnknownFormError


class ProductPart(NamedTuple):
    """ProductColumns of a product, and what they held in the trial."""

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
    attends = trace.loud or near(output.x.flatten(), _attended(trace).flatten())
    if output.out.numel() != trace.x.numel() or not attends:
        raise UnknownFormError("what follows attention does not read its result, and nothing else")
    after, a = added(trace.after, output.out)
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


def _attended(trace: Trace) -> Tensor:
    """The result of attention by torch."""
    attended = trace.attended
    given = (attended.query, trace.keys, trace.values, trace.mask)
    return _flat(scaled_dot_product_attention(*given, scale=attended.scale, enable_gqa=True))


def _flat(states: Tensor) -> Tensor:
    """[batch, heads, 1, size] as [batch, heads * size]."""
    return states.transpose(1, 2).flatten(1)


def _states(trace: Trace, first: Sequence[Called]) -> States:
    """Find how queries, keys and values are made of products. Raises UnknownFormError."""
    query, (key, value) = trace.attended.query, trace.kept
    for parts in _thirds(first, [states.shape[1] * states.shape[3] for states in (query, key, value)]):
        of_query, of_key = _made(trace, parts[0], query), _made(trace, parts[1], key)
        if of_query and of_key and of_query[1] == of_key[1] and same(parts[2].out, _flat(value)):
            query_columns, key_columns, value_columns = (part.columns for part in parts)
            return States(query_columns, key_columns, value_columns, of_query[0], of_key[0], of_query[1])
    raise UnknownFormError("queries, keys and values are not those products, normalized and rotated by halves")


def _thirds(first: Sequence[Called], widths: Sequence[int]) -> Iterator[list[ProductPart]]:
    """Ways to take queries, keys and values, of these widths, from products."""
    if len(first) == 1:
        out, start, found = first[0].out.flatten(1), 0, []
        for width in widths:
            found.append(
                ProductPart(ProductColumns(first[0].module, start, start + width), out[:, start : start + width])
            )
            start += width
        if out.shape[1] == start:
            yield found
        return
    for order in permutations(first):
        if all(called.out.shape[-1] == width for called, width in zip(order, widths, strict=True)):
            yield [
                ProductPart(ProductColumns(called.module, 0, called.out.shape[-1]), called.out.flatten(1))
                for called in order
            ]


def rotated_by_halves(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first numbers of each head [batch, heads, 1, size], as many as there are cosines."""
    turning, left = states[..., : cos.shape[-1]], states[..., cos.shape[-1] :]
    a, b = turning.chunk(2, -1)
    turned = turning * cos.unsqueeze(1) + torch.cat([-b, a], -1) * sin.unsqueeze(1)
    return torch.cat([turned, left], -1)


def _made(trace: Trace, part: ProductPart, expected: Tensor) -> tuple[NormForm | None, int] | None:
    """(Norm, numbers of a head that turn) that make queries or keys of a part of a product; None where none do."""
    batch, heads, _, size = expected.shape
    cos, sin = trace.cos, trace.sin
    for norm, out in _itself_and_norms_of_heads(trace, part.out, heads * size, size):
        states = out.reshape(batch, heads, 1, size)
        if same(states, expected):
            return norm, 0
        if cos is None or sin is None or cos.shape[-1] > size or cos.dtype != states.dtype:
            continue
        if near(rotated_by_halves(states, cos, sin), expected):
            return norm, cos.shape[-1]
    return None


def _itself_and_norms_of_heads(
    trace: Trace, out: Tensor, width: int, size: int
) -> Iterator[tuple[NormForm | None, Tensor]]:
    """A part of a product, and norms of all of it or of each head."""
    yield None, out
    yield from ((norm, normed) for norm, normed in norms_of(trace.before, out) if norm.size in (width, size))
