"""The int8 product for many tokens on Hopper: persistent programs, operands through the tensor memory accelerator.

One program per processor walks over the tiles, so that the loads of the next tile run while this one is scaled and
stored; the accelerator copies whole tiles [BLOCK, 128] by a descriptor and fills in zeros beyond the ends, so that no
thread computes an address or a mask. Tiles go through the outputs in bands of BAND tiles of tokens, whose operands
then stay in the L2 cache.

Off by default, because it has not been measured: an entry of the table with "persistent": true turns it on (`tune`
tries it). The epilogue is that of `int8_gemm`, the result the same bits.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from compress.kernels.tuning.choose import W8A8_BLOCK_K
from compress.kernels.tuning.table import Shape, cdiv

BAND = 8
# What a descriptor needs of pointers and rows, in bytes.
ALIGNMENT = 16


@triton.jit(do_not_specialize=["stride_sm"])
def persistent_kernel(
    x_desc,
    weight_desc,
    x_scale_ptr,
    x_zero_ptr,
    weight_scale_ptr,
    row_sum_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    stride_sm,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Descriptors of x int8 [M, K] and weight int8 [N, K]; the rest as in `w8a8_kernel`. Grid: (programs,)."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        band = tile // (BAND * tiles_n)
        height = min(tiles_m - band * BAND, BAND)
        inside_band = tile % (BAND * tiles_n)
        first_m = (band * BAND + inside_band % height) * BLOCK_M
        first_n = inside_band // height * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        for step in range(steps):
            x = x_desc.load([first_m, step * BLOCK_K])
            weight = weight_desc.load([first_n, step * BLOCK_K])
            acc = tl.dot(x, weight.T, acc, out_dtype=tl.int32)
        m = first_m + tl.arange(0, BLOCK_M)
        n = first_n + tl.arange(0, BLOCK_N)
        m_read = tl.where(m < M, m, 0).to(tl.int64)
        if HAS_ZERO:
            row_sum = tl.load(row_sum_ptr + n, mask=n < N, other=0)
            acc -= tl.load(x_zero_ptr + m_read * stride_sm)[:, None] * row_sum[None, :]
        out = acc.to(tl.float32) * tl.load(x_scale_ptr + m_read * stride_sm)[:, None]
        out *= tl.load(weight_scale_ptr + n, mask=n < N, other=0.0)[None, :]
        if HAS_BIAS:
            out += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        out_ptrs = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def why_not_persistent(x_MK: Tensor, weight_NK: Tensor, hopper: bool) -> list[str]:
    """Reasons why descriptors cannot read these int8 operands; empty when they can."""
    reasons = [] if hopper else ["the tensor memory accelerator came with compute capability 9.0"]
    for name, tensor in (("x", x_MK), ("the weight", weight_NK)):
        if tensor.stride(0) % ALIGNMENT or tensor.data_ptr() % ALIGNMENT:
            reasons.append(f"{name} has rows of {tensor.stride(0)} bytes; {ALIGNMENT} bytes of alignment are needed")
    return reasons


def persistent_gemm(
    x_MK: Tensor,
    x_scale_M: Tensor,
    x_zero_M: Tensor | None,
    weight_NK: Tensor,
    weight_scale_N: Tensor,
    row_sum_N: Tensor | None,
    bias_N: Tensor | None,
    out_MN: Tensor,
    shape: Shape,
    processors: int,
) -> None:
    """Write the product to `out`; arguments as in `int8_gemm.w8a8_gemm`."""
    (M, K), N = x_MK.shape, weight_NK.shape[0]
    tiles = cdiv(M, shape.block_m) * cdiv(N, shape.block_n)
    descriptors = [
        TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, W8A8_BLOCK_K])
        for tensor, rows in ((x_MK, shape.block_m), (weight_NK, shape.block_n))
    ]
    persistent_kernel[(min(tiles, processors),)](
        *descriptors,
        x_scale_M,
        x_zero_M,
        weight_scale_N,
        row_sum_N,
        bias_N,
        out_MN,
        M,
        N,
        K,
        0 if len(x_scale_M) == 1 else 1,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=W8A8_BLOCK_K,
        BAND=BAND,
        HAS_ZERO=x_zero_M is not None,
        HAS_BIAS=bias_N is not None,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
        enable_fp_fusion=True,
    )
