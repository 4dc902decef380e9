"""Layers of tiles, of sparse rows and of sums: what they compute, hold, store and say about themselves."""

from dataclasses import replace

import pytest
import torch
from combinations import every
from commands import command
from hypothesis import given, settings
from hypothesis import strategies as st
from layers import holds
from models import build, tokens
from outliers import Outliers, tiled
from torch import nn

import compress
from compress.base.errors import InputError
from compress.checkpoint.read.compressed_layers import read_weight, widen
from compress.inference.check.dense_twin import compare_layers, error, plain
from compress.inference.layers.compressed_layers import lay_in_strips
from compress.inference.layers.fused import why_not_fuse
from compress.inference.layers.linear import PackedLinear, QuantLinear, SparseLinear, SumLinear, TilesLinear, run_of
from compress.kernels.cpu import build as cpu
from compress.kernels.operators.sparse import DECODE_TOKENS
from compress.kernels.tuning.table import Shape
from compress.recipes.low_rank import Factors
from compress.weights.formats.codes import Packed
from compress.weights.formats.sparse import Sparse, sparse
from compress.weights.formats.tiles import Tiles
from compress.weights.grid import Grid, quantize
from compress.weights.matrix import Weight
from compress.weights.scheme import parts_of, scheme_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def terms_of(N: int = 40, K: int = 192, dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: int):
    """(codes on a grid, codes in tiles, outliers) of one weight: both leave the outliers to the last."""
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(seed)).to(dtype)
    chosen = weight.abs() > 2.3
    rest = weight.masked_fill(chosen, 0)
    codes = quantize(rest, Grid(bits=4, symmetric=False, granularity="group", group_size=32), dtype)
    return codes, tiled(rest, Tiles(**sizes), dtype), sparse(weight, chosen)


SUMS = {
    "codes + sparse": lambda codes, tiles, rest: Weight((codes, rest)),
    "tiles + sparse": lambda codes, tiles, rest: Weight((tiles, rest)),
    "sparse + codes": lambda codes, tiles, rest: Weight((rest, codes)),
    "tiles": lambda codes, tiles, rest: Weight((tiles,)),
    "sparse": lambda codes, tiles, rest: Weight((rest,)),
    "codes + tiles + sparse": lambda codes, tiles, rest: Weight((codes, tiles, rest)),
}


def layer_of(name: str, dtype: torch.dtype = torch.float32, bias: bool = True, **sizes: int) -> QuantLinear:
    terms = terms_of(dtype=dtype, **sizes)
    added = torch.randn(terms[1].shape[0], generator=torch.Generator().manual_seed(1)).to(dtype)
    return QuantLinear.from_quantized(SUMS[name](*terms), added if bias else None)


@pytest.mark.first
@torch.no_grad()
@pytest.mark.parametrize("name", SUMS)
@every("dtype", DTYPES)
@every("M", [1, 3, 17])
def test_right_is_allowed_and_slightly_wrong_is_not(name, dtype, M):
    for bias, sizes in ((True, {}), (False, {"bits": 5, "group_size": 32, "tile_rows": 3, "scale_bits": 6})):
        layer = layer_of(name, dtype, bias, **sizes)
        x = torch.randn(M, layer.in_features, generator=torch.Generator().manual_seed(M)).to(dtype)
        out = layer(x)
        assert out.dtype == dtype
        for right in (out, plain(layer, x)):
            assert error(layer, x, right) <= 1
        assert error(layer, x, out * 1.1) > 1
        if dtype == torch.float32:
            wrong = out.clone()
            wrong[0, 5] += 1e-3 * out.std()
            assert error(layer, x, wrong) > 1


@torch.no_grad()
@pytest.mark.parametrize("name", ["codes + sparse", "tiles + sparse"])
def test_codes_and_entries_are_one_product(name, monkeypatch):
    layer = layer_of(name)
    assert isinstance(layer, SumLinear)
    for kind in (SparseLinear, PackedLinear, TilesLinear):
        monkeypatch.setattr(kind, "forward", lambda self, x: pytest.fail("a product of its own"))
    x = torch.randn(3, layer.in_features)
    assert error(layer, x, layer(x)) <= 1


