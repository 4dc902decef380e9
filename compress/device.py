"""Which device to work on, and whether it can be used, before anything is loaded."""

import os

import torch

from compress.errors import InputError, first_line


def find_device(wanted: str | torch.device | None) -> torch.device:
    """The device of that name, or a GPU if there is one (the rank's own), or the CPU. Raises InputError."""
    if wanted is None:
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    try:
        found = torch.device(wanted)
        torch.zeros(1, device=found).item()  # `meta` holds no values
    except (RuntimeError, AssertionError) as error:
        gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        raise InputError(
            f"device {str(wanted)!r} cannot be used ({first_line(error)}); usable here: {', '.join(['cpu', *gpus])}"
        ) from None
    return found
