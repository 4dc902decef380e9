"""Attentions and their key-value caches: which modules fill one, and hooks that stand in between.

An attention of transformers hands its new keys and values [B, H, T, D] to `cache.update` and multiplies what comes
back. A `CacheHook` puts itself in between, whatever cache there is (growing, static, sliding, offloaded, none).
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from compress.model.calls import without_data
from compress.weights.caches import SCALES

# What forwards of attentions call their cache.
ARGUMENTS = ("past_key_values", "past_key_value", "layer_past")
# compressed-tensors rounds the cache of modules with one of these, whose class is called an attention.
KNOWN_PROJECTIONS = ("k_proj", "v_proj", "qkv_proj", "kv_b_proj")


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
    for name, scale in zip(SCALES, scales, strict=True):
        attention.register_buffer(name, scale, persistent)


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


def has_cache_format(attention: nn.Module) -> bool:
    """Whether readers of compressed-tensors round the cache of this module: they know it by its names."""
    named = "attention" in type(attention).__name__.lower() and any(hasattr(attention, n) for n in KNOWN_PROJECTIONS)
    found = cache_argument(attention)
    return named and found is not None and found[0] != "layer_past"


def head_sizes(model: nn.Module) -> set[int]:
    """The sizes of heads in the caches of a model of tokens, from one forward on tensors without data, as far as that
    goes: what depends on data ends it. Of a sharded model, an empty one of its configuration is asked: a forward that
    ends half-way would leave FSDP's state behind."""
    sizes: set[int] = set()
    if isinstance(model, FSDPModule):
        own: Any = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
        with torch.device("meta"):
            model = own._from_config(model.config)

    def see(keys: Tensor, values: Tensor) -> None:
        sizes.update((keys.shape[-1], values.shape[-1]))

    device = next(model.parameters()).device
    with seeing_caches(dict.fromkeys(attentions(model).values(), see)):
        try:
            with without_data() as mode:
                model(input_ids=mode.from_tensor(torch.zeros(1, 2, dtype=torch.long, device=device)), use_cache=False)
        except Exception:  # noqa: BLE001 - whatever tracing cannot do: what was seen before it counts
            pass
    return sizes
