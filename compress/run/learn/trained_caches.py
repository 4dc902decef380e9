"""Key-value caches while a model is trained: keys and values are what the cache will hold, gradients pass unchanged.

The hook is that of inference (`runtime.load.caches`), behind the rotation of keys, with the scales that were found
before.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn
from torch.utils.hooks import RemovableHandle

from compress.model.attention import hold_scales
from compress.runtime.load.caches import round_cache
from compress.weights.caches import SCALES, CacheCodes


@dataclass
class TrainedCaches:
    """Rounding of keys and values in a model's attentions. decided: {attention: how it keeps them}."""

    model: nn.Module
    decided: Mapping[str, CacheCodes]
    handles: list[RemovableHandle] = field(default_factory=list)

    def on(self) -> None:
        """Make attentions round keys and values. The scales are not in the model's state_dict."""
        for name, codes in self.decided.items():
            attention = self.model.get_submodule(name)
            if codes.scales is not None:
                device = next(attention.parameters()).device
                hold_scales(attention, [scale.to(device) for scale in codes.scales], persistent=False)
            self.handles.append(round_cache(attention, codes.scheme)[1])

    def off(self) -> None:
        """Stop rounding, and remove the scales."""
        while self.handles:
            self.handles.pop().remove()
        for name in self.decided:
            attention = self.model.get_submodule(name)
            for scale in SCALES:
                attention._buffers.pop(scale, None)
                attention._non_persistent_buffers_set.discard(scale)

    @contextmanager
    def rounding(self) -> Iterator[None]:
        """Calls `on` for the context, `off` after it."""
        try:
            self.on()
            yield
        finally:
            self.off()
