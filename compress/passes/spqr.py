"""SpQR: small groups with quantized scales, and the few most sensitive weights kept exact (arXiv 2306.03078).

Shapes: N outputs, K inputs, g inputs a group, R rows a tile. H = X^T X / tokens = U D U^T, as in `gptq`.

    W = Q + S      Q: codes, value (code - z) s; s and z of g inputs are codes themselves, in ranges of g x R tiles
                   S: exact weights, 16 bits and a column each

Bits per weight: bits + (scale_bits + zero_bits) / g + 64 / (g R) + 32 share + 8 / K: 3.625 + 32 share for 3 bits, 3
and 3, in tiles of 16 x 16. The sweep is GPTQ's, and so are drift, shrink and act_order (`compress methods gptq`).

Paper -> code: beta_1 -> `group_size`; beta_2 -> `tile_rows`; b_s, b_z -> `scale_bits`, `zero_bits`; tau -> `threshold`;
algorithm 1, `outliers` -> `tile_rule.leave_one_out`; `fit_quantizer` -> `weights.formats.tiles.fit_tiles`.

Departs from the paper (all of it off: threshold=0.2, damp=1, drift=0, search=false, refit=0, sweeps=0, shrink=false):
- outliers are chosen for the least cost of the group as a whole, at a price for each (`solvers.outliers`): a share of
  the weights, or a number of bits per weight, is met. The paper drops one weight at a time and compares with tau times
  the variance of a weight.
- `search`: nearest in 3 bits is far for a scale: its neighbours, and those of the zero point, are tried, too.
- `refit`, `sweeps`: once the sweep is over, scales and zero points move to neighbours, codes and exact weights to what
  lowers the loss (`solvers.column_sweep`).
- damp is 0.01, where the paper has 1.
- act_order=group sorts inputs inside of groups and then groups (as `gptq` does); the paper sorts all inputs and stores
  the order. Nothing is stored here.
Departs from the authors' code:
- ranges of scales and zero points are rounded to the dtype in which they are stored before a code is chosen by them;
- a group of equal weights has a range from them to 0 (the code: from -1 to 1); 16 equal scales are stored as they are.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.base.errors import InputError, check_least
from compress.passes.options.loss_aware import LossAware
from compress.passes.options.quantize import beside_outliers
from compress.passes.protocol.base import Aspect, Pass
from compress.passes.protocol.sites import Site
from compress.solvers.hessian_with_drift import ActOrder, Problem
from compress.solvers.outliers import check_share
from compress.solvers.spqr import price_by_variance, price_in_tiles, round_to_tiles
from compress.solvers.tile_rule import TileRule
from compress.weights.formats.sparse import entry_bits
from compress.weights.formats.tiles import Tiles
from compress.weights.grid import MAX_BITS, near_group, suggest_groups
from compress.weights.matrix import Matrix
from compress.weights.number_formats import SCHEMES
from compress.weights.scheme import Scheme, check_scheme

# What a group usually has, for which there are kernels, and what it has at least unless that is asked for: half of that
# takes twice as many bits for scales.
USUAL_GROUP, LEAST_GROUP = 16, 8


@dataclass(frozen=True, kw_only=True)
class SpQR(LossAware):
    """Codes in tiles and exact outliers."""

    name: ClassVar[str] = "spqr"
    writes: ClassVar[Aspect] = "quantized weight"

    scheme: str = "w3a16"
    """w2a16 ... w8a16: bits per weight, of 16-bit inputs."""

    group_size: int = 0
    """0 or more: weights in a row that share a scale and a zero point. 0: 16, or the nearest size from 8 up that
    divides all layers; where none does, a size for each layer."""

    tile_rows: int = 16
    """1 or more: rows whose scales (and zero points) are quantized together."""

    scale_bits: int = 3
    """1 to 8: bits of a scale."""

    zero_bits: int = 3
    """1 to 8: bits of a zero point."""

    outliers: float = 0.01
    """0 to 0.25: share of weights kept unquantized, the most sensitive ones (32 bits each)."""

    bits_per_weight: float = 0.0
    """0 or a number: target size of each layer, met by the number of outliers; 0: use `outliers`."""

    threshold: float = 0.0
    """0 or a number: choose outliers by the paper's threshold tau (0.2 there); 0: use `outliers`."""

    act_order: ActOrder = "group"
    """Order of columns. group: by decreasing diag(H) inside each group, then the groups."""

    search: bool = True
    """Also try the neighbouring values of each quantized scale and zero point."""

    refit: int = 1
    """0 or more: rounds of fitting scales and zero points to the codes, once the sweep is over."""

    def __post_init__(self) -> None:
        super().__post_init__()
        leaving = [name for name, numbers in SCHEMES.items() if numbers.has_groups and not numbers.rounds_inputs]
        check_scheme(self.scheme, leaving, "scheme of spqr, which leaves inputs as they are,")
        for option in ("scale_bits", "zero_bits"):
            if not 1 <= getattr(self, option) <= MAX_BITS:
                raise InputError(f"{option} {getattr(self, option)}; allowed: 1 to {MAX_BITS}")
        check_least(self, 0, "group_size")
        check_least(self, 1, "tile_rows")
        if self.act_order == "static":
            raise InputError(
                "act_order static fixes scales beforehand, and spqr fits them as it goes; give group or none"
            )
        check_share(self.outliers)
        if self.threshold < 0:
            raise InputError(f"threshold {self.threshold}; allowed: above 0 (0.2 in the paper), or 0 for a share")
        if self.threshold and self.group_size == 1:
            raise InputError("threshold compares a weight with the others of its group; give a group_size of 2 or more")
        if self.threshold and self.bits_per_weight:
            raise InputError("threshold and bits_per_weight both say how many outliers there are; give one")
        bare = self.tiles.bits_per_weight(torch.float16)
        if self.bits_per_weight and self.bits_per_weight <= bare:
            raise InputError(
                f"bits_per_weight {self.bits_per_weight}; {self.scheme} in these tiles takes {bare:g} without a single "
                "outlier: give more, or fewer bits in the scheme"
            )

    @property
    def tiles(self) -> Tiles:
        """The format of Q."""
        return Tiles(
            bits=SCHEMES[self.scheme].bits,
            scale_bits=self.scale_bits,
            zero_bits=self.zero_bits,
            group_size=self.group_length,
            tile_rows=self.tile_rows,
        )

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        if self.group_size == 0:
            return
        bad = [name for name, (_, columns) in shapes.items() if columns % self.group_size]
        if bad:
            widths = {columns for _, columns in shapes.values()}
            raise InputError(
                f"group size {self.group_size} does not divide the {shapes[bad[0]][1]} inputs of {bad[0]} "
                f"({len(bad)} layers in all); {suggest_groups(widths, False, self._bits_of_scales)}"
            )

    def _bits_of_scales(self, size: int) -> float:
        return replace(self.tiles, group_size=size).bits_per_weight(torch.float16) - self.tiles.bits

    @property
    def usual_size(self) -> int | None:
        return None if self.group_size else USUAL_GROUP

    def regrouped(self, size: int) -> Pass | None:
        return replace(self, group_size=size)

    def sized(self, widths: Collection[int], example: str) -> tuple[Pass, str | None]:
        """One size for all layers where one near the usual divides the inputs of them all, and its price in words."""
        fitted = self.fitted(widths)
        assert isinstance(fitted, SpQR)
        slow = "torch multiplies by them many times slower for few tokens, kernels have multiples of 16"
        if fitted.group_size == 0:
            return fitted, (
                f"no group size near {USUAL_GROUP} divides the inputs of all layers ({example}): each has the nearest "
                f"of its own; {slow}; --group-size gives one for all"
            )
        price = "" if fitted.group_size % USUAL_GROUP == 0 else f"; {slow}"
        instead = f"groups of {fitted.group_size} instead of groups of {USUAL_GROUP}"
        return fitted, f"{instead}: {example}{price}; --group-size gives another"

    def fitted(self, widths: Collection[int]) -> Pass:
        """One size for all layers where one near the usual divides the inputs of them all; else it stays open, and one
        layer alone has the nearest that divides its own, or one group for all of its inputs."""
        if self.group_size or not widths:
            return self
        size = near_group(widths, USUAL_GROUP, LEAST_GROUP)
        if size is None and len(set(widths)) == 1:
            (size,) = set(widths)
        return self if size is None else replace(self, group_size=size)

    def stored(self, layer: str, shape: tuple[int, int], table: bool = False) -> Scheme | None:
        fitted = self.fitted({shape[1]})
        assert isinstance(fitted, SpQR)
        share = self.outliers
        if self.bits_per_weight:
            share = max(
                0.0,
                (self.bits_per_weight - fitted.tiles.bits_per_weight(torch.float16))
                / entry_bits(shape[1], torch.float16),
            )
        return beside_outliers(Scheme(terms=(fitted.tiles,)), share, shape)

    @property
    def group_length(self) -> int:
        return self.group_size or USUAL_GROUP

    @property
    def together(self) -> int:
        return self.tile_rows

    def nearest(self, site: Site, name: str, dtype: torch.dtype) -> Matrix:
        return round_to_tiles(site.weights[name].to(dtype), self.tiles, site.scale_dtypes[name])

    def rows(self, site: Site, name: str, target_NK: Tensor, problem: Problem) -> dict[str, Tensor]:
        price = self._price(target_NK, problem, site.scale_dtypes[name])
        rows = {"weight_NK": target_NK}
        return rows if price is None else {**rows, "price_N": target_NK.new_full(target_NK.shape[:1], price)}

    def _price(self, target_NK: Tensor, problem: Problem, scale_dtype: torch.dtype) -> float | None:
        """The loss that an exact weight has to save in a layer; None where there is to be none."""
        if self.threshold:
            return price_by_variance(target_NK, problem, self.threshold)
        share = self.outliers
        if self.bits_per_weight:
            columns = target_NK.shape[1]
            left = self.bits_per_weight - self.tiles.bits_per_weight(scale_dtype) - 8 / columns
            share = max(0.0, left / entry_bits(columns, scale_dtype))
        return price_in_tiles(target_NK, problem, self.tiles, scale_dtype, share, self.search) if share else None

    def solve_rows(self, site: Site, problem: Problem, scale_dtype: torch.dtype, **rows: Any) -> Matrix:
        how = rows.get("price_N"), self.threshold > 0, self.search
        rule = TileRule.of(rows["weight_NK"], problem, self.tiles, scale_dtype, *how)
        return rule.solve(rows["weight_NK"], problem, self.refit, self.sweeps, rows.get("outputs_NS")).weight