@pytest.mark.full
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    N=st.integers(1, 70) | st.sampled_from([16, 48]),
    groups=st.integers(1, 9),
    group=st.sampled_from([16, 24, 32, 48]),
    tile_rows=st.sampled_from([1, 3, 16]),
    bits=st.lists(st.integers(2, 8), min_size=3, max_size=3),
    dtype=st.sampled_from(DTYPES),
)
def test_tiles_of_any_size_are_stored_bit_for_bit(N, groups, group, tile_rows, bits, dtype):
    sizes = {"bits": bits[0], "scale_bits": bits[1], "zero_bits": bits[2], "group_size": group, "tile_rows": tile_rows}
    tiles = tiled(torch.randn(N, group * groups, generator=torch.Generator().manual_seed(N)), Tiles(**sizes), dtype)
    parts, scheme = parts_of(Weight((tiles,))), scheme_of(Weight((tiles,)))
    layer = QuantLinear.from_parts(parts, scheme, tiles.shape)
    assert isinstance(layer, TilesLinear)
    x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(N)).to(dtype)
    holds(layer, tiles.dequantize(), parts, x)
    layer.lay_in_strips()
    assert layer.in_strips == (not cpu.why_not() and N % 16 == group % 16 == 0)
    holds(layer, tiles.dequantize(), parts, x)
    layer.to("meta")
    assert not layer.in_strips


@pytest.mark.parametrize("name", SUMS)
def test_conversion_follows_the_model(name):
    layer = layer_of(name).to(torch.bfloat16)
    assert layer.dtype == layer.dequantize().dtype == torch.bfloat16
    x = torch.randn(3, layer.in_features).bfloat16()
    assert error(layer, x, layer(x)) <= 1
    with pytest.raises(InputError, match=r"x is torch\.float32, the layer computes in torch\.bfloat16"):
        layer(x.float())


@pytest.mark.parametrize("name", ["tiles", "sparse", "tiles + sparse"])
@every("stored", DTYPES)
@every("laid", [True, False])
def test_a_weight_stands_for_what_is_stored_whatever_the_layer_computes_in(name, stored, laid):
    layer = layer_of(name, stored, False, N=48)
    if laid:
        lay_in_strips(layer)
        tiles = [part for part in layer.modules() if isinstance(part, TilesLinear)]
        assert all(part.in_strips != bool(cpu.why_not()) for part in tiles)
    before = layer.state_dict()
    for dtype in (torch.bfloat16, torch.float32, torch.float16, stored):
        layer.to(dtype)
        dense = read_weight("layer", layer.scheme, widen(before, dtype), (48, 192)).dequantize(dtype)
        assert torch.equal(layer.dequantize(), dense)
        x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
        assert layer(x).dtype == dtype
        assert error(layer, x, layer(x)) <= 1
    after = layer.state_dict()
    assert all(torch.equal(after[key], value) and after[key].dtype == value.dtype for key, value in before.items())


def test_entries_outside_of_the_weight_are_refused():
    """Kernels read x where columns say."""
    layer = nn.ModuleDict({"proj": layer_of("codes + sparse")})
    state = layer.state_dict()
    state["proj.term1_column"] = state["proj.term1_column"] + 1000
    with pytest.raises(RuntimeError, match=r"proj\.column goes from \d+ to \d+; there are 192 inputs"):
        layer.load_state_dict(state)


def test_entries_may_be_wider_than_codes():
    codes, _, rest = terms_of(dtype=torch.bfloat16)
    wide = Sparse(rest.row_start, rest.column, rest.value.float() * 1.001, rest.inputs)
    layer = QuantLinear.from_quantized(Weight((codes, wide)))
    x = torch.randn(3, layer.in_features).bfloat16()
    assert layer.dtype == torch.bfloat16
    assert error(layer, x, layer(x)) <= 1
    assert layer.state_dict()["term1_value"].dtype == torch.float32


