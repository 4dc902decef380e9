"""Structure: channels of MLPs, attention heads and whole blocks go; what is left is a smaller model of the same kind.
Experts of mixtures go by `experts`.

Shapes: N outputs, K inputs of a *consumer*, the layer that reads what goes (down of an MLP, the output of an
attention); its inputs fall into groups (one channel; the heads of one key-value head), found on the model itself
(`model.structure.couplings`). X [T, K] is the consumer's input behind the blocks that are cut already, H = X^T X / T.

    removing groups R costs    min over Q of |X W^T - X_S Q^T|^2  =  tr(W_R ([H^-1]_RR)^-1 W_R^T)      S: the others
    at                         Q  =  W H_{:,S} H_SS^-1

Groups go one after the other, each time those whose removal costs least now, and the survivors of the consumer make up
for them. An input that is always one stands for the consumer's bias, which makes up, too. Every block loses as many,
because a configuration has one number for all: `intermediate_size`, `num_key_value_heads`. Blocks as a whole go by the
KL of the model without each, on some 4,096 tokens, one after the other, the least first: for every block that goes, as
many forwards of the model as half its blocks. The layers behind them make up for the drift of their inputs.

Sources: optimal brain surgeon for groups, one at a time: ZipLM (Kurtic et al. 2023, arXiv 2302.04089, equations 2-4);
SlimGPT (Ling et al. 2024, arXiv 2412.18110). Blocks: SLEB (Song et al. 2024, arXiv 2402.09025), which removes the one
without which the model loses least, again and again.

Paper -> code: saliency of a group -> `removal.LeastSquares.scores`; its update -> `remove`; the weight that is left ->
`removal.compensate`; the loss without a block -> `engine.shrink.block_importance`.

Departs from the papers:
- several groups go between two looks at the scores (`rounds`), the cost of the set being exact; survivors are solved
  for at the end from H itself, not from an inverse that was updated many times.
- H is shrunk towards its diagonal as far as the tokens are few, and damped; both as in gptq. So is `drift`: W becomes
  what returns, from the input behind the cut prefix, what the layer returned before anything was cut inside blocks.
- blocks are judged by the KL to the original (SLEB: by the perplexity), and what is behind them is solved again.
- query heads go with their key-value head, as a group.
- widths are a share of each block; ZipLM searches for those that meet a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from compress.base.errors import InputError
from compress.passes.protocol.base import Pass
from compress.passes.protocol.removal import RemovalOptions
from compress.passes.protocol.stages import Restructure, Stage
from compress.passes.whole_model.experts import fewer_experts


@dataclass(frozen=True, kw_only=True)
class Structure(RemovalOptions, Pass):
    """Heads, channels and blocks go, the same number from every block."""

    name: ClassVar[str] = "structure"

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """Refuse, before any work, options that remove nothing."""
        super().check(shapes)
        if not (self.shares or self.hidden or self.layers or self.experts):
            raise InputError(
                "structure with nothing to remove; give heads, channels, hidden, experts (shares) or layers (a count)"
            )

    @property
    def stages(self) -> tuple[Stage, ...]:
        if self.experts:
            return (Restructure(partial(fewer_experts, self.experts), calibrated=True, keeps_zeros=True),)
        return (
            Restructure(
                lambda whole: whole.removal(self),
                shares=True,
                calibrated=self.uses_data,
                keeps_zeros=not (self.compensate and (self.shares or self.layers)),
                otherwise="give compensate=False",
            ),
        )
