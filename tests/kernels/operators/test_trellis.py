"""Products with trellis codes: of every width, in both layouts, for few and many tokens, compiled and by torch."""

import pytest
import torch
from trellises import arguments, trellis_of

from compress.base.errors import InputError
from compress.kernels.cpu import trellis as compiled
from compress.kernels.layouts.trellis import TrellisWords, run_blocks
from compress.kernels.layouts.trellis_strips import TrellisStrips, pack_trellis_strips
from compress.kernels.operators.trellis import (
    FEW,
    lay_in_strips,
    trellis_gradient,
    trellis_linear,
    trellis_product,
    values_by_run,
)

ROWS, COLUMNS, RUN = 102, 544, 64  # a run of two blocks, and one of a block and a short one
CODES = [(1, 16), (2, 12), (3, 12), (3, 16), (4, 14)]


def weight_of(bits: int, states: int = 12, dtype: torch.dtype = torch.float32) -> TrellisWords:
    return trellis_of(bits, states, ROWS, COLUMNS, RUN, dtype)[0]


def needs_compiled(weight: TrellisWords) -> None:
    if reasons := compiled.why_not_products(weight.code):
        pytest.skip("; ".join(reasons))


@pytest.mark.usefixtures("trellis_products_loops")
@pytest.mark.parametrize(("bits", "states"), CODES)
@pytest.mark.parametrize("few", [True, False], ids=["few", "many"])
@pytest.mark.parametrize("run", [RUN, 20], ids=["in strips", "by rows"])
def test_product(bits: int, states: int, few: bool, run: int):
    weight, values = trellis_of(bits, states, ROWS, COLUMNS, run, torch.float32)
    held = lay_in_strips(weight)
    assert held is None or run % 32 == 0
    for M in (1, 4, 13) if few else (FEW + 1,):
        x, bias = torch.randn(M, COLUMNS), torch.randn(ROWS)
        wanted = x.double() @ values.t() + bias
        bound = torch.finfo(torch.float32).eps * x.double().norm(dim=1, keepdim=True) * values.norm(dim=1)
        for each in (weight, held or weight):
            found = trellis_linear(*arguments(x, each, bias)).double()
            assert ((found - wanted).abs() < 8 * bound).all()


@pytest.mark.usefixtures("trellis_products_loops")
def test_a_token_has_the_same_sum_beside_others():
    weight = weight_of(3)
    needs_compiled(weight)
    x = torch.randn(13, COLUMNS)
    together = trellis_linear(*arguments(x, weight))
    for m in range(len(x)):
        assert torch.equal(trellis_linear(*arguments(x[m : m + 1], weight))[0], together[m])


@pytest.mark.usefixtures("trellis_products_loops")
@pytest.mark.parametrize(("bits", "states"), CODES)
def test_compiled_strips_and_levels_are_those_of_torch(bits: int, states: int):
    weight = weight_of(bits, states)
    needs_compiled(weight)
    strips, found = pack_trellis_strips(weight), compiled.lay_in_strips(weight)
    assert torch.equal(found.words, strips.words)
    assert torch.equal(found.before, strips.before)
    assert torch.equal(compiled.levels_of_strips(strips), torch.cat([levels for _, levels in run_blocks(weight)]))


@pytest.mark.parametrize("laid", [False, True], ids=["by rows", "in strips"])
def test_torch_alone_computes_the_same(laid: bool, monkeypatch: pytest.MonkeyPatch):
    weight = weight_of(2, dtype=torch.bfloat16)
    held: TrellisWords | TrellisStrips = pack_trellis_strips(weight) if laid else weight
    x = torch.randn(3, COLUMNS, dtype=torch.bfloat16)
    usual = trellis_linear(*arguments(x, held))
    values = [part for _, part in values_by_run(held, torch.bfloat16)]
    monkeypatch.setattr(compiled, "why_not_products", lambda _: ["not here"])
    for one, other in zip(values, (part for _, part in values_by_run(held, torch.bfloat16)), strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(trellis_linear(*arguments(x, held)), usual, rtol=0.02, atol=0.5)


@pytest.mark.parametrize("laid", [False, True], ids=["by rows", "in strips"])
def test_inputs(laid: bool):
    weight = weight_of(2)
    held: TrellisWords | TrellisStrips = pack_trellis_strips(weight) if laid else weight
    assert trellis_product(torch.empty(0, COLUMNS), held).shape == (0, ROWS)
    x = torch.randn(COLUMNS, 3)
    assert torch.equal(trellis_product(x.t(), held), trellis_product(x.t().contiguous(), held))
    with pytest.raises(InputError, match="x has 512 columns; the weight has 544"):
        trellis_product(torch.empty(1, 512), held)


@pytest.mark.parametrize("laid", [False, True], ids=["by rows", "in strips"])
def test_operator(laid: bool):
    weight = weight_of(2)
    held: TrellisWords | TrellisStrips = pack_trellis_strips(weight) if laid else weight
    x = torch.randn(2, 3, COLUMNS, requires_grad=True)
    torch.library.opcheck(trellis_linear.registered, arguments(x, held))
    grad = torch.randn(2, 3, ROWS, requires_grad=True)
    _, words, before, scale, _, *code = arguments(x, held)
    torch.library.opcheck(trellis_gradient.registered, (grad, x.shape, words, before, scale, None, *code))
    trellis_linear(*arguments(x, held)).backward(grad)
    dense = torch.cat([values for _, values in values_by_run(weight, torch.float32)])
    torch.testing.assert_close(x.grad, grad @ dense, rtol=1e-4, atol=1e-3)
