"""Sparse rows alone as a torch operator: x times a weight that is `layouts.entries.Entries` and nothing else. Beside
codes they are added by the operator of these (`words`, `tiles`).

By C++ on a CPU, by a kernel of Triton that unpacks nothing, or by torch, which makes a block of rows dense at a time.

Shapes: x [..., K], M tokens once flattened, N outputs, E entries.
"""

from torch import Tensor

from compress.kernels import reference
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.errors import InputError
from compress.kernels.layouts.entries import Entries
from compress.kernels.operators.devices import as_rows, path_of, why_not_floats
from compress.kernels.operators.register import gradient_operator, operator, outputs

# Tokens up to which the entries are added to a product by a kernel of their own.
DECODE_TOKENS = 16


def why_not_sparse(x: Tensor, value: Tensor) -> list[str]:
    """Reasons why the Triton kernels cannot multiply x by entries of these values; empty when they can."""
    return why_not_floats(x.device, x=x.dtype, entries=value.dtype)


@operator("compress::sparse_linear", outputs(lambda row_start, *_: row_start.shape[0] - 1))
def sparse_linear(
    x: Tensor, row_start: Tensor, column: Tensor, value: Tensor, bias: Tensor | None, columns: int
) -> Tensor:
    """[..., N] = x entries^T + bias, in the dtype of x. columns: K."""
    if x.shape[-1] != columns:
        raise InputError(f"x has {x.shape[-1]} columns, the weight {columns}")
    entries, x_MK = Entries(row_start, column, value), as_rows(x)
    path = path_of(x.device, why_not_sparse(x, value))
    if path == "triton":
        from compress.kernels.triton.sparse_rows import sparse_product

        out_MN = sparse_product(x_MK, entries, bias)
    elif path == "cpu" and not cpu_gemm.why_not("sparse_rows", x, value):
        out_MN = cpu_gemm.sparse_rows(x_MK, entries, bias)
    else:
        out_MN = reference.sparse_rows(x_MK, *entries)
        out_MN = out_MN if bias is None else (out_MN + bias).to(x.dtype)
    return out_MN.view(*x.shape[:-1], len(row_start) - 1)


@gradient_operator(sparse_linear, bias=None)
def sparse_gradient(
    grad: Tensor,
    shape: tuple[int, ...],
    row_start: Tensor,
    column: Tensor,
    value: Tensor,
    bias: Tensor | None,
    columns: int,
) -> Tensor:
    """[..., K] = grad entries, in the dtype of grad [..., N]: the input gradient of `sparse_linear`."""
    entries, grad_MN = Entries(row_start, column, value), as_rows(grad)
    if why_not_sparse(grad, value):
        out_MK = reference.sparse_gradient(grad_MN, *entries, columns)
    else:
        from compress.kernels.triton import sparse_rows

        out_MK = sparse_rows.input_gradient(grad_MN, entries, columns)
    return out_MK.view(shape)