@pytest.mark.parametrize("name", SUMS)
def test_compiles_into_one_graph(name):
    torch._dynamo.reset()  # every layer is compiled by the same code, which has a limit
    model = nn.Sequential(layer_of(name), nn.SiLU())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((1, 192), (2, 5, 192)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("name", SUMS)
def test_the_input_gets_a_gradient(name):
    layer = layer_of(name)
    x, grad = torch.randn(3, 192, requires_grad=True), torch.randn(3, 40)
    layer(x).backward(grad)
    torch.testing.assert_close(x.grad, grad @ layer.dequantize(), rtol=1e-4, atol=1e-4)


def test_a_rounded_input_is_rounded_for_codes_and_entries():
    weight = SUMS["codes + sparse"](*terms_of())
    tokens = Grid(bits=8, granularity="token")
    layer = QuantLinear.from_quantized(weight, None, replace(scheme_of(weight), inputs=tokens))
    x = torch.randn(5, 192)
    expected = nn.functional.linear(quantize(x, tokens, torch.float32).dequantize(), weight.dequantize())
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


def test_tiles_take_little_more_memory_than_their_file():
    """3-bit codes in words of 4; 4.75 + 0.32 bits beside 3.625 + 0.32."""
    _, tiles, rest = terms_of(256, 1024, torch.bfloat16)
    weight = Weight((tiles, rest))
    stored = sum(part.nbytes for part in parts_of(weight).values())
    held = sum(buffer.nbytes for buffer in QuantLinear.from_quantized(weight).buffers())
    assert held <= 1.4 * stored


def test_rows_of_sums_are_not_stacked():
    for name in SUMS:
        layer = layer_of(name)
        assert any("is not one product of stacked rows" in reason for reason in why_not_fuse([layer, layer]))


def test_routes_name_the_kernels_and_what_speaks_against_faster_ones():
    shape = (4096, 4096)

    def route(name, M, device=CPU, dtype=torch.bfloat16, **sizes):
        scheme = scheme_of(SUMS[name](*terms_of(**sizes)))
        return run_of(scheme).route(scheme, M, shape, dtype, device)

    assert route("codes + sparse", 1) == ("cpu strips with entries", ())
    assert route("codes + sparse", 512, dtype=torch.float32) == ("cpu slabs with entries", ())
    assert route("tiles + sparse", 1) == ("cpu strips with entries", ())
    assert route("tiles", 512) == ("cpu slabs", ())
    assert route("sparse", 1) == ("cpu rows", ())
    assert route("codes + tiles + sparse", 1).kernel == "cpu strips with entries + cpu strips"
    kernel, reasons = route("tiles + sparse", 1, group_size=24)
    assert kernel == "torch + entries"
    assert reasons == (
        "group size 24; allowed: multiples of 16",
        "entries are added by a product of their own",
    )
    kernel, reasons = route("codes + sparse", 1, dtype=torch.float64)
    assert kernel == "torch + entries"
    assert "float64" in reasons[0]


def test_routes_on_a_gpu(monkeypatch):
    monkeypatch.setattr("compress.kernels.operators.words.why_not_triton", lambda device: ())
    monkeypatch.setattr("compress.kernels.operators.devices.why_not_triton", lambda device: ())
    meta, many = torch.device("meta"), DECODE_TOKENS + 1
    monkeypatch.setattr("compress.kernels.operators.words.device_of", lambda device: None)
    monkeypatch.setattr("compress.kernels.operators.words.choose", lambda *sizes: Shape(16, 128))
    for name, few, lots in (
        ("codes + sparse", "triton + entries", "dequantize with entries"),
        ("tiles + sparse", "triton + entries", "dequantize with entries"),
        ("tiles", "triton", "dequantize"),
        ("sparse", "triton", "dequantize"),
    ):
        scheme = scheme_of(SUMS[name](*terms_of()))
        found = [run_of(scheme).route(scheme, M, (4096, 4096), torch.bfloat16, meta) for M in (1, many)]
        assert [route.kernel for route in found] == [few, lots], name
        assert all("unpacking once" in " ".join(route.why_not) for route in found[1:])


def test_terms_without_a_kernel_are_still_multiplied_as_they_know():
    codes, _, rest = terms_of()
    parts = {"left": torch.randn(40, 3), "right": torch.randn(3, 192)}
    weight = Weight((Factors(rank=3).read(parts, 40, 192), Packed(grid=codes.grid).term(codes), rest))
    layer = QuantLinear.from_quantized(weight)
    x = torch.randn(4, 192)
    assert error(layer, x, layer(x)) <= 1
    kernel, reasons = layer.route(layer.scheme, 1, (40, 192), torch.float32, CPU)
    assert kernel == "svd + cpu rows with entries"
    assert reasons == ("svd has no kernel: it is multiplied as the format knows",)


@pytest.mark.first
@torch.no_grad()
@pytest.mark.parametrize("tiles", [False, True])
def test_a_checkpoint_of_sums_runs_by_its_kernels_and_says_so(tiles, tmp_path):
    out, said = tmp_path / "out", "cpu strips with entries"
    method = Outliers(tiles=tiles, share=0.03, group_size=32)
    compress.quantize(build("llama"), method, output=out, verify=False)
    model = compress.load(out, torch.float32)
    with compare_layers(model) as worst:
        model(tokens(2, 7))
    assert len(worst) == 14
    assert max(worst.values()) <= 1
    shown = command("inspect", out, "--kernels", "--device", "cpu")
    assert (shown.code, said.removesuffix(" entries") in shown.out) == (0, True), shown.err
    words = ("--device", "cpu", "--batch", 1, "--prompt", 10, "--new", 2, "--rounds", 1)
    speed = command("bench", out, *words, "--dtype", "float32")
    assert speed.code == 0, speed.err
    assert f"compressed, decode: {said}\n" in speed.out
    assert "compressed, prefill: cpu slabs with entries\n" in speed.out
    with pytest.raises(InputError, match="layers are not codes on a grid and nothing else"):
        compress.load(out, int8_activations=True)
