"""What layers have in common whose codes ride in words of 4 or of 8 bits, whichever holds them."""

from torch import Tensor

from compress.runtime.base import QuantLinear
from compress.weights.scheme import NARROW, WIDE, Scheme


class WordLinear(QuantLinear):
    """Codes on a grid of 2 to 8 bits.

    container: bits of a code in its word. group_size: inputs that share a scale; -1: all of them.
    """

    def __init__(self, scheme: Scheme, in_features: int, out_features: int, bias: Tensor | None) -> None:
        super().__init__(scheme, in_features, out_features, bias)
        # Read at every call, so not through the scheme.
        self.container = NARROW if scheme.weights.bits <= NARROW else WIDE
        self.group_size = scheme.weights.group_size or -1

    @property
    def lift(self) -> int:
        """What is added to unsigned codes of the scheme's bits so that the middle stays the middle."""
        return int(2 ** (self.container - 1) - 2 ** (self.scheme.weights.bits - 1))
