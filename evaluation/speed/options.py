"""The options of a benchmark of a model, checked before anything is measured."""

from dataclasses import dataclass

import torch

from compress.base.device import find_device
from compress.base.errors import InputError, one_of
from compress.evaluation.speed.decoder import VARIANTS

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A whole model: batches of `prompt` tokens, then `new` steps."""

    model: str
    schemes: tuple[str, ...] | None
    batches: tuple[int, ...]
    prompt: int
    new: int
    dtype: torch.dtype
    device: torch.device
    rounds: int
    quick: bool
    trust_remote_code: bool = False


def model_options(
    model: str,
    *,
    schemes: str | None = None,
    batch: str | None = None,
    prompt: int | None = None,
    new: int | None = None,
    dtype: str = DTYPES[0],
    device: str | None = None,
    rounds: int | None = None,
    quick: bool = False,
    trust_remote_code: bool = False,
) -> ModelOptions:
    """Options with defaults for those that are None, smaller on a CPU. schemes: only for a shape. Raises InputError."""
    names = None
    if schemes is not None:
        names = tuple(one_of("scheme", name.strip(), VARIANTS) for name in schemes.split(","))
        if len(set(names)) < len(names):
            raise InputError(f"--schemes {schemes!r} names one twice")
    batches = parse_numbers("batch", batch) if batch is not None else None
    for name, value in (("prompt", prompt), ("new", new)):
        if value is not None and value < 1:
            raise InputError(f"--{name} {value}; give at least 1 token")
    arithmetic, target = parse_dtype(dtype), find_device(device)
    gpu = target.type == "cuda"
    default_prompt, default_new = ((512, 32) if quick else (2048, 128)) if gpu else ((32, 8) if quick else (128, 16))
    return ModelOptions(
        model=model,
        schemes=names,
        batches=batches or ((1, 16) if gpu else (1, 4)),
        prompt=prompt or default_prompt,
        new=new or default_new,
        dtype=arithmetic,
        device=target,
        rounds=check_rounds(rounds, 3 if quick else 10),
        quick=quick,
        trust_remote_code=trust_remote_code,
    )


def parse_numbers(name: str, text: str) -> tuple[int, ...]:
    """1,8,64 -> (1, 8, 64). Raises InputError for anything that is not a positive number."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise InputError(f"--{name} {text!r}; give positive numbers with commas between them, like 1,16")
    return tuple(dict.fromkeys(int(word) for word in words))


def parse_dtype(name: str) -> torch.dtype:
    """The dtype of an option. Raises InputError."""
    dtype = getattr(torch, one_of("dtype", name, DTYPES))
    assert isinstance(dtype, torch.dtype)
    return dtype


def check_rounds(rounds: int | None, default: int) -> int:
    """The number of rounds. Raises InputError for none."""
    if rounds is not None and rounds < 1:
        raise InputError(f"--rounds {rounds}; give at least 1")
    return rounds or default
