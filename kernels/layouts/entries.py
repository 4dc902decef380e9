"""Entries of a sparse weight, as every kernel reads them and as they are stored: compressed sparse rows.

N outputs, K inputs, E entries; those of row n are row_start[n] to row_start[n + 1], their columns rise.
"""

from typing import NamedTuple

from torch import Tensor


class Entries(NamedTuple):
    """row_start int32 [N + 1]; column int16 or int32 [E]; value [E] in any floating dtype."""

    row_start: Tensor
    column: Tensor
    value: Tensor

    @staticmethod
    def of(
        row_start: Tensor | None = None, column: Tensor | None = None, value: Tensor | None = None
    ) -> "Entries | None":
        """The entries, or None where an operator was given none."""
        if row_start is None or column is None or value is None:
            return None
        return Entries(row_start, column, value)
