"""Chooses the device to work on and checks, before anything is loaded, that torch can use it."""

import os
from contextlib import suppress

import torch

from compress.base.errors import InputError, first_line


def find_device(wanted: str | torch.device | None) -> torch.device:
    """The device of that name, or a GPU if there is one (the rank's own), or the CPU. Raises InputError."""
    if wanted is None:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    try:
        device = torch.device(wanted)
        torch.zeros(1, device=device).item()  # `meta` holds no values
    except (RuntimeError, AssertionError, ImportError) as error:
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise InputError(
            f"device {str(wanted)!r} cannot be used ({_why(error)}); usable here: {', '.join(['cpu', *gpus])}"
        ) from None
    return device


def is_absent(device: torch.device) -> bool:
    """True for a GPU where there is none."""
    return device.type == "cuda" and not torch.cuda.is_available()


def planned_device(wanted: str | torch.device) -> torch.device:
    """The device of that name, which may be a GPU where there is none. Raises InputError."""
    with suppress(RuntimeError):  # no device of this name: `find_device` says so
        if is_absent(device := torch.device(wanted)):
            return device
    return find_device(wanted)


def _why(error: Exception) -> str:
    """A short reason. torch's own messages list every kind of device, or every backend of an operator."""
    said = first_line(error)
    if said.startswith("Expected one of"):
        return "torch knows no device of this name"
    return "this build of torch has no such device" if isinstance(error, NotImplementedError | ImportError) else said
