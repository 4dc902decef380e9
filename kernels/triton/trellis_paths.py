"""The search for the best path through a bitshift trellis (`layouts.trellis`), a program for each sequence.

The costs of all states stay in registers. States that share their lower bits, a window, have the same successors, so a
step takes the least cost of each window, and then adds what each new state costs. Costs are those of
`solvers.trellis.viterbi`, rounded alike: paths are the same. What each window came from is kept in memory, a byte for
each window and step; the path is then read backwards.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.tuning.table import cdiv

STATES_PER_WARP = 512


@triton.jit(do_not_specialize=["count", "length"])
def paths_kernel(
    x_ptr,
    d_ptr,
    level_ptr,
    from_ptr,
    states_ptr,
    count,
    length,
    BITS: tl.constexpr,
    STATE_BITS: tl.constexpr,
    REST: tl.constexpr,
):
    """x, d fp32 [count], level fp32 [2^STATE_BITS] -> states int16 [count]; from uint8 [sequences, length, windows]."""
    CHOICES: tl.constexpr = 2**BITS
    WINDOWS: tl.constexpr = 2 ** (STATE_BITS - BITS)
    sequence = tl.program_id(0)
    first = sequence * length
    steps = min(length, count - first)
    window = tl.arange(0, WINDOWS)
    numbers = window[:, None] * CHOICES + tl.arange(0, CHOICES)[None, :]
    level = tl.load(level_ptr + numbers)
    from_ptr += sequence.to(tl.int64) * length * WINDOWS
    off = tl.load(x_ptr + first) - level
    cost = tl.load(d_ptr + first) * (off * off)
    x = tl.load(x_ptr + first + min(1, steps - 1))
    d = tl.load(d_ptr + first + min(1, steps - 1))
    for t in range(1, steps):
        best, which = tl.min(tl.reshape(cost, (CHOICES, WINDOWS)), 0, return_indices=True)
        tl.store(from_ptr + t * WINDOWS + window, which.to(tl.uint8))
        if t % REST == 0:
            best -= tl.min(best, 0)
        off = x - level
        cost = best[:, None] + d * (off * off)
        x = tl.load(x_ptr + first + min(t + 1, steps - 1))
        d = tl.load(d_ptr + first + min(t + 1, steps - 1))
    # The first of the best states. Not by argmin of a flat tensor: Triton reorders one that is only reduced.
    least = tl.min(tl.min(cost, 1), 0)
    state = tl.min(tl.min(tl.where(cost == least, numbers, CHOICES * WINDOWS), 1), 0)
    tl.debug_barrier()
    for i in range(1, steps):
        t = steps - i
        tl.store(states_ptr + first + t, state.to(tl.int16))
        came = state >> BITS
        state = came + tl.load(from_ptr + t * WINDOWS + came).to(tl.int32) * WINDOWS
    tl.store(states_ptr + first, state.to(tl.int16))


def best_paths(x: Tensor, d: Tensor, level: Tensor, length: int, bits: int, rest: int) -> Tensor:
    """int16 [n], the states of the paths of least sum of d (x - level)^2, for numbers x and their weights d [n],
    float32 on a GPU (or under the interpreter). Paths begin anew every `length` numbers. level [2^L]: of each state.
    rest: steps after which the least cost is taken off all of them."""
    count, state_bits = len(x), len(level).bit_length() - 1
    length = min(length, max(count, 1))
    sequences = cdiv(count, length)
    states = torch.empty(count, dtype=torch.int16, device=x.device)
    came = torch.empty(sequences, length, 2 ** (state_bits - bits), dtype=torch.uint8, device=x.device)
    if count:
        paths_kernel[(sequences,)](
            x.contiguous(),
            d.contiguous(),
            level,
            came,
            states,
            count,
            length,
            BITS=bits,
            STATE_BITS=state_bits,
            REST=rest,
            num_warps=max(1, min(32, len(level) // STATES_PER_WARP)),
            enable_fp_fusion=False,  # a product is rounded before it is added, as elsewhere
        )
    return states
