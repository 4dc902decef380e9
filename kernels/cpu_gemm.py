"""The CPU products of `cpu_gemm.cpp` on tensors, and which of their loops runs for given sizes."""

import ctypes
from typing import Literal

import torch
from torch import Tensor

from compress.errors import InputError
from compress.kernels import cpu
from compress.kernels.pack import PLANE, Planar

Loop = Literal["rows", "slabs"]

TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# Tokens up to which reading every row front to back beats unpacking slabs of rows.
WEIGHT_ONLY_ROWS = 4
INT8_ROWS = 8
# Activation groups are whole blocks of words, of 4 and of 8 bits.
INPUT_GROUP_STEP = 128


class Arguments(ctypes.Structure):
    """`Arguments` of cpu_gemm.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "scale", "bias", "zero")),
        *((name, ctypes.c_void_p) for name in ("input_scale", "input_zero", "row_sum", "out")),
        *((name, ctypes.c_int64) for name in ("M", "N", "K", "G", "row_bytes", "group", "input_group")),
        *((name, ctypes.c_int32) for name in ("x_type", "scale_type", "bias_type")),
        *((name, ctypes.c_int32) for name in ("bits", "planar", "symmetric", "by_rows", "threads")),
    )
