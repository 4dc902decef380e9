"""Attentions that keep codes: keys and values are encoded on their way into the cache and decoded on their way out.

Any kind of cache can hold the codes: it moves bytes and does not interpret them. Without a cache, keys and values are
rounded all the same, so that a forward over a whole text computes the same as generation.

Rotated keys (R3) are turned back on their way out, in place of rotating queries: the products are the same, and an
attention need not take part.
"""

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compress.base.errors import CheckpointError
from compress.model.attention import CacheHook, cache_argument
from compress.weights.grid import straight_through
from compress.weights.kv_cache_codes import SCALES, CacheScheme, decode_states, encode_states


class RoundCache(CacheHook):
    """A hook that stores keys and values as codes. Fixed scales are the attention's buffers k_scale and v_scale."""

    def __init__(self, scheme: CacheScheme, argument: str, position: int) -> None:
        super().__init__(argument, position)
        self.scheme = scheme

    def keep(
        self, attention: nn.Module, cache: Any, keys: Tensor, values: Tensor, *more: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """Encode keys and values, pass the codes to the cache and decode those that it returns. Gradients pass as if
        nothing were rounded. Raises CheckpointError for scales that do not fit the heads."""
        scales = [getattr(attention, name, None) for name in SCALES]
        if not self.scheme.dynamic:
            for x, scale in zip((keys, values), scales, strict=True):
                if scale is None or len(scale) not in (1, x.shape[1]):
                    held = "none" if scale is None else f"{len(scale)}"
                    raise CheckpointError(
                        f"a {type(attention).__name__} fills its cache with {x.shape[1]} heads and the checkpoint has "
                        f"{held} of their scales"
                    )
        k_scale, v_scale = scales
        k = encode_states(keys, self.scheme, k_scale, keys=True)
        v = encode_states(values, self.scheme, v_scale)
        if cache is not None:
            k, v = cache.update(k, v, *more, **named)
        k = decode_states(k, self.scheme, k_scale, keys, keys=True)
        v = decode_states(v, self.scheme, v_scale, values)
        return straight_through(keys, k), straight_through(values, v)


def round_cache(attention: nn.Module, scheme: CacheScheme) -> tuple[RoundCache, RemovableHandle]:
    """Store this attention's KV cache as codes, with the scales in its buffers. Returns the hook and its remover."""
    found = cache_argument(attention)
    assert found is not None
    hook = RoundCache(scheme, *found)
    return hook, attention.register_forward_pre_hook(hook, with_kwargs=True)


def cache_hook(module: nn.Module) -> RoundCache | None:
    """The hook by which an attention stores its KV cache as codes; None where it has none."""
    return next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, RoundCache)), None)
