"""Which compiled configuration runs a product of given sizes. Pure functions of sizes, so that graphs can be captured.

The tiles are those whose compiled loops do not spill and take the fewest instructions per weight (`aot`), the splits
fill the processors twice; neither has been tuned by measurement on a GPU. Before Hopper the matrix instruction takes
activations through registers too, and large tiles spill.
"""

from dataclasses import dataclass
from functools import cache

import torch

from compress.kernels import workspace
from compress.kernels.pack import planar_block

# Streaming multiprocessors of an H200; only used to size grids where no device can be asked.
PROCESSORS = 132
SPLIT_LIMIT = 8
BLOCKS_PER_SPLIT = 4
# Columns of one step of the int8 product.
W8A8_BLOCK_K = 128


@dataclass(frozen=True)
class Shape:
    """One compiled configuration: tokens, rows and programs per tile, warps, and depth of the load pipeline."""

    block_m: int
    block_n: int
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4

    def scales_sums(self, group_size: int) -> bool:
        """Whether scaling the sums takes fewer instructions than scaling the weights.

        BLOCK_M multiply-adds per row and group against about a quarter per weight more; measured on the compiled
        loops, where the two are equal near 4 BLOCK_M = group. A group is at most one step of the loop.
        """
        return group_size != -1 and 4 * self.block_m <= min(group_size, 128)


def choose(
    M: int, N: int, K: int, bits: int, group_size: int, processors: int = PROCESSORS, hopper: bool = True
) -> Shape:
    """The configuration of the weight-only product of [M, K] and [N, K]."""
    if M > 64:
        if not hopper:
            return Shape(64, 256, num_warps=8, num_stages=3)
        wide = _cdiv(M, 128) * _cdiv(N, 256)
        if wide >= processors or group_size == 32:
            return Shape(128, 256, num_warps=8, num_stages=3)
        return Shape(128, 128, num_stages=3)
    tiles = _cdiv(N, 128)
    blocks = _cdiv(K, planar_block(bits))
    split = SPLIT_LIMIT if tiles <= workspace.SLICE else 1
    while split > 1 and (split * tiles > 2 * processors or split * BLOCKS_PER_SPLIT > blocks):
        split //= 2
    return Shape(max(16, _power_of_2(M)), 128, split_k=split)


def choose_w8a8(M: int, hopper: bool = True) -> Shape:
    """The configuration of the int8 product for M tokens."""
    if M <= 64:
        return Shape(max(16, _power_of_2(M)), 128)
    if M <= 256 or not hopper:
        return Shape(128, 128, num_warps=8, num_stages=3)
    return Shape(256, 128, num_warps=8, num_stages=3)


@cache
def device_of(device: torch.device) -> tuple[int, bool]:
    """(streaming multiprocessors, whether it is Hopper or later) of a device; an H200's under the interpreter."""
    if device.type != "cuda":
        return PROCESSORS, True
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major >= 9


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
