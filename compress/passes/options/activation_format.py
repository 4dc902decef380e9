"""The options of a number format of what layers multiply and return, beside that of their weights."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from compress.base.errors import InputError, one_of
from compress.kernels.layouts.scale_blocks import INPUT_BLOCK
from compress.passes.options.weight_format import FLOATS_ARE_SYMMETRIC, WeightFormat
from compress.weights.grid import Grid, grid_of
from compress.weights.number_formats import SCHEMES, WIDE, Granularity
from compress.weights.scheme import Scheme, scheme_on

Activations = Literal["dynamic", "static"]
ActivationGrid = Literal["symmetric", "asymmetric", "unsigned"]
Outputs = Literal["none", "static"]
InputRange = Literal["minmax", "mse"]

NARROW = [name for name, numbers in SCHEMES.items() if numbers.type == "int" and numbers.input_bits < WIDE]
WITH_OUTPUTS = [name for name, numbers in SCHEMES.items() if numbers.per == "channel"]


@dataclass(frozen=True, kw_only=True)
class ActivationFormat(WeightFormat):
    """A pass that may round the inputs and outputs of its layers, to 2 to 8 bits, as the scheme says."""

    activations: Activations = "dynamic"
    """Scales of quantized activations. dynamic: per token (convolutions: per sample); static: calibrated."""

    activation_grid: ActivationGrid = "symmetric"
    """Grid of static activations, and of dynamic ones below 8 bits. unsigned: for static inputs that are never negative
    (after a ReLU); outputs are then asymmetric."""

    input_range: InputRange = "minmax"
    """Range of dynamic inputs below 8 bits. minmax: the whole range of a token; mse: the range of least squared error,
    searched for each token at inference."""

    outputs: Outputs = "none"
    """Quantize a layer's output (bias included) to 8 bits, with one calibrated scale."""

    per_channel_inputs: bool = False
    """A calibrated scale for each input channel. For research: no file format or kernel supports it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, allowed in (
            ("activations", Activations),
            ("activation_grid", ActivationGrid),
            ("outputs", Outputs),
            ("input_range", InputRange),
        ):
            one_of(option, getattr(self, option), get_args(allowed))
        numbers = self.numbers
        if numbers.type != "int" and self.activation_grid != "symmetric":
            raise InputError(FLOATS_ARE_SYMMETRIC)
        if numbers.rounds_inputs and self.activations != "dynamic" and (numbers.of_levels or numbers.per == "block"):
            of = "group of a token" if numbers.of_levels else "token"
            raise InputError(f"{self.scheme} fits inputs to every {of}; leave activations out")
        if numbers.rounds_inputs:
            self._check_dynamic()
            self._check_range()
        elif (
            self.activations != "dynamic"
            or self.outputs != "none"
            or self.per_channel_inputs
            or self.activation_grid != "symmetric"
            or self.input_range != "minmax"
        ):
            raise InputError(
                "activations, activation_grid, input_range, outputs and per_channel_inputs are of schemes that round "
                f"inputs; {self.scheme}: its inputs are not rounded"
            )
        if self.outputs != "none" and self.scheme not in WITH_OUTPUTS:
            raise InputError(f"outputs are for {' and '.join(WITH_OUTPUTS)}; {self.scheme}: give outputs=none")

    def _check_dynamic(self) -> None:
        if self.activations != "dynamic":
            return
        if self.activation_grid == "unsigned" or (self.activation_grid != "symmetric" and not self._narrow):
            raise InputError(
                f"activations fitted to every token are symmetric, or asymmetric below 8 bits ({', '.join(NARROW)}); "
                f"give activations=static with {self.activation_grid}"
            )
        if self.per_channel_inputs:
            raise InputError(
                "per_channel_inputs are fixed ranges, and activations are fitted to every token; give "
                "activations=static with it"
            )

    def _check_range(self) -> None:
        if self.input_range != "minmax" and not (self._narrow and self.activations == "dynamic"):
            raise InputError(
                f"input_range={self.input_range} is for integer inputs below 8 bits that are fitted to every token "
                f"({', '.join(NARROW)}); {self.scheme}, activations={self.activations}: leave it out"
            )

    @property
    def _narrow(self) -> bool:
        return self.scheme in NARROW

    def stored(self, layer: str, shape: tuple[int, int], table: bool = False) -> Scheme | None:
        fitted = self.fitted({shape[1]})
        assert isinstance(fitted, ActivationFormat)
        dynamic = self.activations == "dynamic"
        return scheme_on(fitted.weight_grid(), self.input_grid(), self.output_grid(), dynamic)

    def input_grid(self) -> Grid | None:
        """The grid of a layer's input; None where it stays as it is. Unsigned codes u are stored as u - 128: an
        asymmetric grid whose zero point is -128."""
        if not self.numbers.rounds_inputs:
            return None
        if self.numbers.of_levels:
            return grid_of(self.numbers)
        if self.numbers.per == "block":
            return replace(self.activation_grid_of("token"), granularity="block", block=INPUT_BLOCK)
        granularity: Granularity = "channel" if self.per_channel_inputs else "tensor"
        if self.activations != "dynamic":
            return self.activation_grid_of(granularity)
        return self.activation_grid_of("token").with_range(self.input_range)

    def output_grid(self) -> Grid | None:
        """The 8-bit grid of a layer's output; None where it stays as it is."""
        return self.activation_grid_of("tensor") if self.outputs == "static" else None

    def activation_grid_of(self, granularity: Granularity) -> Grid:
        """The grid of what is no weight in this format, with so many scales."""
        symmetric = self.activation_grid == "symmetric"
        numbers = self.numbers
        return Grid(bits=numbers.input_bits, symmetric=symmetric, granularity=granularity, type=numbers.type)
