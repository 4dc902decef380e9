"""Trellis codes: few bits per weight, whose value depends on its neighbours' bits, too (QTIP, arXiv 2406.11235).

Shapes: N outputs, K inputs. W* and H are those of gptq: what codes aim at, and the Hessian they go by.

    minimise over paths and scales     tr((W* - Q) H (W* - Q)^T),     Q[n, j] = scale[n] level(state[n, j])

A grid of 2^k levels is a scalar code. A trellis chooses among 2^L levels with k bits: a state is a window of L bits of
a column's stream, so most of them are those of the outputs above. On normal numbers the error of 2, 3 and 4 bits is
0.071, 0.019 and 0.0052 of the variance; that of the best scalar codes is 0.117, 0.035 and 0.0095, and no code at all
has less than 0.063, 0.016 and 0.0039.

Paper -> code: bitshift trellis, L, k -> `kernels.layouts.trellis.Code`; computed codes (1MAD) -> `Code.levels`;
Viterbi -> `solvers.trellis.viterbi`; BlockLDLQ -> the sweep of gptq, column by column.

Departs from the paper:
- sequences run down the outputs, one input at a time. So each column has the feedback of all columns before it; the
  paper's tiles of 16 x 16 give that up inside a tile;
- a sequence begins anew every `run` outputs, with a free state whose bits are stored. The paper bites the tail;
- a scale per output is refitted to the paths (`refit`), and columns find new paths given all others (`sweeps`). Viterbi
  finds the best path, so neither ever raises the loss;
- `objective=loss` rounds for the predictions of the model (`passes.options.loss_aware`). A column is then searched in
  chunks of 32 outputs, of which each makes up for the errors of those before it: with H_O = V S V^T, V ones in the
  squares of chunks, a target moves by V's share of earlier errors, and an error of output n costs S_nn;
- drift correction, damping and shrinkage are those of gptq (`compress methods gptq`);
- inputs are not rotated here. Outliers among inputs cost a trellis more than a grid with groups: rotate the model.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from compress.base.errors import InputError, check_least
from compress.kernels.layouts.trellis import INPUTS, MULTIPLIERS
from compress.kernels.layouts.trellis_strips import BLOCK
from compress.passes.options.loss_aware import LossAware
from compress.passes.protocol.base import Aspect
from compress.passes.protocol.sites import Site
from compress.solvers.hessian_with_drift import ActOrder, Problem
from compress.solvers.trellis.solve import TrellisRule, nearest_states
from compress.weights.formats.trellis import TrellisCodes
from compress.weights.matrix import Matrix
from compress.weights.number_formats import SCHEMES
from compress.weights.scheme import Scheme, check_scheme

TRELLIS_SCHEMES = ("w2a16", "w3a16", "w4a16")


@dataclass(frozen=True, kw_only=True)
class Trellis(LossAware):
    """Codes of a bitshift trellis, by GPTQ's sweep."""

    name: ClassVar[str] = "trellis"
    writes: ClassVar[Aspect] = "quantized weight"

    scheme: str = "w3a16"
    """w2a16, w3a16, w4a16: bits of a weight."""

    state_bits: int = 12
    """10, 12, 14 or 16: bits of a state. Two more take four times the time; from 12 on, for a twentieth less error."""

    act_order: ActOrder = "static"
    """Visit columns by falling diag(H) (static, or group, which is the same here), or as they come (none)."""

    run: int = 1024
    """64 or more, in steps of 32: outputs after which sequences begin anew."""

    refit: int = 2
    """0 or more: rounds in which the scale of each output is fitted to its path once the sweep is over."""

    sweeps: int = 1
    """0 or more: rounds in which each column finds a new path once the sweep is over."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scheme(self.scheme, TRELLIS_SCHEMES, "scheme of trellis, which leaves inputs as they are,")
        if self.state_bits not in MULTIPLIERS:
            allowed = ", ".join(map(str, MULTIPLIERS))
            raise InputError(f"state_bits {self.state_bits}; allowed: {allowed}")
        if self.run < 64 or self.run % BLOCK:
            raise InputError(f"run {self.run}; allowed: 64 or more, in steps of {BLOCK}")
        check_least(self, 0, "refit", "sweeps")

    def format(self, columns: int) -> TrellisCodes:
        """The format of layers with so many inputs."""
        bits, inputs = SCHEMES[self.scheme].bits, columns if columns % INPUTS else 0
        code = {"state_bits": self.state_bits, "multiplier": MULTIPLIERS[self.state_bits], "run": self.run}
        return TrellisCodes(bits=bits, inputs=inputs, **code)

    def stored(self, layer: str, shape: tuple[int, int], table: bool = False) -> Scheme | None:
        return Scheme(terms=(self.format(shape[1]),))

    @property
    def group_length(self) -> int | None:
        return None

    @property
    def together(self) -> int:
        return self.run

    def references(self, site: Site, name: str, dtype: torch.dtype) -> dict[str, Matrix]:
        return {}  # rounding to nearest takes as long as all else

    def nearest(self, site: Site, name: str, dtype: torch.dtype) -> Matrix:
        weight_NK = site.weights[name].to(dtype)
        return nearest_states(weight_NK, self.format(weight_NK.shape[1]), site.scale_dtypes[name])

    def solve_rows(self, site: Site, problem: Problem, scale_dtype: torch.dtype, **rows: Any) -> Matrix:
        weight_NK = rows["weight_NK"]
        rule = TrellisRule.of(weight_NK, problem, self.format(weight_NK.shape[1]), scale_dtype)
        return rule.solve(weight_NK, problem, self.refit, self.sweeps, rows.get("outputs_NS")).weight
