"""The least work of a product by each kind of weight. `ceilings` makes times of it.

bytes        the weight with its scales and sparse rows, read once; x read once; the result written once
operations   2 M N K
peak         of the arithmetic that multiplies: the dtype of x, or int8 where x is rounded to int8 (float8 has no
             measured ceiling)
"""

from collections.abc import Mapping

from compress.recipes.studies.kernels.ceilings import INT8, CallCost

# Share of weights that have a value of their own, where some have; the sizes of SpQR's tiles.
OUTLIERS = 0.01
TILE_GROUP, TILE_ROWS = 16, 16


# kind -> (bits of a weight that is kept; 0: as wide as x, bytes of a scale; 0: as wide as x, whether one per group)
WEIGHTS: Mapping[str, tuple[int, int, bool]] = {
    "dense": (0, 0, False),
    "dense fp32": (32, 0, False),
    "w4": (4, 0, True),
    "w4 sparse": (4, 0, True),
    "spqr": (4, 0, False),
    "2:4": (0, 0, False),
    "2:4 w8": (8, 0, False),
    "2:4 w4": (4, 0, True),
    "mxfp4": (4, 0, True),
    "nvfp4": (4, 0, True),
    "nf4": (4, 0, True),
    "trellis 2": (2, 0, False),
    "trellis 3": (3, 0, False),
    "w8": (8, 0, False),
    "w4a8": (4, 0, True),
    "w8a8": (8, 4, False),
    "fp8": (8, 4, False),
    "fp8 blocks": (8, 0, False),
    "int32": (8, 0, False),
}
# {kind: columns per scale}, where a kind has its own.
GROUPS = {"mxfp4": 32, "nvfp4": 16, "nf4": 64}
INT8_KINDS = ("w4a8", "w8a8", "int32")
FLOAT8, FLOAT8_KINDS = "float8", ("fp8", "fp8 blocks")
SPARSE_KINDS = ("w4 sparse", "spqr")
# Two of four weights, and a bit for each of the four.
HALVED_KINDS = ("2:4", "2:4 w8", "2:4 w4")


def cost(kind: str, M: int, N: int, K: int, width: int, dtype: str, group: int) -> CallCost:
    """The cost of a product [M, K] x [N, K] -> [M, N]. width: bytes of x; dtype: its name; group: columns per scale."""
    bits, scale_bytes, grouped = WEIGHTS[kind]
    kept = bits or 8 * width
    weight = N * K * (kept // 2 + 1 if kind in HALVED_KINDS else kept) // 8
    group = GROUPS.get(kind, group)
    scales = N * (K // group if grouped else 1) * (scale_bytes or width)
    inputs, outputs = M * K * width, M * N * width
    if kind == "dense fp32":
        inputs, outputs, dtype = 4 * M * K, 4 * M * N, "float32"
    if kind in ("dense", "dense fp32", "2:4"):
        scales = 0
    if kind == "fp8 blocks":
        scales = 4 * N * K // 128**2
    if kind == "spqr":  # a byte of codes per group, four numbers per tile
        scales = N * K // TILE_GROUP + N * K // (TILE_GROUP * TILE_ROWS) * 4 * width
    if kind in SPARSE_KINDS:  # 16 bits for a column, a value, 32 bits a row
        scales += round(N * K * OUTLIERS) * (2 + width) + 4 * N
    if kind == "int32":  # int8 in, int32 out, no scales
        scales, inputs, outputs = 0, M * K, M * N * 4
    arithmetic = INT8 if kind in INT8_KINDS else FLOAT8 if kind in FLOAT8_KINDS else dtype
    return CallCost(weight + scales + inputs + outputs, 2 * M * N * K, arithmetic)
