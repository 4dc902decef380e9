"""Binary weights: -s and s, by GPTQ (XNOR-Net, arXiv 1603.05279; BiLLM, 2402.04291).

Shapes: N outputs, K inputs. Of each group, with h the diagonal of H, H = X^T X,

    minimise over s and codes of -1, 1      sum over j of h_j (w_j - s q_j)^2       q = sign(w), s = mean of h |w|

when the sweep comes to it; then as GPTQ goes on (`compress methods gptq`).

Paper -> code: B, alpha -> codes, scale (`solvers.binary`).

Departs from BiLLM:
- no column has a second binary term: such terms in an eighth of the columns brought less than their bytes
  (docs/figures/methods.md).
- weights are not split by magnitude: which side a weight is on would cost another bit, which the paper's 1.08 bits
  leave out.
What it costs: two levels are for models that are trained with them. Rounded afterwards, small models diverge four to
five times as far as by GPTQ's w2a16 (docs/figures/methods.md).
"""

from dataclasses import dataclass
from typing import ClassVar

from compress.passes.gptq import GPTQ
from compress.passes.options.few_levels import FewLevels
from compress.solvers.binary import signs
from compress.weights.grid import Grid


@dataclass(frozen=True, kw_only=True)
class Binary(FewLevels, GPTQ):
    """GPTQ to two levels."""

    name: ClassVar[str] = "binary"
    keeps_zeros: ClassVar[bool] = False  # there is no code for them
    outliers: ClassVar[float] = 0.0  # type: ignore[misc]  # nor one that leaves an exact weight alone

    def weight_grid(self) -> Grid:
        return signs(None if self.group_size == -1 else self.group_size or self.group_up_to, self.scales)
