"""Attentions and their key-value caches: finds the modules that fill one, and hooks between a module and its cache.

An attention of transformers passes its new keys and values [B, H, T, D] to `cache.update` and multiplies by the keys
and values that it returns. A `CacheHook` intercepts this call for any cache (growing, static, sliding, offloaded) and
without one.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from compress.model.calls import removing, without_data
from compress.weights.kv_cache_codes import SCALES

# Names of the cache argument in the forwards of attentions.
ARGUMENTS = ("past_key_values", "past_key_value", "layer_past")
# compressed-tensors rounds the cache of modules that have one of these and "attention" in the name of their class.
KNOWN_PROJECTIONS = ("k_proj", "v_proj", "qkv_proj", "kv_b_proj")


class CacheHook:
    """A hook between an attention and its cache (a forward pre-hook, with keywords). argument, position: the name and
    the position of the attention's cache argument."""

    def __init__(self, argument: str, position: int) -> None:
        self.argument, self.position, self.active = argument, position, True

    def keep(
        self, attention: nn.Module, cache: Any, keys: Tensor, values: Tensor, *more: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """Pass new keys and values to the cache (None: there is none). Returns all keys and values kept."""
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
    """A hook that calls `see` with new keys and values and changes nothing."""

    def __init__(self, see: Callable[[Tensor, Tensor], None], argument: str, position: int) -> None:
        super().__init__(argument, position)
        self.see = see

    def keep(
        self, attention: nn.Module, cache: Any, keys: Tensor, values: Tensor, *more: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        self.see(keys, values)
        return (keys, values) if cache is None else cache.update(keys, values, *more, **named)


def cache_argument(module: nn.Module) -> tuple[str, int] | None:
    """(Name, position) of an attention's cache argument. None for a module that takes no cache, or fills it with
    something other than keys and values (the state of a convolution or of a linear attention, an index)."""
    if not hasattr(module, "layer_idx") or not _calls_update(type(module)):
        return None
    names = list(inspect.signature(module.forward).parameters)
    return next(((name, names.index(name)) for name in ARGUMENTS if name in names), None)


def _calls_update(kind: type[nn.Module]) -> bool:
    """True for a class whose code names `update`, the method by which a cache gets keys and values."""
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
    """In the body, calls a function of each attention with the (keys, values) that it passes to its cache."""
    handles = []
    for attention, see in seen.items():
        found = cache_argument(attention)
        assert found is not None
        handles.append(attention.register_forward_pre_hook(SeeCache(see, *found), with_kwargs=True))
    with removing(handles):
        yield


def has_cache_format(attention: nn.Module) -> bool:
    """True where readers of compressed-tensors round the cache of this module: they recognise it by names."""
    named = "attention" in type(attention).__name__.lower() and any(hasattr(attention, n) for n in KNOWN_PROJECTIONS)
    found = cache_argument(attention)
    return named and found is not None and found[0] != "layer_past"


def head_sizes(model: nn.Module) -> set[int]:
    """The head sizes in the caches of a model of tokens, from one forward on tensors without data. The forward may end
    early, at the first operation that depends on data; head sizes seen before count. A sharded model is replaced by an
    empty one of the same configuration, since a forward that ends early would leave FSDP in the middle of its state.
    """
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
            with without_data(model) as mode:
                model(input_ids=mode.from_tensor(torch.zeros(1, 2, dtype=torch.long, device=device)), use_cache=False)
        except Exception:  # noqa: BLE001 - tracing may fail in any way; sizes seen before it count
            pass
    return sizes
