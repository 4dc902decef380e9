"""The options of a number format of weights: bits, groups, grid and the range of the codes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from compress.base.errors import InputError, one_of
from compress.kernels.layouts.scale_blocks import BLOCK, WEIGHT_BLOCK
from compress.model.patterns import ignoring
from compress.passes.protocol.base import Aspect, Pass
from compress.weights.grid import (
    DEFAULT_GROUP,
    KERNEL_GROUPS,
    Grid,
    RangeChoice,
    largest_group,
    suggest_groups,
    usual_group,
)
from compress.weights.levels import TABLES
from compress.weights.number_formats import SCHEMES, Granularity, NumberFormat, StoredNumbers
from compress.weights.scheme import Scheme, check_levels_group, check_scheme, format_of

GridName = Literal["signed-scale", "symmetric", "narrow", "asymmetric"]
FLOATS_ARE_SYMMETRIC = "fp8 is symmetric: a float has no zero point; leave grid and activation_grid out"


@dataclass(frozen=True, kw_only=True)
class WeightFormat(Pass):
    """A pass that writes quantized weights. Scales are stored in the model's own dtype."""

    reads: ClassVar[Aspect] = "dense weight"
    writes: ClassVar[Aspect] = "quantized weight"

    in_blocks: ClassVar[bool] = False  # whether the method knows scales that several rows share

    scheme: str = "w4a16"
    """SCHEMES: bits per weight, then per activation; a16: activations are not quantized. fp8: float8 (e4m3) for both;
    fp8-block (rtn only): with a scale per 128 x 128 weights and per 128 inputs of a token. The others have a group size
    of their own: 32 for mx floats (scales are powers of two), 16 for nvfp4 (float8 scales), 64 for nf4, 32 for
    llama.cpp's iq4_nl (weights only)."""

    group_size: int = 0
    """-1, 0 or a size: weights in a row that share a scale. -1: all of an output channel. 0: 128, or 64 or 32 where 128
    does not divide all layers; where none does, a size for each layer."""

    group_up_to: int = 128
    """128, 64 or 32: the largest group size that group_size 0 picks."""

    grid: GridName = "signed-scale"
    """Quantization grid. symmetric: as compressed-tensors rounds; narrow: without the lowest value; signed-scale:
    symmetric, the scale may be negative; asymmetric: with a zero point."""

    per_tensor: bool = False
    """One scale for the whole matrix."""

    clip: bool = False
    """Search each group's range for the least squared error (fp8: also wider ones)."""

    scales: StoredNumbers = "stored"
    """Dtype of scales. stored: that of the model; float16: values that float16 holds too, for GGUF and GPTQ files."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scheme(self.scheme, SCHEMES)
        one_of("grid", self.grid, get_args(GridName))
        one_of("scales", self.scales, get_args(StoredNumbers))
        numbers = self.numbers
        if self.group_size < -1:
            raise InputError(f"group size {self.group_size}; allowed: a positive number, or -1 for one per channel")
        if self.per_tensor and self.group_size > 0:
            raise InputError(
                f"per_tensor is one scale in all; group size {self.group_size} has no say: give -1 with it"
            )
        if numbers.of_levels:
            self._settle_levels()
        if self.group_size == 0 and (self.per_tensor or numbers.per != "group"):
            object.__setattr__(self, "group_size", -1)
        _check_usual(self)
        if numbers.type != "int" and self.grid == "signed-scale":
            # The default of integers; a float's largest code is the same on both sides, so there is nothing to choose.
            object.__setattr__(self, "grid", "symmetric")
        if numbers.type != "int" and self.grid != "symmetric":
            raise InputError(FLOATS_ARE_SYMMETRIC)
        if numbers.per == "block" and not self.in_blocks:
            raise InputError(f"{self.name} knows no scales that several rows share; give {self.scheme} to rtn")
        if numbers.per == "block" and (self.per_tensor or self.group_size != -1):
            raise InputError(f"{self.scheme} has one scale per {BLOCK} x {BLOCK}; leave per_tensor and group_size out")
        if numbers.per == "channel" and (self.group_size != -1 or self.grid == "asymmetric"):
            raise InputError(
                f"{self.scheme} has symmetric weights and one scale per output channel: 8-bit products know no "
                "groups; leave group_size and grid out"
            )
        self.weight_grid()

    def _settle_levels(self) -> None:
        """Fill in the options that a scheme of levels leaves no choice of. Raises InputError for another choice."""
        if (table := TABLES.get((self.numbers.type, self.numbers.bits))) is not None and not table.has_zero:
            object.__setattr__(self, "keeps_zeros", False)  # of this scheme, whatever the method
        check_levels_group(self.scheme, self.group_size or None)
        if self.per_tensor or self.grid in ("asymmetric", "narrow") or self.scales != "stored":
            raise InputError(
                f"{self.scheme} has levels and scales of its own, and one scale per group; leave grid, scales and "
                "per_tensor out"
            )
        object.__setattr__(self, "group_size", self.numbers.group_size)

    @property
    def numbers(self) -> NumberFormat:
        """The numbers of the scheme."""
        return SCHEMES[self.scheme]

    @property
    def wording(self) -> tuple[str, str]:
        """(scheme, grid) as the record of a run has them."""
        return self.scheme, self.grid

    def weight_grid(self) -> Grid:
        """The grid that these options describe; of the usual groups while the size is left open (see `fitted`)."""
        granularity: Granularity = "tensor" if self.per_tensor else self.numbers.per
        if granularity == "group" and self.group_size == -1:
            granularity = "channel"
        clipped: RangeChoice = "mse" if self.clip else "minmax"
        return Grid(
            bits=self.numbers.bits,
            symmetric=self.grid != "asymmetric",
            narrow=self.grid == "narrow",
            signed_scale=self.grid == "signed-scale",
            granularity=granularity,
            group_size=(self.group_size or self.group_up_to) if granularity == "group" else None,
            range_choice=clipped,
            type=self.numbers.type,
            block=WEIGHT_BLOCK if granularity == "block" else None,
            scales=self.numbers.scales if self.numbers.of_levels else self.scales,
        )

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        narrow = [name for name, (_, columns) in shapes.items() if columns % BLOCK]
        if self.numbers.per == "block" and narrow:
            raise InputError(
                f"{self.scheme} has blocks of {BLOCK} inputs, which compressed-tensors does not cut short: {narrow[0]} "
                f"has {shapes[narrow[0]][1]}; give fp8, or leave those out: {ignoring(narrow, list(shapes))}"
            )
        if self.per_tensor or self.group_size <= 0:
            return
        bad = [name for name, (_, columns) in shapes.items() if columns % self.group_size]
        if bad and self.numbers.of_levels:
            raise InputError(
                f"{self.scheme} has groups of {self.group_size}, which does not divide the {shapes[bad[0]][1]} inputs "
                f"of {bad[0]} ({len(bad)} layers in all); give a scheme of integers, or leave those out: "
                f"{ignoring(bad, list(shapes))}"
            )
        if bad:
            widths = {columns for _, columns in shapes.values()}
            raise InputError(
                f"group size {self.group_size} does not divide the {shapes[bad[0]][1]} inputs of "
                f"{bad[0]} ({len(bad)} layers in all); {suggest_groups(widths)}"
            )

    def stored(self, layer: str, shape: tuple[int, int], table: bool = False) -> Scheme | None:
        fitted = self.fitted({shape[1]})
        assert isinstance(fitted, WeightFormat)
        return Scheme(terms=(format_of(fitted.weight_grid(), None, table),))

    @property
    def shares_scale(self) -> bool:
        return self.per_tensor

    @property
    def code_grid(self) -> Grid | None:
        return self.weight_grid()

    @property
    def usual_size(self) -> int | None:
        return None if self.group_size else self.group_up_to

    def regrouped(self, size: int) -> Pass | None:
        grouped = self.numbers.has_groups and self.weight_grid().granularity == "group"
        return self._of_groups(size) if grouped else None

    def fitted(self, widths: Collection[int]) -> Pass:
        """One size for all layers, because not every reader takes several. Where none that has a kernel divides the
        inputs of them all (a CNN whose first layer has 27), it is one scale per output channel."""
        return self if self.group_size else self._of_groups(usual_group(widths, self.group_up_to))

    def sized(self, widths: Collection[int], example: str) -> tuple[Pass, str | None]:
        """One size for all layers and what that costs; where only one scale per output channel suits them all and some
        have a usual size of their own, it stays open."""
        weight_format, usual = self.fitted(widths), self.group_up_to
        assert isinstance(weight_format, WeightFormat)
        slow = "groups of other sizes have no kernel, torch multiplies by them many times slower for few tokens"
        size = weight_format.group_size
        if size == -1 and any(usual_group([width], usual) != -1 for width in widths):
            sizes = ", ".join(str(size) for size in KERNEL_GROUPS if size <= usual)
            return self, (
                f"no group size of {sizes} divides the inputs of all layers ({example}): each has the largest of these "
                f"for its own, or one scale per output channel; {slow}; --group-size gives one for all"
            )
        other = largest_group(widths, usual) if size == -1 else None
        if other is None:
            what = "one scale per output channel" if size == -1 else f"groups of {size}"
            return weight_format, f"{what} instead of groups of {usual}: {example}; --group-size gives another"
        return weight_format, (
            f"one scale per output channel instead of groups of {usual}: {example}; {slow}: --group-size {other} is "
            "nearer to the original at that price"
        )

    def _of_groups(self, size: int) -> Pass:
        return replace(self, group_size=size, group_up_to=DEFAULT_GROUP)


def _check_usual(of: WeightFormat) -> None:
    if of.group_up_to not in KERNEL_GROUPS:
        allowed = ", ".join(map(str, KERNEL_GROUPS))
        raise InputError(f"group_up_to {of.group_up_to}; allowed: {allowed}; other sizes are had by group_size")
    if of.group_size and of.group_up_to != DEFAULT_GROUP:
        raise InputError(
            f"group_up_to {of.group_up_to} is for a size that is left open, and here it is {of.group_size}; "
            "leave one of them out"
        )
