"""The layers that compute on compressed weights, by the format of their term.

A new format with a kernel is a line here; one without is multiplied by its own `Format.product` (`SumLinear`).
"""

from compress.inference.layers.base import RUNS, QuantLinear, run_of
from compress.inference.layers.levels import TableLinear, layer_of_levels
from compress.inference.layers.packed import ActOrderLinear, PackedLinear
from compress.inference.layers.rows import Fp8BlockLinear, Fp8Linear, Int8Linear, RowLinear
from compress.inference.layers.sparse import SparseLinear
from compress.inference.layers.sparse24 import PackedSparse24Linear, Sparse24Linear
from compress.inference.layers.sums import SumLinear
from compress.inference.layers.ternary import FewLevelsLinear
from compress.inference.layers.tiles import TilesLinear
from compress.inference.layers.trellis import TrellisLinear
from compress.weights.formats.act_order import ActOrder
from compress.weights.formats.codes import FineGrained, Float8Blocks, Float8Rows, Int8Rows, Int8Table, Packed
from compress.weights.formats.levels import LEVEL_FORMATS, ModelOptNVFP4, NF4Float32
from compress.weights.formats.sparse import SparseRows
from compress.weights.formats.sparse24 import PackedSparse24, Sparse24
from compress.weights.formats.ternary import BinaryCodes, TernaryCodes
from compress.weights.formats.tiles import Tiles
from compress.weights.formats.trellis import TrellisCodes

__all__ = [
    "Fp8BlockLinear",
    "Fp8Linear",
    "Int8Linear",
    "PackedLinear",
    "PackedSparse24Linear",
    "QuantLinear",
    "RowLinear",
    "Sparse24Linear",
    "SparseLinear",
    "SumLinear",
    "TableLinear",
    "TilesLinear",
    "TrellisLinear",
    "run_of",
]

RUNS |= {kind: layer for kind in LEVEL_FORMATS.values() if (layer := layer_of_levels(kind.on)) is not None}
RUNS |= {
    Packed: PackedLinear,
    Int8Table: PackedLinear,
    ModelOptNVFP4: TableLinear,
    NF4Float32: TableLinear,
    TernaryCodes: FewLevelsLinear,
    BinaryCodes: FewLevelsLinear,
    Int8Rows: Int8Linear,
    Float8Rows: Fp8Linear,
    Float8Blocks: Fp8BlockLinear,
    FineGrained: Fp8BlockLinear,
    ActOrder: ActOrderLinear,
    Tiles: TilesLinear,
    TrellisCodes: TrellisLinear,
    SparseRows: SparseLinear,
    Sparse24: Sparse24Linear,
    PackedSparse24: PackedSparse24Linear,
    None: SumLinear,
}
