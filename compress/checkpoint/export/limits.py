"""Limits of layouts of integer codes, stated once for their exporters and for the engines that open them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Codes that a layout holds, or that an engine runs.

    bits: their widths. groups: inputs that share a scale, -1 for all of an output; None: any multiple of `unit`, and
    -1. inputs: what those of a layer are a multiple of. asymmetric: they may have zero points. half: scales are
    float16, whatever dtype the model has.
    """

    bits: Sequence[int] = range(2, 9)
    groups: Sequence[int] | None = None
    unit: int = 1
    inputs: int = 1
    asymmetric: bool = True
    half: bool = False

    def why_not_group(self, size: int) -> str | None:
        """The sizes of groups that there are, if this is none of them; None if it is. size: -1 for one scale per
        output."""
        if self.groups is None:
            return f"multiples of {self.unit}" if size > 0 and size % self.unit else None
        return None if size in self.groups else ", ".join(map(str, self.groups))


# By the word of the export.
LIMITS = {
    # Sizes that GPTQModel takes; codes fill words of 32 bits.
    "gptq": Limits((2, 3, 4, 8), (-1, 16, 32, 64, 128, 256, 512, 1024), inputs=32, asymmetric=False, half=True),
    "awq": Limits((4,), (-1, 16, 32, 64, 128), half=True),
    # Blocks of 32; those of Q4_1 hold some asymmetric codes, as their minima turn out.
    "gguf": Limits(unit=32, inputs=32, asymmetric=False, half=True),
    "onnx": Limits((2, 4, 8), unit=16),
    # Its groups are of 32, 64 and 128; larger ones repeat their scale. A zero point times a scale would be rounded.
    "mlx": Limits((2, 3, 4, 5, 6, 8), unit=32, inputs=32, asymmetric=False),
}
