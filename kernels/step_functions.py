"""The norms and activation functions that steps of generating compute, on a CPU and on a GPU."""

from enum import IntEnum


class Norm(IntEnum):
    """rms: x / rms is rounded to the dtype before the weight multiplies it; rms_at_once: only the result is;
    rms_plus_one: so, with the weight plus one; layer: a layer norm."""

    RMS, RMS_AT_ONCE, RMS_PLUS_ONE, LAYER = range(4)


class Activation(IntEnum):
    """Activation functions."""

    SILU, GELU_TANH, GELU, RELU = range(4)
