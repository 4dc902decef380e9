"""The options of a benchmark, checked before anything is measured."""

from dataclasses import dataclass

import torch

from compress.base.device import find_device
from compress.base.errors import InputError, one_of
from compress.evaluation.speed.decoder import DENSE, VARIANTS
from compress.kernels.measure import benchmark

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, kw_only=True)
class LinearOptions:
    """Products of M tokens with N x K weights."""

    shapes: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    rounds: int
    quick: bool
    tune: bool


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


def linear_options(
    *,
    shapes: str | None = None,
    tokens: str | None = None,
    dtype: str = DTYPES[0],
    device: str | None = None,
    rounds: int | None = None,
    quick: bool = False,
    tune: bool = False,
) -> LinearOptions:
    """Options with defaults for those that are None: Llama's layers on a GPU, square ones on a CPU. Raises
    InputError."""
    found = parse_shapes(shapes) if shapes is not None else None
    numbers = parse_numbers("tokens", tokens) if tokens is not None else None
    kind, target = _dtype(dtype), find_device(device)
    gpu = target.type == "cuda"
    if tune and not gpu:
        raise InputError(f"--tune measures Triton's kernels on a GPU; the device is {target}")
    if tune and kind == torch.float32:
        raise InputError("--tune with --dtype float32; Triton's kernels take float16 and bfloat16")
    default_shapes: tuple[tuple[int, int], ...] = benchmark.GPU_SHAPES if gpu else benchmark.CPU_SHAPES
    default_tokens: tuple[int, ...] = benchmark.GPU_TOKENS if gpu else benchmark.CPU_TOKENS
    if quick:
        default_shapes, default_tokens = default_shapes[:1], default_tokens[:4:2]
    return LinearOptions(
        shapes=found or default_shapes,
        tokens=numbers or default_tokens,
        dtype=kind,
        device=target,
        rounds=_rounds(rounds, 10 if quick else 50),
        quick=quick,
        tune=tune,
    )


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
    kind, target = _dtype(dtype), find_device(device)
    gpu = target.type == "cuda"
    default_prompt, default_new = (2048, 128) if gpu else (128, 16)
    if quick:
        default_prompt, default_new = (512, 32) if gpu else (32, 8)
    return ModelOptions(
        model=model,
        schemes=names,
        batches=batches or ((1, 16) if gpu else (1, 4)),
        prompt=prompt or default_prompt,
        new=new or default_new,
        dtype=kind,
        device=target,
        rounds=_rounds(rounds, 3 if quick else 10),
        quick=quick,
        trust_remote_code=trust_remote_code,
    )


def default_schemes() -> tuple[str, ...]:
    """The default schemes of a shape, the dense model first."""
    return (DENSE, "w4a16", "w8a8")


def parse_numbers(name: str, text: str) -> tuple[int, ...]:
    """1,8,64 -> (1, 8, 64). Raises InputError for anything that is not a positive number."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise InputError(f"--{name} {text!r}; give positive numbers with commas between them, like 1,16")
    return tuple(dict.fromkeys(int(word) for word in words))


def parse_shapes(text: str) -> tuple[tuple[int, int], ...]:
    """4096x4096,14336x4096 -> ((4096, 4096), (14336, 4096)): outputs x inputs. Raises InputError."""
    shapes = []
    for word in text.split(","):
        sizes = word.strip().split("x")
        if len(sizes) != 2 or not all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes):
            raise InputError(f"--shapes {text!r}; give outputs x inputs, like 4096x4096,14336x4096")
        N, K = map(int, sizes)
        if K % benchmark.GROUP:
            raise InputError(f"--shapes {word.strip()!r}: {K} inputs; a multiple of {benchmark.GROUP} is needed")
        shapes.append((N, K))
    return tuple(dict.fromkeys(shapes))


def _rounds(given: int | None, default: int) -> int:
    if given is not None and given < 1:
        raise InputError(f"--rounds {given}; give at least 1")
    return given or default


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, one_of("dtype", name, DTYPES))
    assert isinstance(found, torch.dtype)
    return found
