"""Finds NaN and infinite weights before any work."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from compress.base.collectives import Comm
from compress.base.errors import CheckpointError, InputError
from compress.model.deferred import values_of
from compress.model.tensors import stored_buffers

AT_ONCE = 2**24  # values checked at a time


DAMAGED = "the model is damaged: fetch it again"


def check_finite(model: nn.Module, comm: Comm, why: Callable[[str], str] = lambda name: DAMAGED) -> None:
    """Raises InputError, which names the first parameter with a NaN or infinite value or codes that cannot be read, or
    the first stored buffer with a NaN (masks hold infinities). why: the cause and what to do, for the tensor of a name.
    Each rank checks a part of the tensors. A collective.
    """
    problem: tuple[int, str] | None = None
    named: list[tuple[str, Tensor, bool]] = [(name, p, True) for name, p in model.named_parameters()]
    named += [(name, buffer, False) for name, buffer in stored_buffers(model)]
    for i, (name, tensor, finite) in enumerate(named):
        sharded = isinstance(tensor, DTensor)
        if problem is None and (sharded or i % comm.world == comm.rank) and _is_readable(tensor):
            try:
                held = tensor.to_local() if isinstance(tensor, DTensor) else values_of(tensor)
                if is_damaged(held.detach(), finite):
                    problem = (i, f"{name} has non-finite weights (NaN or infinity); {why(name)}")
            except CheckpointError as error:  # of codes
                problem = (i, str(error))
    found = min((each for each in comm.gather_objects(problem) if each is not None), default=None)
    if found is not None:
        raise InputError(found[1])


def _is_readable(tensor: Tensor) -> bool:
    """True for a strided tensor with values. Others are refused elsewhere (`model.layers.check_tensors`)."""
    return not (is_lazy(tensor) or tensor.is_meta) and tensor.layout is torch.strided


def is_damaged(tensor: Tensor, finite: bool) -> bool:
    """True for a tensor that holds NaN or, where it has to be finite, an infinity."""
    if not tensor.is_floating_point():
        return False
    for part in tensor.flatten().split(AT_ONCE):
        values = part.float() if part.element_size() == 1 else part
        # A finite sum proves all values finite in one fast pass. Large values may overflow it: then check each value.
        if bool(values.sum(dtype=torch.promote_types(values.dtype, torch.float32)).isfinite()):
            continue
        if bool(values.isnan().any()) or (finite and bool(values.isinf().any())):
            return True
    return False
