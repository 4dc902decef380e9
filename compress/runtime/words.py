"""What layers have in common whose codes ride in words of 4 or of 8 bits, whichever holds them."""

from compress.runtime.base import QuantLinear
from compress.weights.scheme import NARROW, WIDE


class WordLinear(QuantLinear):
    """Codes on a grid of 2 to 8 bits."""

    @property
    def container(self) -> int:
        """Bits of a code in its word."""
        return NARROW if self.scheme.weights.bits <= NARROW else WIDE

    @property
    def group_size(self) -> int:
        """Inputs that share a scale; -1: all of them."""
        return self.scheme.weights.group_size or -1

    @property
    def lift(self) -> int:
        """What is added to unsigned codes of the scheme's bits so that the middle stays the middle."""
        return int(2 ** (self.container - 1) - 2 ** (self.scheme.weights.bits - 1))
