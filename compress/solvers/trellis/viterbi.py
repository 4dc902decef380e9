"""The best path through a bitshift trellis (Viterbi 1967; `kernels.layouts.trellis`).

    minimise over paths     sum over t of d_t (x_t - level(s_t))^2

exactly, given that sequences begin anew every T numbers with a free state. L bits of a state, k of a weight.

Where errors of some numbers move later ones (`feedback`), paths are decided chunk by chunk, looking ahead: few numbers
behind a chunk its paths have become one.
"""

import math
from functools import cache

import torch
from torch import Tensor

from compress.kernels.cpu import trellis as compiled
from compress.kernels.layouts.trellis import Code, level_table, levels_of
from compress.kernels.notes import note_once
from compress.kernels.operators.devices import runs_on_cpu
from compress.kernels.operators.trellis import why_not_on_gpu

REST = 256  # steps after which the least cost is taken off all of them
TRIAL = 300  # numbers, more than REST
CHUNK, AHEAD = 32, 32  # numbers that are decided together, and looked at beyond these


def best_states(x: Tensor, d: Tensor, code: Code, feedback_NS: Tensor | None = None) -> Tensor:
    """int16 [n], the states of the best path for numbers x [n] of weights d [n], float32 or wider. On a GPU by Triton;
    else by the compiled search, on the CPU; by torch where neither runs. All find the same path.

    feedback: a later number m of a run of S moves by its entry (n, m) times x_n - level(s_n)."""
    if feedback_NS is None and not runs_on_cpu(x.device) and _searches(code, x.device):
        return _best_states_by_triton(x, d, code)
    if compiled.why_not(code.state_bits, code.bits):
        return best_states_by_torch(x, d, code) if feedback_NS is None else fed_back_by_torch(x, d, code, feedback_NS)
    table = level_table(code, torch.device("cpu"))
    held = None if feedback_NS is None else feedback_NS.detach().cpu().float().contiguous()
    how = (table, code.run, code.bits, held, CHUNK, AHEAD)
    return compiled.best_paths(x.detach().cpu(), d.detach().cpu(), *how).to(x.device)


@cache
def _searches(code: Code, device: torch.device) -> bool:
    """True where the search in Triton runs on a device and finds there, on trial, the path that torch finds on the CPU.
    A device on which it finds another one is noted."""
    if why_not_on_gpu(code, device):
        return False
    g = torch.Generator().manual_seed(0)
    x, d = torch.randn(TRIAL, generator=g), torch.rand(TRIAL, generator=g)
    found = _best_states_by_triton(x.to(device), d.to(device), code).cpu()
    same = torch.equal(found, best_states_by_torch(x, d, code))
    if not same:
        note_once(f"the search for trellis codes in Triton finds other paths on {device}: the CPU searches instead")
    return same


def _best_states_by_triton(x: Tensor, d: Tensor, code: Code) -> Tensor:
    from compress.kernels.triton.trellis_paths import best_paths

    table = level_table(code, x.device)
    return best_paths(x.detach().float(), d.detach().float(), table, code.run, code.bits, REST)


def fed_back_by_torch(x: Tensor, d: Tensor, code: Code, feedback_NS: Tensor) -> Tensor:
    """`best_states` with feedback, in torch."""
    count, length = len(x), feedback_NS.shape[1]
    moved, states, first = x.float().clone(), torch.empty(count, dtype=torch.int16, device=x.device), 0
    while first < count:
        run, last = first // length * length, min(count, (first // code.run + 1) * code.run)
        behind = min(count, run + length)
        end = min(last, behind, run + ((first - run) // CHUNK + 1) * CHUNK)
        own, seen = slice(first, end), slice(first, min(last, end + AHEAD))
        before = int(states[first - 1]) if first % code.run else None
        states[own] = best_states_by_torch(moved[seen], d[seen], code, before)[: end - first]
        errors = x[own].float() - levels_of(code, states[own])
        moved[end:behind] += errors @ feedback_NS[own, end - run : behind - run].float()
        first = end
    return states


def best_states_by_torch(x: Tensor, d: Tensor, code: Code, before: int | None = None) -> Tensor:
    """`best_states` in torch: all runs at a time, one step after another. The reference of the compiled search. before:
    the state of the number before the first (None: that of a run is free)."""
    count, level = len(x), level_table(code, x.device)
    padded = code.runs(count) * code.run - count
    # Numbers of weight 0 behind the last run cost nothing, whatever path there is.
    x_RT, d_RT = (torch.nn.functional.pad(t.float(), (0, padded)).view(-1, code.run) for t in (x, d))
    windows = 2 ** (code.state_bits - code.bits)
    came = []
    cost = d_RT[:, :1] * (x_RT[:, :1] - level).square()
    if before is not None:
        follows = torch.arange(len(level), device=x.device) >> code.bits == before & (windows - 1)
        cost = cost.masked_fill(~follows, math.inf)
    for t in range(1, code.run if len(x_RT) > 1 else min(count, code.run)):
        best, which = cost.view(len(x_RT), 2**code.bits, windows).min(1)
        if t % REST == 0:
            best = best - best.amin(1, keepdim=True)
        cost = best.repeat_interleave(2**code.bits, 1) + d_RT[:, t : t + 1] * (x_RT[:, t : t + 1] - level).square()
        came.append(which.to(torch.uint8))
    state = cost.argmin(1)
    path = [state]
    for which in reversed(came):
        window = state >> code.bits
        state = window + which.gather(1, window.unsqueeze(1)).squeeze(1).long() * windows
        path.append(state)
    found = torch.stack(path[::-1], 1).flatten()[:count]
    return found.to(torch.int16)
