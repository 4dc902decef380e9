"""Products with trellis codes: of every width, with few and many tokens, compiled and by torch."""

import pytest
import torch

from compress.kernels.cpu import trellis as compiled
from compress.kernels.layouts.trellis import MULTIPLIERS, Code, TrellisWords, run_blocks
from compress.kernels.operators.trellis import FEW, trellis_gradient, trellis_linear, values_by_run

ROWS, COLUMNS = 70, 544  # two blocks of columns and a short one; a short run


def weight_of(bits: int, states: int = 12, dtype: torch.dtype = torch.float32) -> TrellisWords:
    code, draw = Code(bits, states, MULTIPLIERS[states], 32), torch.Generator().manual_seed(bits)
    size = (code.stored_rows(ROWS), COLUMNS * bits // 32)
    words = torch.randint(-(2**31), 2**31, size, generator=draw).to(torch.int32)
    return TrellisWords(words, torch.rand(ROWS, generator=draw).to(dtype) + 0.5, code)


def arguments(x: torch.Tensor, weight: TrellisWords, bias: torch.Tensor | None = None) -> tuple:
    code = weight.code
    return (x, weight.words, weight.scale, bias, code.bits, code.state_bits, code.multiplier, code.run)


def needs_compiled(weight: TrellisWords) -> None:
    if reasons := compiled.why_not(weight.code.state_bits, weight.code.bits):
        pytest.skip("; ".join(reasons))


@pytest.mark.usefixtures("trellis_loops")
@pytest.mark.parametrize(("bits", "states"), [(1, 16), (2, 12), (3, 12), (3, 16), (4, 14)])
@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
def test_product(bits: int, states: int, few: bool):
    weight = weight_of(bits, states)
    dense = torch.cat([levels for _, levels in run_blocks(weight)]).double() * weight.scale.double()[:, None]
    for M in (1, 4, FEW - 1) if few else (FEW + 1, 63):
        x, bias = torch.randn(M, COLUMNS), torch.randn(ROWS)
        found = trellis_linear(*arguments(x, weight, bias)).double()
        wanted = x.double() @ dense.t() + bias
        bound = torch.finfo(torch.float32).eps * x.double().norm(dim=1, keepdim=True) * dense.norm(dim=1)
        assert ((found - wanted).abs() < 8 * bound).all()


@pytest.mark.usefixtures("trellis_loops")
def test_a_token_has_the_same_sum_beside_others():
    weight = weight_of(3)
    needs_compiled(weight)
    x = torch.randn(FEW, COLUMNS)
    together = trellis_linear(*arguments(x, weight))
    for m in range(FEW):
        assert torch.equal(trellis_linear(*arguments(x[m : m + 1], weight))[0], together[m])


@pytest.mark.usefixtures("trellis_loops")
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_compiled_levels_are_those_of_torch(bits: int):
    weight = weight_of(bits)
    needs_compiled(weight)
    assert torch.equal(compiled.decode_levels(weight), torch.cat([levels for _, levels in run_blocks(weight)]))


def test_torch_alone_computes_the_same(monkeypatch: pytest.MonkeyPatch):
    weight = weight_of(2, dtype=torch.bfloat16)
    x = torch.randn(3, COLUMNS, dtype=torch.bfloat16)
    usual = trellis_linear(*arguments(x, weight))
    values = [part for _, part in values_by_run(weight, torch.bfloat16)]
    monkeypatch.setattr(compiled, "why_not", lambda *_: ["not here"])
    for one, other in zip(values, (part for _, part in values_by_run(weight, torch.bfloat16)), strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(trellis_linear(*arguments(x, weight)), usual, rtol=0.02, atol=0.5)


def test_operator():
    weight = weight_of(2)
    x = torch.randn(2, 3, COLUMNS, requires_grad=True)
    torch.library.opcheck(trellis_linear.registered, arguments(x, weight))
    grad = torch.randn(2, 3, ROWS, requires_grad=True)
    _, words, scale, _, *code = arguments(x, weight)
    torch.library.opcheck(trellis_gradient.registered, (grad, words, scale, *code))
    trellis_linear(*arguments(x, weight)).backward(grad)
    dense = torch.cat([values for _, values in values_by_run(weight, torch.float32)])
    torch.testing.assert_close(x.grad, grad @ dense, rtol=1e-4, atol=1e-3)
