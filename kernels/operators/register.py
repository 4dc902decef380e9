"""Torch operators written in Python, and the way around their layers where these have nothing to do.

`torch.library.custom_op` makes an operator of a function: one node of a compiled graph, with a shape for tracing and a
gradient. A call of it passes the dispatcher, the Python kernels of autograd and of the backend, and checks on the way:
30 to 100 us, more than a small product takes. Calls of eager code without a gradient need none of that, so the function
is called itself, below autograd as the dispatcher would call it: the same kernels on the same tensors.

Everything else goes the long way: where a graph is compiled, exported or traced, a tensor is a subclass (fake,
distributed) or a negated view, a gradient is recorded, a transform of torch.func or a mode (of dispatch, of functions)
is at work, or a profiler that shows operators by their names.
"""

from collections.abc import Callable
from functools import wraps
from types import NoneType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

# Exactly these: subclasses need the dispatcher.
TENSORS = (Tensor, nn.Parameter)
OTHERS = (int, float, bool, NoneType)
_C: Any = torch._C


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

    def __call__(self, *arguments: Any) -> Tensor:
        """Call the function with these arguments, bypassing the dispatcher where that is safe."""
        ...

    def register_fake(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Register a function that returns the shape of the result, for tracing."""
        ...

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., Any] | None = None
    ) -> None:
        """Register the gradient, and the function that saves the arguments it needs."""
        ...


def operator(name: str) -> Callable[[Callable[..., Tensor]], Operator]:
    """Register a function of tensors, numbers and None as the operator NAME. It must change none of its arguments.
    Autocast does not affect its computation."""

    def registering(of_tensors: Callable[..., Tensor]) -> Operator:
        @wraps(of_tensors)
        def function(*arguments: Any) -> Tensor:
            with _C._DisableAutocast():
                return of_tensors(*arguments)

        registered: Any = torch.library.custom_op(name, mutates_args=())(function)

        @wraps(function)
        def call(*arguments: Any) -> Tensor:
            if torch.compiler.is_compiling() or needs_dispatch(arguments):
                result: Tensor = registered(*arguments)
                return result
            with _C._AutoDispatchBelowAutograd():
                return function(*arguments)

        found: Any = call
        found.registered = registered
        found.register_fake, found.register_autograd = registered.register_fake, registered.register_autograd
        return cast(Operator, found)

    return registering
