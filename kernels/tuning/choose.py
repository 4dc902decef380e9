"""Chooses the compiled configuration that runs a product of given sizes: the measured one (`table`), or else one
derived here. Pure functions of sizes and device, so that graphs can be captured.

Derived: the tiles are those whose compiled loops do not spill and take the fewest instructions per weight (counted by
`tests/support/compiled/aot.py`), the splits fill the processors twice; neither has been tuned by measurement on a GPU.
What an architecture has decides:

    9.0           wgmma takes weights from registers: large tiles
    10.x          tcgen05 takes them from a memory of its own, where unpacked weights have to be written first (7 to 9
                  instructions per weight); two warps per tile get the instruction of the others, 2.4 for 16 tokens
    8.x, 12.x     mma.sync takes activations through registers, too, and large tiles spill

From DEQUANTIZE_TOKENS tokens on, a weight is dequantized block by block and multiplied by cuBLAS. Writing and reading
it costs 4.5 bytes per 4-bit weight whatever M is, 413 / M of the time of the product at 4.3 TB/s and 790 TFLOP/s
(assumed of an H200): a fifth at 2048 tokens, a loss that is known, against a fused kernel whose share of cuBLAS's
speed is not. Below, the fused kernel has to reach less than that to be the better one.

Batch-invariant products (`invariant`) have one configuration for any number of tokens: the order of the sums of a
token, and so its result to the last bit, then does not depend on which others are multiplied with it. It is the one
derived for INVARIANT_TOKENS, whose loop keeps up with memory when there is one token and with the matrix products when
there are many; K is split for one wave of programs, not for two, because the parts are written for all tokens.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch

from compress.kernels import workspace
from compress.kernels.layouts.scale_blocks import BLOCK as SCALE_BLOCK
from compress.kernels.layouts.words import planar_block
from compress.kernels.tuning import table
from compress.kernels.tuning.table import DEQUANTIZE, Choice, ProductKind, Shape, cdiv

# Streaming multiprocessors of an H200; only used to size grids where no device can be asked.
PROCESSORS = 132
SPLIT_LIMIT = 8
BLOCKS_PER_SPLIT = 4
# Columns of one step of the int8 product.
W8A8_BLOCK_K = 128
DEQUANTIZE_TOKENS = 2048
# The largest tile of few tokens.
INVARIANT_TOKENS = 64


@dataclass(frozen=True)
class Device:
    """The device that a choice depends on. names: to look up, the most specific first; processors: streaming
    multiprocessors; capability: compute capability, 90 for 9.0."""

    names: tuple[str, ...] = ()
    processors: int = PROCESSORS
    capability: int = 90

    @property
    def hopper(self) -> bool:
        """True for a device with wgmma."""
        return self.capability // 10 == 9

    @property
    def tensor_memory(self) -> bool:
        """True for a device with tcgen05."""
        return self.capability // 10 in (10, 11)


@cache
def kind_of(op: str, bits: int, group_size: int, zero: bool, dtype: torch.dtype) -> ProductKind:
    """The key of the tuning table for such a product; `table` explains the fields."""
    return ProductKind(op, bits, group_size, zero, str(dtype).removeprefix("torch."))


def choose(kind: ProductKind, M: int, N: int, K: int, device: Device) -> Choice:
    """The configuration that runs the product of [M, K] and [N, K]: measured if there is one, else derived."""
    found = table.lookup(kind, device.names, M, N, K)
    if found is not None and (found == DEQUANTIZE or _counted(found, M, N)):
        return found
    if kind.op in ("weight_only", "levels") and M >= DEQUANTIZE_TOKENS:
        return DEQUANTIZE
    return derived(kind, M, N, K, device)


def choose_shape(kind: ProductKind, M: int, N: int, K: int, device: Device) -> Shape:
    """The configuration of a product that only a fused kernel computes: w8a8."""
    chosen = choose(kind, M, N, K, device)
    assert isinstance(chosen, Shape)
    return chosen


def invariant(kind: ProductKind, N: int, K: int, device: Device) -> Shape:
    """The configuration of a batch-invariant product, the same for any number of tokens."""
    return derived(kind, INVARIANT_TOKENS, N, K, replace(device, processors=device.processors // 2))


@cache
def derived(kind: ProductKind, M: int, N: int, K: int, device: Device) -> Shape:
    """The derived configuration of the fused kernel, from sizes and device alone."""
    if kind.op == "w8a8":
        return fused_w8a8(M, N, K, device)
    if kind.op == "int8_activation":
        return fused_int8(M, N, K, kind.bits, kind.group_size, device)
    return fused(M, N, K, kind.bits, kind.group_size, device)


def fused(M: int, N: int, K: int, bits: int, group_size: int, device: Device) -> Shape:
    """The derived configuration of the weight-only kernel."""
    if M > 64:
        if device.tensor_memory:
            return Shape(128, 128, num_stages=3)
        if not device.hopper:
            return Shape(64, 256, num_warps=8, num_stages=3)
        wide = cdiv(M, 128) * cdiv(N, 256)
        if wide >= device.processors or group_size == 32:
            return Shape(128, 256, num_warps=8, num_stages=3)
        return Shape(128, 128, num_stages=3)
    rows, warps = (64, 2) if device.tensor_memory else (128, 4)
    split = splits(cdiv(N, rows), cdiv(K, planar_block(bits)), device.processors)
    return Shape(max(16, table.bucket(M)), rows, split, warps)


def fused_int8(M: int, N: int, K: int, bits: int, group_size: int, device: Device) -> Shape:
    """The derived configuration of the kernel for planar words and int8 tokens; its tcgen05 code spills."""
    if M <= 32 or (M <= 64 and device.hopper):
        return fused(M, N, K, bits, group_size, device)
    if M <= 64 or device.tensor_memory:
        split = splits(cdiv(N, 64), cdiv(K, planar_block(bits)), device.processors) if M <= 64 else 1
        return Shape(64, 64, split, num_warps=2)
    return Shape(128 if device.hopper else 64, 128 if device.hopper else 256, num_warps=8, num_stages=3)


def grouped(shape: Shape, pairs: int, experts: int, N: int, steps: int, device: Device) -> Shape:
    """A configuration for the mean tokens of an expert, its K split for the tiles of all of them."""
    tiles = most_tiles(pairs, experts, shape.block_m) * cdiv(N, shape.block_n)
    split = splits(tiles, steps, device.processors) if shape.block_m <= 64 else 1
    return replace(shape, split_k=split)


def most_tiles(pairs: int, experts: int, block_m: int) -> int:
    """An upper bound on the tiles of tokens, however pairs are spread over experts; pairs without expert count as one
    more."""
    used = min(experts + 1, pairs)
    return used + (pairs - used) // block_m


def splits(tiles: int, blocks: int, processors: int, least: int = BLOCKS_PER_SPLIT) -> int:
    """Programs per tile: they fill the processors twice, each with at least `least` steps to do."""
    split = SPLIT_LIMIT if tiles <= workspace.SLICE else 1
    while split > 1 and (split * tiles > 2 * processors or split * least > blocks):
        split //= 2
    return split


def fused_w8a8(M: int, N: int, K: int, device: Device) -> Shape:
    """The derived configuration of the int8 kernel."""
    if M <= 64:
        split = splits(cdiv(N, 128), cdiv(K, W8A8_BLOCK_K), device.processors)
        return Shape(max(16, table.bucket(M)), 128, split_k=split)
    if M <= 256 or not device.hopper:
        return Shape(128, 128, num_warps=8, num_stages=3)
    return Shape(256, 128, num_warps=8, num_stages=3)


def fused_fp8_blocks(M: int, N: int, K: int, device: Device) -> Shape:
    """The derived configuration of the float8 kernel with scales of blocks. It holds the sums of a block beside those
    of all, so tiles are at most half the int8 kernel's; by tcgen05 at most 64 x 64."""
    if M <= 64 or device.tensor_memory:
        rows, warps = (64, 2) if device.tensor_memory else (128, 4)
        tiles = cdiv(M, 64) * cdiv(N, rows)
        split = splits(tiles, cdiv(K, SCALE_BLOCK), device.processors)
        return Shape(min(64, max(16, table.bucket(M))), rows, split, warps)
    return Shape(128, 128, num_warps=8, num_stages=3)


def fused_trellis(M: int, N: int, steps: int, device: Device) -> Shape:
    """The derived configuration of the kernel for trellis codes, of so many steps over the inputs."""
    block_m = min(32, max(16, table.bucket(M)))
    return Shape(block_m, 128, splits(cdiv(N, 128), steps, device.processors, 1), num_warps=8, num_stages=2)


@cache
def device_of(device: torch.device) -> Device:
    """The description of a torch device; of one that is not CUDA (the interpreter), an H200 without measurements."""
    if device.type != "cuda":
        return Device()
    properties = torch.cuda.get_device_properties(device)
    names = (properties.name, f"{properties.major}.{properties.minor}")
    return Device(names, properties.multi_processor_count, 10 * properties.major + properties.minor)


def _counted(shape: Shape, M: int, N: int) -> bool:
    """True where the workspace has counters for all tiles that are split."""
    return shape.split_k == 1 or cdiv(M, shape.block_m) * cdiv(N, shape.block_n) <= workspace.SLICE
