"""Room behind the keys and values of a cache, so that a step writes one token instead of copying all of them.

The cache stays one of transformers: what its layers hold after a step is what their own `update` would have left there.
Only the memory behind a growing layer has room for more tokens, of which the layer does not know. Whoever replaces its
tensors (cropping, beams, a copy of the cache) makes the next step copy them once, into room of their own.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

LEAST_ROOM = 128  # tokens
SHARE_OF_ROOM = 8  # one in so many tokens, so that copies take a bounded share of the time
KEYS_DIMENSION = 2  # of tokens in [batch, heads, tokens, size]


@dataclass
class Room:
    """Memory of a growing layer: it holds tokens [first, last)."""

    keys: Tensor
    values: Tensor
    first: int
    last: int
    shown: tuple[Tensor, Tensor]  # the views that the layer holds


class CacheSlot(NamedTuple):
    """The place in keys and values that a step writes to, and the tokens [first, stop) that it attends to. length: the
    place as a tensor, which the step increments; `place` is then unknown."""

    keys: Tensor
    values: Tensor
    place: int
    first: int
    stop: int
    length: Tensor | None = None


_rooms: WeakKeyDictionary[Any, Room] = WeakKeyDictionary()


def layer_of(cache: Any, index: int) -> Any:
    """The layer of a cache that a step may write to itself; None where its own `update` must."""
    if not isinstance(cache, Cache) or type(cache).update is not Cache.update or cache.offloading:
        return None
    layer: Any = cache.layers[index] if index < len(cache.layers) else None
    kind = type(layer)
    growing = kind is DynamicLayer or (kind is DynamicSlidingWindowLayer and not layer.record_past)
    if not (growing or kind is StaticLayer) or not layer.is_initialized or layer.keys is None:
        return None
    return layer


def slot_in(layer: Any, shape: tuple[int, int, int, int], like: Tensor, by_length: bool) -> CacheSlot | None:
    """The slot of the next token; None where the layer holds other sequences, heads, sizes or numbers than `like`, or
    on another device. shape: batch, heads of keys, sizes of a key and of a value. by_length: leave the place in a layer
    of fixed size a tensor. Nothing is changed but for the room behind the layer."""
    keys, values = layer.keys, layer.values
    batch, heads, size, value_size = shape
    if keys.dtype is not like.dtype or values.dtype is not like.dtype or keys.device != like.device:
        return None
    if keys.dim() != len(shape) or keys.shape != (batch, heads, keys.shape[2], size):
        return None
    if values.shape != (batch, heads, keys.shape[2], value_size):
        return None
    if type(layer) is StaticLayer:
        if not keys.stride(3) == values.stride(3) == 1:
            return None
        if by_length:
            return CacheSlot(keys, values, -1, 0, keys.shape[2], layer.cumulative_length)
        place = int(layer.cumulative_length)
        return CacheSlot(keys, values, place, 0, keys.shape[2]) if place < keys.shape[2] else None
    room = _rooms.get(layer)
    if room is None or room.shown[0] is not keys or room.shown[1] is not values or room.last == room.keys.shape[2]:
        room = _rooms[layer] = _with_room(keys, values)
        layer.keys, layer.values = room.shown
    return CacheSlot(room.keys, room.values, room.last, room.first, room.last + 1)


def _with_room(keys: Tensor, values: Tensor) -> Room:
    count = keys.shape[KEYS_DIMENSION]
    total = count + max(LEAST_ROOM, count // SHARE_OF_ROOM)
    made = [x.new_empty(*x.shape[:KEYS_DIMENSION], total, x.shape[-1]) for x in (keys, values)]
    shown = tuple(new.narrow(KEYS_DIMENSION, 0, count).copy_(x) for new, x in zip(made, (keys, values), strict=True))
    return Room(made[0], made[1], 0, count, (shown[0], shown[1]))


def take(layer: Any, slot: CacheSlot) -> None:
    """Tell the layer that the slot is filled."""
    if type(layer) is StaticLayer:
        if slot.length is None:
            layer.cumulative_length.add_(1)
        return
    room = _rooms[layer]
    room.last = slot.stop
    if type(layer) is DynamicSlidingWindowLayer:
        layer.cumulative_length += 1
        room.first = max(room.first, room.last - (layer.sliding_window - 1))
    count = room.last - room.first
    room.shown = (
        room.keys.narrow(KEYS_DIMENSION, room.first, count),
        room.values.narrow(KEYS_DIMENSION, room.first, count),
    )
    layer.keys, layer.values = room.shown
