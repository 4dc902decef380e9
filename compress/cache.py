"""Key-value caches in 8 bits: what attentions keep of every token, as codes.

An attention of transformers hands its new keys and values [B, H, T, D] to `cache.update` and multiplies what comes
back. `RoundCache`, a hook on the attention, puts itself in between: codes go into whatever cache there is (growing,
static, sliding, offloaded: it moves bytes and does not look at them), and what comes back is decoded. Without a cache
keys and values are rounded all the same, so that a forward over a whole text computes what generation will.

    granularity  scale                  kept
    tensor       k_scale, v_scale [1]        in the checkpoint, found by calibration
    head         k_scale, v_scale [H, 1, 1]  in the checkpoint, found by calibration
    token        for every token and head    behind the D codes of the token, as the four bytes of a float32

Codes are symmetric: int8, x = s q with s = absmax / 127.5, or float8 e4m3 with s = absmax / 448 (`compress.grid`).
compressed-tensors has one `kv_cache_scheme` for a whole model: tensor, `attn_head`, or (token) dynamic groups of D.

Shapes: B sequences, H key-value heads, T tokens, D elements of a head (of keys and of values, which may differ).
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compress.errors import CheckpointError
from compress.grid import Granularity, Grid, decode, encode, scale_of_range, straight_through

CacheGranularity = Literal["tensor", "head", "token"]
SIDES = ("k", "v")
# What forwards of attentions call their cache.
ARGUMENTS = ("past_key_values", "past_key_value", "layer_past")
SCALE_BYTES = 4  # of a float32
# compressed-tensors rounds the cache of modules with one of these, whose class is called an attention.
KNOWN_PROJECTIONS = ("k_proj", "v_proj", "qkv_proj", "kv_b_proj")


@dataclass(frozen=True, kw_only=True)
class CacheScheme:
    """How a model's keys and values are kept: int8 or float8, one scale per tensor, head, or token and head."""

    type: Literal["int", "float"] = "int"
    granularity: CacheGranularity = "token"

    def __str__(self) -> str:
        return f"{'int8' if self.type == 'int' else 'fp8'} cache, per {self.granularity}"

    @property
    def dynamic(self) -> bool:
        """Whether scales are fitted as tokens come."""
        return self.granularity == "token"

    @property
    def grid(self) -> Grid:
        """Of keys and values laid out as rows with a column for each head."""
        granularity: dict[CacheGranularity, Granularity] = {"tensor": "tensor", "head": "channel", "token": "token"}
        return Grid(bits=8, type=self.type, granularity=granularity[self.granularity])


@dataclass(frozen=True)
class CacheCodes:
    """What was decided about the cache of one attention: its scheme and the scales of keys and values, [1] or
    [H, 1, 1] in their stored dtype (None where they are fitted to every token)."""

    scheme: CacheScheme
    scales: tuple[Tensor, Tensor] | None = None


def encode_states(x: Tensor, scheme: CacheScheme, scale: Tensor | None) -> Tensor:
    """Keys or values [B, H, T, D] as the bytes that a cache keeps, int8 [B, H, T, D], or [B, H, T, D + 4] per token."""
    work = x.float()
    if scheme.dynamic:
        absmax = work.abs().amax(-1, keepdim=True)
        scale, _ = scale_of_range(-absmax, absmax, scheme.grid, torch.float32)
    assert scale is not None
    codes = encode(work, _working(scale, x), torch.zeros((), device=x.device), scheme.grid)
    stored = codes.to(scheme.grid.storage).view(torch.int8)
    return torch.cat([stored, scale.view(torch.int8)], -1) if scheme.dynamic else stored


