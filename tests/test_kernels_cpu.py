"""torch's 4-bit CPU product behind our operator: the same weights, and refusals before it can go wrong."""

import pytest
import torch

from compress.errors import InputError
from compress.grid import Grid, quantize
from compress.kernels import int4_cpu, pack, reference


def planar_of(N, K, group, symmetric, dtype):
    where = {"granularity": "channel"} if group == -1 else {"granularity": "group", "group_size": group}
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(K))
    quantized = quantize(weight, Grid(symmetric=symmetric, **where), dtype)
    return pack.to_planar(quantized.codes, quantized.scale, quantized.zero_point, 4, dtype), quantized


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("K", "group"), [(256, 32), (256, 128), (96, 32), (192, -1)])
@pytest.mark.parametrize("M", [1, 17])
def test_against_the_dequantized_product(M, K, group, symmetric, dtype):
    planar, quantized = planar_of(48, K, group, symmetric, dtype)
    layout = int4_cpu.to_cpu(planar, K)
    g = torch.Generator().manual_seed(M)
    x, bias = torch.randn(M, K, generator=g).to(dtype), torch.randn(48, generator=g).to(dtype)
    out = int4_cpu.int4_cpu_linear(x, layout.packed, layout.scale_zero, bias, layout.group_size)
    weight = quantized.dequantize().double()
    truth = x.double() @ weight.t() + bias.double()
    # Beyond the usual: the product is rounded before the bias is added, weights are rounded to the dtype, and so is
    # the shift of a zero point, at most 8 steps.
    step = quantized.scale.double().abs().amax(1)
    half = torch.finfo(dtype).eps / 2
    product = (truth - bias.double()).abs()
    sizes = x.double().abs() @ weight.abs().t() + (0 if symmetric else 8 * x.double().abs().sum(1, True) * step)
    allowed = reference.tolerance(x.double(), weight, truth, dtype) + 2 * half * product + half * sizes
    assert out.dtype == dtype
    assert ((out.double() - truth).abs() <= allowed).all()


@pytest.mark.parametrize("bias", [True, False])
def test_contract(bias):
    layout = int4_cpu.to_cpu(planar_of(32, 128, 64, False, torch.bfloat16)[0], 128)
    x = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    arguments = (x, layout.packed, layout.scale_zero, torch.ones(32) if bias else None, 64)
    torch.library.opcheck(int4_cpu.int4_cpu_linear, arguments)


def test_every_reason_is_named():
    planar, _ = planar_of(40, 96, 32, True, torch.float32)
    with pytest.raises(InputError, match=r"40 outputs; a multiple of 16.*group size 96"):
        int4_cpu.to_cpu(planar._replace(group_size=96), 96)
    assert any("100 inputs" in reason for reason in int4_cpu.why_not_cpu(planar, 100))
    assert any("8 bits" in reason for reason in int4_cpu.why_not_cpu(planar._replace(bits=8), 96))


def test_wrong_inputs_are_refused():
    layout = int4_cpu.to_cpu(planar_of(32, 128, 64, False, torch.bfloat16)[0], 128)
    arguments = (layout.packed, layout.scale_zero, None, 64)
    with pytest.raises(InputError, match="float32"):
        int4_cpu.int4_cpu_linear(torch.zeros(1, 128), *arguments)
    with pytest.raises(InputError, match="x has 64 columns, the weight 128"):
        int4_cpu.int4_cpu_linear(torch.zeros(1, 64, dtype=torch.bfloat16), *arguments)
