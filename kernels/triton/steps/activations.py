"""Activations of a step's products."""

import triton
import triton.language as tl

from compress.kernels.step_functions import Activation

NO_ACTIVATION = -1
_SILU = tl.constexpr(int(Activation.SILU))
_GELU_TANH = tl.constexpr(int(Activation.GELU_TANH))
_GELU = tl.constexpr(int(Activation.GELU))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """act(x), fp32."""
    if ACTIVATION == _SILU:
        return x * tl.sigmoid(x)
    elif ACTIVATION == _GELU_TANH:  # noqa: RET505  a constexpr branch must be an else to stay uncompiled
        # (1 + tanh(y)) / 2 is sigmoid(2 y).
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == _GELU:
        return x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        return tl.maximum(x, 0.0)