def decode_states(stored: Tensor, scheme: CacheScheme, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The keys or values that bytes stand for, in a dtype. Bytes of 0 are values of 0."""
    if scheme.dynamic:
        stored, scale = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    assert scale is not None
    codes = stored.contiguous().view(scheme.grid.storage).float()
    return decode(codes, _working(scale, stored), torch.zeros((), device=stored.device), dtype).to(dtype)


def _working(scale: Tensor, like: Tensor) -> Tensor:
    """A scale to compute with: that of a head which is always 0 may be 0 in a narrower dtype than the checkpoint's."""
    return scale.to(like.device, torch.float32).clamp(min=torch.finfo(torch.float32).tiny)


class CacheHook:
    """Stands between an attention and its cache (a hook before forward, with keywords). argument, position: where the
    attention gets its cache."""

    def __init__(self, argument: str, position: int) -> None:
        self.argument, self.position, self.active = argument, position, True

    def keep(
        self, attention: nn.Module, cache: Any, keys: Tensor, values: Tensor, *more: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """Hand new keys and values to the cache (None: there is none); returns all that are kept."""
        raise NotImplementedError

    def __call__(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.active:
            return None
        if len(args) > self.position:
            between = _Between(self, attention, args[self.position])
            return (*args[: self.position], between, *args[self.position + 1 :]), kwargs
        return args, {**kwargs, self.argument: _Between(self, attention, kwargs.get(self.argument))}


class _Between:
    """Takes the place of a cache in one call of an attention."""

    def __init__(self, hook: CacheHook, attention: nn.Module, cache: Any) -> None:
        self.hook, self.attention, self.cache = hook, attention, cache

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.hook.keep(self.attention, self.cache, keys, values, *args, **kwargs)

    def get_seq_length(self, *args: Any) -> int:
        return 0 if self.cache is None else self.cache.get_seq_length(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["cache"], name)


class RoundCache(CacheHook):
    """Keeps codes. Fixed scales are the attention's buffers k_scale and v_scale."""

    def __init__(self, scheme: CacheScheme, argument: str, position: int) -> None:
        super().__init__(argument, position)
        self.scheme = scheme

    def keep(
        self, attention: nn.Module, cache: Any, keys: Tensor, values: Tensor, *more: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """Encode, hand to the cache, decode what it returns. Gradients pass as if nothing were rounded."""
        scales = [getattr(attention, f"{side}_scale", None) for side in SIDES]
        if not self.scheme.dynamic:
            for x, scale in zip((keys, values), scales, strict=True):
                if scale is None or len(scale) not in (1, x.shape[1]):
                    held = "none" if scale is None else f"{len(scale)}"
                    raise CheckpointError(
                        f"a {type(attention).__name__} fills its cache with {x.shape[1]} heads and the checkpoint has "
                        f"{held} of their scales"
                    )
        stored = [encode_states(x, self.scheme, s) for x, s in zip((keys, values), scales, strict=True)]
        if cache is not None:
            stored = cache.update(*stored, *more, **named)
        k, v = (decode_states(b, self.scheme, s, keys.dtype) for b, s in zip(stored, scales, strict=True))
        return straight_through(keys, k), straight_through(values, v)


class SeeCache(CacheHook):
    """Shows new keys and values to somebody and changes nothing."""

    def __init__(self, see: Callable[[Tensor, Tensor], None], argument: str, position: int) -> None:
        super().__init__(argument, position)
        self.see = see

    def keep(
        self, attention: nn.Module, cache: Any, keys: Tensor, values: Tensor, *more: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        self.see(keys, values)
        return (keys, values) if cache is None else cache.update(keys, values, *more, **named)


def cache_argument(module: nn.Module) -> tuple[str, int] | None:
    """The name and position of the argument in which an attention gets its cache; None where it takes none, or fills
    it with something else than keys and values (the state of a convolution or a linear attention, an index)."""
    if not hasattr(module, "layer_idx") or not _calls_update(type(module)):
        return None
    names = list(inspect.signature(module.forward).parameters)
    return next(((name, names.index(name)) for name in ARGUMENTS if name in names), None)


def _calls_update(kind: type[nn.Module]) -> bool:
    """Whether the code of a class names `update`, by which a cache gets keys and values."""
    members = (member for base in kind.__mro__ if base is not nn.Module for member in vars(base).values())
    functions = (inspect.unwrap(member) for member in members if inspect.isfunction(member))
    return any("update" in function.__code__.co_names for function in functions)


def attentions(block: nn.Module) -> dict[str, nn.Module]:
    """The modules inside a block that fill a key-value cache: the innermost ones that take one."""
    taking = {name: module for name, module in block.named_modules() if cache_argument(module) is not None}
    around = {
        name for name in taking for inner in taking if inner != name and inner.startswith(f"{name}." if name else "")
    }
    return {name: module for name, module in taking.items() if name not in around}


def hold_scales(attention: nn.Module, scales: Sequence[Tensor], persistent: bool) -> None:
    """Give an attention the scales of its keys and values. persistent: as a part of its state_dict."""
    for side, scale in zip(SIDES, scales, strict=True):
        attention.register_buffer(f"{side}_scale", scale, persistent)


def round_cache(attention: nn.Module, scheme: CacheScheme) -> RoundCache:
    """From now on this attention keeps codes, by the scales that it holds."""
    found = cache_argument(attention)
    assert found is not None
    hook = RoundCache(scheme, *found)
    attention.register_forward_pre_hook(hook, with_kwargs=True)
    return hook


@contextmanager
def seeing_caches(seen: Mapping[nn.Module, Callable[[Tensor, Tensor], None]]) -> Iterator[None]:
    """Within: what attentions hand to their caches is shown to a function of each, (keys, values)."""
    handles = []
    for attention, see in seen.items():
        found = cache_argument(attention)
        assert found is not None
        handles.append(attention.register_forward_pre_hook(SeeCache(see, *found), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def rounded_cache(module: nn.Module) -> RoundCache | None:
    """The hook by which an attention keeps codes; None where it does not."""
    return next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, RoundCache)), None)


def has_cache_format(attention: nn.Module) -> bool:
    """Whether readers of compressed-tensors round the cache of this module: they know it by its names."""
    named = "attention" in type(attention).__name__.lower() and any(hasattr(attention, n) for n in KNOWN_PROJECTIONS)
    found = cache_argument(attention)
    return named and found is not None and found[0] != "layer_past"


def cache_entry(scheme: CacheScheme, head_size: int | None) -> dict[str, Any]:
    """A scheme as `kv_cache_scheme` has it. head_size: D, for scales of tokens."""
    strategy = {"tensor": "tensor", "head": "attn_head", "token": "group"}[scheme.granularity]
    entry = {"num_bits": 8, "type": scheme.type, "symmetric": True, "dynamic": scheme.dynamic, "strategy": strategy}
    return {**entry, "group_size": head_size} if scheme.dynamic else entry


def read_cache_scheme(entry: Mapping[str, Any]) -> CacheScheme:
    """The scheme of a `kv_cache_scheme`. Raises CheckpointError for one that cannot be read."""
    granularity: dict[tuple[str, bool], CacheGranularity] = {
        ("tensor", False): "tensor",
        ("attn_head", False): "head",
        ("group", True): "token",
    }
    strategy, dynamic = entry.get("strategy") or "tensor", entry.get("dynamic", False)
    number, kind = entry.get("num_bits", 8), entry.get("type", "int")
    per = granularity.get((strategy, dynamic)) if isinstance(dynamic, bool) else None
    if number != 8 or kind not in ("int", "float") or not entry.get("symmetric", True) or per is None:
        raise CheckpointError(
            f"the key-value cache is stored as {dict(entry)}, which cannot be read; readable: 8 bits, int or float, "
            "symmetric, static per tensor or attn_head, or dynamic in groups of a head"
        )
    return CacheScheme(type=kind, granularity=per)
