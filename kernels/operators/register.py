"""Torch operators written in Python, and the way around their layers where these have nothing to do.

    @operator("compress::NAME", outputs(lambda weight, *_: weight.shape[0]))
    def product(x, weight, bias, ...)              [..., N], of weights that are frozen: only x gets a gradient

    @gradient_operator(product, bias=None)
    def product_gradient(grad, shape, weight, bias, ...)       the gradient of x, of this shape, as an operator, too

`torch.library.custom_op` makes an operator of a function: one node of a compiled graph, with a shape for tracing and a
gradient. A call of it passes the dispatcher, the Python kernels of autograd and of the backend, and checks on the way:
30 to 100 us, more than a small product takes. Calls of eager code without a gradient need none of that, so the function
is called itself, below autograd as the dispatcher would call it: the same kernels on the same tensors.

Everything else goes the long way: where a graph is compiled, exported or traced, a tensor is a subclass (fake,
distributed) or a negated view, a gradient is recorded, a transform of torch.func or a mode (of dispatch, of functions)
is at work, or a profiler that shows operators by their names.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from types import NoneType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.library import infer_schema

# Exactly these: subclasses need the dispatcher.
TENSORS = (Tensor, nn.Parameter)
OTHERS = (int, float, bool, NoneType, tuple)
_C: Any = torch._C
Function = Callable[..., Tensor]


def needs_dispatch(arguments: tuple[Any, ...]) -> bool:
    """True for a call with these arguments that has to pass the dispatcher, for any of the reasons above."""
    recorded = torch.is_grad_enabled()
    for given in arguments:
        kind = type(given)
        if kind in TENSORS:
            if (recorded and given.requires_grad) or given.is_neg():
                return True
        elif kind not in OTHERS:
            return True
    return bool(
        _C._len_torch_dispatch_stack()
        or _C._len_torch_function_stack()
        or _C._are_functorch_transforms_active()
        or _C._get_tracing_state() is not None
        or _C._autograd._profiler_enabled()
        or forward_ad._current_level >= 0
    )


class Operator(Protocol):
    """A torch operator that takes positional arguments. registered: torch's object for it."""

    registered: Any
    __name__: str

    def __call__(self, *arguments: Any) -> Tensor:
        """Call the function with these arguments, bypassing the dispatcher where that is safe."""
        ...


def outputs(count: Callable[..., int]) -> Callable[..., Tensor]:
    """The shape of products, for tracing: [..., N] of x [..., K], by the count of outputs of the other arguments."""
    return lambda x, *weight: x.new_empty(*x.shape[:-1], count(*weight))


def operator(
    name: str,
    like: Callable[..., Tensor],
    schema: str | None = None,
    at_once: Callable[..., Tensor | None] | None = None,
) -> Callable[[Function], Operator]:
    """Register a function of tensors, numbers and None as the operator NAME. It must change none of its arguments.
    Autocast does not affect its computation.

    like: returns an empty tensor in the shape of the result, for tracing. schema: where the signature does not say it.
    at_once: an operator of C++ that is asked first, and returns None where it does not take a call; a graph holds it
    instead.
    """

    def registering(of_tensors: Function) -> Operator:
        @wraps(of_tensors)
        def function(*arguments: Any) -> Tensor:
            with _C._DisableAutocast():
                return of_tensors(*arguments)

        registered: Any = torch.library.custom_op(name, function, mutates_args=(), schema=schema)
        registered.register_fake(like)

        @wraps(function)
        def call(*arguments: Any) -> Tensor:
            if at_once is not None and (made := at_once(*arguments)) is not None:
                return made
            if torch.compiler.is_compiling() or needs_dispatch(arguments):
                result: Tensor = registered(*arguments)
                return result
            with _C._AutoDispatchBelowAutograd():
                return function(*arguments)

        found: Any = call
        found.registered = registered
        return cast(Operator, found)

    return registering


def gradient(product: Operator) -> Callable[[Function], Function]:
    """Register a function (grad, shape, *arguments) that returns the gradient of the first argument of an operator,
    which has this shape; arguments: the others."""

    def registering(of_grad: Function) -> Function:
        def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            ctx.shape, others = tuple(inputs[0].shape), inputs[1:]
            ctx.save_for_backward(*(each for each in others if isinstance(each, Tensor)))
            ctx.others = [None if isinstance(each, Tensor) else (each,) for each in others]

        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            saved = iter(ctx.saved_tensors)
            others = [next(saved) if each is None else each[0] for each in ctx.others]
            return of_grad(grad, ctx.shape, *others), *(None,) * len(others)

        product.registered.register_autograd(backward, setup_context=save)
        return of_grad

    return registering


def gradient_operator(product: Operator, twice: bool = True, **exact: Any) -> Callable[[Function], Operator]:
    """`gradient`, as an operator of its own, which one node of a compiled graph calls. Its gradient is the product, if
    `twice`. exact: arguments that make that linear in x: no bias, nothing rounded."""
    names = list(inspect.signature(product).parameters)[1:]
    schema = infer_schema(inspect.unwrap(product), mutates_args=()).replace("(Tensor x", "(Tensor grad, SymInt[] shape")

    def registering(of_grad: Function) -> Operator:
        name = f"compress::{inspect.unwrap(of_grad).__name__}"
        grad_operator = operator(name, lambda grad, shape, *_: grad.new_empty(shape), schema)(of_grad)
        gradient(product)(grad_operator)
        if not twice:
            return grad_operator

        @gradient(grad_operator)
        def _(grad: Tensor, _: Any, shape: Any, *others: Any) -> Tensor:
            linear = (exact.get(name, given) for name, given in zip(names, others, strict=True))
            return product(grad, *linear)

        return grad_operator

    return registering
