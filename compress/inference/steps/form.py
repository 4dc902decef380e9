"""Finds the form of a decoder block: which products it has, what stands between them, and how.

Nothing is concluded from names of classes. A trial (`trace.py`) has what each module was given and returned; a form is
known if every number of the trial follows from the numbers before it by the operations of `kernels.cpu.steps`.

    norm -> q, k, v -> (norms of heads) -> (rotary embedding) -> cache, attention -> o -> (norm) -> + x
         -> norm -> gate, up -> act(gate) up, or act(up) -> down -> (norm) -> +

or with the MLP beside attention. An MLP of another form (a mixture of experts) is called as it is.
"""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from compress.inference.steps.attention_form import attention_form
from compress.inference.steps.norm_form import added, itself_and_norms
from compress.inference.steps.parts import (
    TOLERANCE,
    AttentionForm,
    BlockForm,
    MlpForm,
    NormForm,
    ProductColumns,
    error,
    multiplies,
    same,
)
from compress.inference.steps.trace import Called, Trace, UnknownFormError
from compress.kernels.cpu.steps import Activation


def form_of(trace: Trace) -> BlockForm:
    """The form of a block. Raises UnknownFormError."""
    if trace.x.dtype not in TOLERANCE:
        raise UnknownFormError(f"it computes in {trace.x.dtype}")
    attention, a = attention_form(trace)
    mlp, m, parallel = mlp_form(trace, attention, a)
    return BlockForm(attention, mlp, parallel, sums_of(trace, a, m, parallel))


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
            after, m = added(trace.after, rest[-1].out)
            products = tuple(called.module for called in first)
            yield MlpForm(own, shared, None, products, gate, up, activation, rest[-1].module, after), m
    for called in trace.after:
        if called.alone and same(called.x, x) and called.out.numel() == trace.x.numel() and not multiplies(called):
            after, m = added(trace.after, called.out)
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
    found = []
    for gate, x, up, times in ways:
        for activation, act in ACTIVATIONS.items():
            made = act(x) if times is None else act(x) * times
            found.append((error(made.reshape(y.shape), y), gate, up, activation))
    if found:
        least, *best = min(found, key=lambda entry: entry[0])
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


def sums_of(trace: Trace, a: Tensor, m: Tensor, parallel: bool) -> tuple[str, str]:
    return next(order for order, total in _totals(trace, a, m, parallel).items() if same(total, trace.out))
