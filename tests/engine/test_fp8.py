"""float8: the grid against the format's definition, the operator, and memory = checkpoint = transformers."""

import json
import re

import pytest
import torch
from commands import StopAfterOne, command, fast_gptq, make_llama, save
from models import build, tokens
from places import FIXTURES
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import compress
from compress.base.errors import CheckpointError, InputError
from compress.checkpoint.read.source import find_source
from compress.inference.check.by_transformers import load_with_transformers
from compress.inference.layers.compressed_layers import compressed_layers
from compress.inference.layers.fused import FusedLinear, why_not_fuse
from compress.inference.layers.linear import Fp8Linear, QuantLinear
from compress.jobs.verify import outputs, probe, verify
from compress.kernels import reference
from compress.kernels.operators import fp8
from compress.kernels.routes import fp8_route
from compress.solvers.statistics.calibrators import calibrator
from compress.weights.grid import Grid, decode, encode, fake_quantize, quantize
from compress.weights.rounding import ActivationCodes
from compress.weights.scale_numbers import round_to_e4m3
from compress.weights.scheme import scheme_on

LLMCOMPRESSOR = FIXTURES / "llmcompressor"
CHANNEL, TENSOR = (Grid(bits=8, type="float", granularity=g) for g in ("channel", "tensor"))
TOKENS = Grid(bits=8, type="float", granularity="token")
E4M3 = torch.float8_e4m3fn


def definition():
    """{code: value} of all finite codes, from the words of the format: sign, four bits of exponent (bias 7), three of
    fraction; exponent 0 has no hidden bit; 0x7f and 0xff are NaN."""
    values = {}
    for code in range(256):
        sign, exponent, fraction = (-1) ** (code >> 7), code >> 3 & 15, code & 7
        if exponent == 15 and fraction == 7:
            continue
        values[code] = sign * (2.0 ** (exponent - 7) * (1 + fraction / 8) if exponent else 2.0**-6 * fraction / 8)
    return values


VALUES = definition()
POSITIVE = torch.tensor([VALUES[code] for code in range(127)], dtype=torch.float64)


def bits(codes):
    return codes.view(torch.uint8)


# --- the grid ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_code_is_its_own_nearest(dtype):
    codes = torch.tensor(list(VALUES), dtype=torch.uint8).view(E4M3)
    values = torch.tensor(list(VALUES.values()), dtype=dtype)
    assert torch.equal(codes.to(dtype), values)
    assert torch.equal(fp8.values(codes), values.float())
    assert torch.equal(bits(round_to_e4m3(values).to(E4M3)), bits(codes))
    found = quantize(values[None] * 0.25, CHANNEL, scale=torch.tensor([[0.25]]))
    assert torch.equal(bits(found.codes[0]), bits(codes))
    assert torch.equal(found.dequantize(), values[None] * 0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounds_to_the_nearest_and_ties_to_the_even_code(dtype):
    middle = ((POSITIVE[1:] + POSITIVE[:-1]) / 2).to(dtype)  # exact in both dtypes
    even = torch.where(torch.arange(126) % 2 == 0, POSITIVE[:-1], POSITIVE[1:]).to(dtype)
    assert torch.equal(round_to_e4m3(middle), even)
    assert torch.equal(round_to_e4m3(-middle), -even)
    infinity = torch.tensor(float("inf"), dtype=dtype)
    assert torch.equal(round_to_e4m3(torch.nextafter(middle, -infinity)), POSITIVE[:-1].to(dtype))
    assert torch.equal(round_to_e4m3(torch.nextafter(middle, infinity)), POSITIVE[1:].to(dtype))
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4000, generator=generator, dtype=dtype) * 2.0 ** torch.randint(-12, 10, (4000,), generator=generator)
    x = x.clamp(max=448)
    nearest = POSITIVE[(x.double()[:, None] - POSITIVE).abs().argmin(1)].to(dtype)
    assert torch.equal(round_to_e4m3(x), nearest)


def test_saturates_and_never_makes_nan():
    x = torch.tensor([[1e30, -1e30, 464.0, 449.0, -480.0, 1e-9, -1e-9, 0.0]])
    found = quantize(x, CHANNEL, scale=torch.tensor([[1.0]]))
    assert found.codes.float().tolist() == [[448, -448, 448, 448, -448, 0, 0, 0]]
    # A scale that was rounded down puts the largest element above 448.
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    half = quantize(weight, CHANNEL, torch.bfloat16)
    assert bool((weight.abs().amax(1) > 448 * half.scale[:, 0].float()).any())
    assert not half.codes.isnan().any()
    assert not quantize(torch.zeros(2, 4), CHANNEL).dequantize().any()


@pytest.mark.parametrize("grid", [CHANNEL, TENSOR, TOKENS], ids=lambda g: g.granularity)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_scale_is_absmax_over_448(grid, dtype):
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = quantize(weight, grid)
    largest = weight.float().abs().amax() if grid is TENSOR else weight.float().abs().amax(1, keepdim=True)
    assert torch.equal(found.scale, (largest / 448).to(dtype).expand_as(found.scale))
    assert (found.codes.dtype, found.scale.dtype, found.zero_point) == (E4M3, dtype, None)
    # Rounded once, to the scale's dtype: eight significant bits of a product fit into float32.
    assert torch.equal(found.dequantize(), (found.codes.double() * found.scale.double()).to(dtype))
    zero = torch.zeros_like(found.scale).float()
    codes = encode(weight.float(), found.scale.float(), zero, grid)
    assert torch.equal(decode(codes, found.scale.float(), zero, dtype).to(dtype), found.dequantize())


def test_a_wider_range_may_fit_better_and_never_worse():
    weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(0))
    plain, searched = (fake_quantize(weight, g) for g in (CHANNEL, CHANNEL.with_range("mse")))
    errors = [(v - weight).square().sum(1) for v in (plain, searched)]
    assert (errors[1] <= errors[0]).all()
    assert errors[1].sum() < 0.9 * errors[0].sum()


@pytest.mark.parametrize(
    "options", [{"bits": 5}, {"symmetric": False}, {"signed_scale": True}, {"granularity": "group", "group_size": 16}]
)
def test_floats_have_no_groups_zero_points_or_other_widths(options):
    with pytest.raises(InputError, match="float codes have 4, 6 or 8 bits"):
        Grid(**{"bits": 8, "type": "float", **options})


# --- the operator --------------------------------------------------------------------------------------------------


def arguments(dtype=torch.float32, static=False, gradient=False, bias=True):
    g = torch.Generator().manual_seed(2)
    x = (torch.randn(2, 3, 96, generator=g) * 3).to(dtype).requires_grad_(gradient)
    weight = bits(torch.randn(48, 96, generator=g).mul(50).to(E4M3))
    scale, added = torch.rand(48, generator=g) * 0.01, torch.randn(48, generator=g)
    return x, weight, scale, added if bias else None, torch.tensor([0.02]) if static else None


def truth(x, weight, scale, bias, input_scale):
    x_MK = x.detach().reshape(-1, x.shape[-1])
    codes, x_scale = fp8.quantize_tokens(x_MK) if input_scale is None else (None, input_scale)
    codes = fp8.quantize_static(x_MK, input_scale) if codes is None else codes
    weight = weight.view(E4M3)
    exact = fp8.reference(codes, x_scale, weight, scale, bias)
    given = codes.double() * x_scale.double()[:, None]
    return exact, reference.tolerance(given, weight.double() * scale.double()[:, None], exact, x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_inputs_are_rounded_as_the_grid_rounds_them(dtype):
    x = (torch.randn(5, 48, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    codes, scale = fp8.quantize_tokens(x)
    found = quantize(x, TOKENS, torch.float32)
    assert torch.equal(bits(codes), bits(found.codes))
    assert torch.equal(scale, found.scale[:, 0])
    assert torch.equal(ActivationCodes(TOKENS).fake_quantize(x), (codes.float() * scale[:, None]).to(dtype))
    fixed = torch.tensor([[0.01]])
    static = ActivationCodes(TENSOR, fixed).fake_quantize(x)
    codes = fp8.quantize_static(x, fixed[0])
    assert codes.float().abs().max() == 448  # something saturates
    assert torch.equal(static, (codes.float() * fixed).to(dtype))


@pytest.mark.parametrize("path", ["torch", "scaled_mm"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_both_paths_are_the_reference(path, static, bias, dtype, monkeypatch):
    """torch has a product of float8 matrices for a CPU, too: it is called as on a GPU, for its shapes and scales."""
    if path == "scaled_mm":
        if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"):
            pytest.skip("this torch multiplies float8 matrices on GPUs only")
        monkeypatch.setattr(fp8, "_why_not_device", lambda device: ())
    else:
        monkeypatch.setattr(fp8, "BLOCK_BYTES", 4 * 96 * 5)  # five rows at a time, three in the last block
    given = arguments(dtype, static, bias=bias)
    assert bool(fp8.why_not_fp8(given[0], given[1])) == (path == "torch")
    out = fp8.fp8_linear(*given)
    exact, allowed = truth(*given)
    assert (out.dtype, out.shape) == (dtype, (2, 3, 48))
    if bias and path == "scaled_mm":
        allowed = allowed + torch.finfo(dtype).eps * given[3].abs()  # the bias is rounded to the dtype of the output
    assert ((out.double().view(6, 48) - exact).abs() <= allowed).all()


@pytest.mark.parametrize("shape", [(1, 96), (0, 96), (2, 0, 96), (96,)])
def test_any_leading_shape(shape):
    x = torch.randn(shape)
    assert fp8.fp8_linear(x, *arguments()[1:]).shape == (*shape[:-1], 48)


class Largest(TorchDispatchMode):
    """The most elements of a float32 tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.elements = max(self.elements, out.numel())
        return out


def test_the_weight_is_never_dense_as_a_whole(monkeypatch):
    monkeypatch.setattr(fp8, "BLOCK_BYTES", 4 * 96 * 5)
    x, weight, scale, bias, _ = arguments()
    codes, x_scale = fp8.quantize_tokens(x.view(6, 96))
    with Largest() as largest:
        fp8.blocked_product(codes, x_scale, weight.view(E4M3), scale, bias, torch.bfloat16)
    assert largest.elements == 6 * 96  # the input; a block of five rows is smaller


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("gradient", [False, True])
def test_contract(static, gradient):
    torch.library.opcheck(fp8.fp8_linear.registered, arguments(static=static, gradient=gradient))


def test_the_gradient_goes_straight_through():
    given = arguments(gradient=True)
    grad = torch.randn(2, 3, 48, generator=torch.Generator().manual_seed(3))
    fp8.fp8_linear(*given).backward(grad)
    torch.testing.assert_close(given[0].grad, grad @ (given[1].view(E4M3).float() * given[2][:, None]))


def test_reasons_name_what_was_given_and_what_is_needed(monkeypatch):
    x, weight = torch.zeros(1, 100, dtype=torch.float64), torch.zeros(20, 100).to(E4M3)
    reasons = "; ".join(fp8.why_not_fp8(x, weight))
    for part in ("the device is cpu", "float64; allowed", "20 outputs; .* multiple of 16", "100 inputs"):
        assert re.search(part, reasons), part
    route = fp8_route(4, 64, 96, torch.bfloat16, torch.device("cpu"))
    assert route == ("torch", ("the device is cpu, not cuda",))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert "8.6; float8 products need 8.9" in fp8._why_not_device.__wrapped__(torch.device("cuda"))[0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert fp8._why_not_device.__wrapped__(torch.device("cuda")) == ()


def test_wrong_operands_are_refused():
    x, weight, *rest = arguments()
    with pytest.raises(InputError, match="x has 90 columns, the weight 96"):
        fp8.fp8_linear(x[..., :90], weight, *rest)
    with pytest.raises(InputError, match=r"the weight is torch\.float32; allowed: uint8"):
        fp8.fp8_linear(x, weight.float(), *rest)


# --- the layer -----------------------------------------------------------------------------------------------------


def layer_of(rows=32, per="channel", static=None, seed=0):
    torch.manual_seed(seed)
    linear = torch.nn.Linear(64, rows)
    weights, inputs = CHANNEL if per == "channel" else TENSOR, TOKENS if static is None else TENSOR
    scheme = scheme_on(weights, inputs, dynamic=static is None)
    weight = quantize(linear.weight.detach(), scheme.weights)
    layer = QuantLinear.from_quantized(weight, linear.bias.detach(), scheme) if static is None else None
    if layer is None:
        scale = weight.scale[:1, 0] if per == "tensor" else weight.scale
        parts = {"weight": weight.codes, "weight_scale": scale, "input_scale": torch.tensor([static])}
        layer = QuantLinear.from_parts(parts, scheme, weight.codes.shape, linear.bias.detach())
    assert isinstance(layer, Fp8Linear)
    assert torch.equal(layer.dequantize(), weight.dequantize())
    return layer


@pytest.mark.parametrize("per", ["channel", "tensor"])
@pytest.mark.parametrize("static", [None, 0.02])
def test_the_state_dict_is_the_checkpoints(per, static):
    layer, other = layer_of(per=per, static=static), layer_of(per=per, static=static and 0.5, seed=1)
    state = layer.state_dict()
    expected = {"weight": E4M3, "weight_scale": torch.float32, "bias": torch.float32}
    assert {k: v.dtype for k, v in state.items()} == expected | (
        {} if static is None else {"input_scale": torch.float32}
    )
    assert state["weight_scale"].shape == ((1,) if per == "tensor" else (32, 1))
    x = torch.randn(3, 64)
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(state)
    assert torch.equal(other(x), layer(x))
    before = bits(state["weight"]).clone()
    half = layer.to(torch.bfloat16)
    assert half(x.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(bits(half.state_dict()["weight"]), before)  # codes are not converted with the model


@pytest.mark.parametrize("static", [None, 0.02])
@pytest.mark.parametrize("per", ["channel", "tensor"])
def test_fused_layers_compute_and_store_what_the_single_ones_do(per, static):
    layers = [layer_of(rows, per, static, seed) for seed, rows in enumerate((32, 16, 8))]
    x = torch.randn(2, 5, 64)
    expected, states = [layer(x) for layer in layers], [layer.state_dict() for layer in layers]
    for part, out, state in zip(FusedLinear.fuse(layers), expected, states, strict=True):
        torch.testing.assert_close(part(x), out)
        found = part.state_dict()
        found.pop("stacked.bias", None)
        for key, value in state.items():
            assert torch.equal(found[key], value), key


def test_different_input_scales_are_not_fused():
    assert "scales of the input differ" in why_not_fuse([layer_of(static=0.02), layer_of(static=0.03)])
    assert any("schemes differ" in reason for reason in why_not_fuse([layer_of(), layer_of(per="tensor")]))


def test_by_name():
    layer = QuantLinear.from_linear(torch.nn.Linear(64, 32), "fp8")
    assert str(layer.scheme) == "fp8 channel, input dynamic"
    with pytest.raises(InputError, match="fp8 has one scale per output"):
        QuantLinear.from_linear(torch.nn.Linear(64, 32), "fp8", 16)


# --- memory, checkpoint, transformers ------------------------------------------------------------------------------

DYNAMIC = {"scheme": "fp8"}
STATIC = {"scheme": "fp8", "activations": "static"}
WHOLE = {**STATIC, "per_tensor": True}
METHODS = {"rtn": compress.RTN, "gptq": fast_gptq, "awq": compress.AWQ, "smoothquant": compress.SmoothQuant}
CASES = [("rtn", DYNAMIC), ("rtn", STATIC), ("gptq", DYNAMIC), ("gptq", {**WHOLE, "refit": 0})]
CASES += [("awq", DYNAMIC), ("smoothquant", STATIC)]


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda o: o if isinstance(o, str) else "-".join(map(str, o)))
def test_memory_checkpoint_and_transformers_agree(name, options, tmp_path):
    pytest.importorskip("compressed_tensors", reason="needs the hf extra")
    from transformers import CompressedTensorsConfig

    method = METHODS[name](**options)
    calibration = tokens() if method.calibrated else None
    source = save(build("llama"), tmp_path / "in")
    compress.quantize(source, method, calibration=calibration, output=tmp_path / "out", verify=False)
    memory = compress.load(source)
    compress.quantize(memory, method, calibration=calibration)
    low = compress.load(tmp_path / "out")
    layers = dict(compressed_layers(low))
    assert len(layers) == 14
    config = CompressedTensorsConfig(dequantize=True)
    with pytest.warns(UserWarning, match="quantization_config"):
        dense = AutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=config)
    for layer_name, layer in layers.items():
        assert isinstance(layer, Fp8Linear)
        assert torch.equal(layer.dequantize(), memory.get_submodule(layer_name).weight)
        assert torch.equal(layer.dequantize(), dense.get_submodule(layer_name).weight)
    expected = outputs(memory, probe(96))
    theirs, loader = load_with_transformers(find_source(str(tmp_path / "out")), torch.float32)
    assert loader == "default"
    # One code of one input more or less where sums in another order round a tie the other way.
    for other in (low, theirs):
        assert (outputs(other, probe(96)) - expected).abs().max() <= 0.05 * expected.std()
    assert (expected - outputs(compress.load(source), probe(96))).abs().max() > 1e-3 * expected.std()


def test_verification_sees_one_wrong_layer_and_no_tie(tmp_path, monkeypatch):
    """Ties of float8 inputs make whole models differ by as much as rounding does; verification must not feel them."""
    pytest.importorskip("compressed_tensors", reason="needs the hf extra")
    compress.quantize(
        save(make_llama(), tmp_path / "in"), compress.RTN(**DYNAMIC), output=tmp_path / "out", verify=False
    )
    assert verify(tmp_path / "out")["logits_max_difference"] < 1e-5
    forward = Fp8Linear.forward
    monkeypatch.setattr(
        Fp8Linear, "forward", lambda self, x: forward(self, x) * (1.1 if self.out_features == 96 else 1)
    )
    with pytest.raises(
        compress.CompressError, match=r"mlp\.(gate|up)_proj of .* computes something else than its codes"
    ):
        verify(tmp_path / "out")


def test_gptq_loses_less_than_rounding():
    record = compress.quantize(build("llama"), compress.GPTQ(scheme="fp8"), calibration=tokens()).record
    assert all(r.figures["loss"] < 0.7 * r.figures["rtn_loss"] for r in record.layers)


def test_the_checkpoint_says_what_it_holds(tmp_path):
    passes = [
        compress.only(compress.RTN(**STATIC), "*.mlp.*"),
        compress.only(compress.RTN(scheme="w8a8"), "*.self_attn.*"),
    ]
    out = tmp_path / "out"
    compress.quantize(
        save(make_llama().bfloat16(), tmp_path / "in"), passes, calibration=tokens(), output=out, verify=False
    )
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    groups = {group["format"]: group for group in config["config_groups"].values()}
    assert set(groups) == {"float-quantized", "int-quantized"}
    assert groups["float-quantized"]["weights"] == {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "dynamic": False,
        "strategy": "channel",
    }
    assert groups["float-quantized"]["input_activations"]["type"] == "float"
    told = command("inspect", out, "--json", "-").json()
    rows = {row["name"]: row for row in told["layers"]}
    up = rows["model.layers.0.mlp.up_proj"]
    assert up["scheme"] == "fp8 channel, input static"
    assert up["bits"] == 8 + 16 * (96 + 1) / (96 * 64)  # codes, a scale per output and one of the input
    kernels = command("inspect", out, "--kernels")
    assert kernels.code == 0
    assert "fp8 channel" in kernels.out
    assert "not cuda" in kernels.out.replace("\n", " ")


def test_evaluation_sees_rounded_inputs(tmp_path):
    source, ids = save(make_llama(), tmp_path / "in"), tokens(4, 32)
    compress.quantize(source, compress.RTN(**DYNAMIC), output=tmp_path / "out", verify=False)
    memory = compress.load(source)
    compress.quantize(memory, compress.RTN(**DYNAMIC))
    found = compress.evaluate(tmp_path / "out", reference=source, text=ids)
    expected = compress.evaluate(memory, reference=compress.load(source), text=ids)
    assert found.kl_mean > 0
    assert found.kl_mean == pytest.approx(expected.kl_mean, rel=0.2)


def test_a_stopped_run_resumes_to_the_same_files(tmp_path):
    method, given = fast_gptq(**STATIC), {"calibration": tokens(), "verify": False}
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(build("llama"), method, output=tmp_path / "out", reporter=StopAfterOne(), **given)
    compress.quantize(build("llama"), method, output=tmp_path / "out", resume=True, **given)
    compress.quantize(build("llama"), method, output=tmp_path / "whole", **given)
    whole, resumed = (tmp_path / name / "model.safetensors" for name in ("whole", "out"))
    assert whole.read_bytes() == resumed.read_bytes()


def test_static_ranges_by_other_calibrators():
    seen = set()
    for name in ("minmax", "moving-average", "percentile", "mse"):
        model = build("llama")
        compress.quantize(model, compress.RTN(**STATIC, calibrator=name), calibration=tokens())
        (hook,) = model.model.layers[0].mlp.down_proj._forward_pre_hooks.values()
        assert hook.codes.grid == TENSOR
        seen.add(float(hook.codes.scale))
    assert len(seen) > 1
    for make in (lambda: calibrator("kl", TENSOR), lambda: compress.RTN(**STATIC, calibrator="kl")):
        with pytest.raises(InputError, match="'kl' compares with evenly spaced codes, which floats are not"):
            make()


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 32}, "fp8 has symmetric weights and one scale per output channel"),
        ({"grid": "asymmetric"}, "fp8 is symmetric: a float has no zero point"),
        ({"grid": "narrow"}, "fp8 is symmetric"),
        ({"activations": "static", "activation_grid": "asymmetric"}, "fp8 is symmetric"),
        ({"scheme": "fp4"}, "'fp4'; allowed: .*fp8"),
        ({"scheme": "FP8_DYNAMIC"}, r"'FP8_DYNAMIC'; did you mean 'fp8'\? allowed: .*fp8"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        compress.RTN(**{"scheme": "fp8", **options})


def changed(name, folder, tensors=None, config=None):
    """A copy of a fixture whose tensors or scheme a function has edited."""
    held = load_file(LLMCOMPRESSOR / name / "model.safetensors")
    told = json.loads((LLMCOMPRESSOR / name / "config.json").read_text())
    (tensors or (lambda t: None))(held)
    (config or (lambda g: None))(told["quantization_config"]["config_groups"]["group_0"])
    (folder / "config.json").write_text(json.dumps(told))
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].to(torch.bfloat16)}),
            r"bfloat16; it must be float8_e4m3fn",
        ),
        (lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].view(torch.int8)}), r"int8; it must be float8_e4m3fn"),
        (lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].flatten()}), f"{Q}.weight has shape"),
        (lambda t: bits(t[f"{Q}.weight"]).fill_(0x7F), f"{Q}.weight holds codes that are not numbers"),
        (lambda t: t.pop(f"{Q}.input_scale"), f"{Q}.input_scale is missing"),
        (lambda t: t.update({f"{Q}.weight_scale": torch.ones(32, 1)}), rf"{Q}.weight_scale has shape \(32, 1\)"),
        (lambda t: t.update({f"{Q}.input_zero_point": torch.zeros(1)}), f"{Q}.input_zero_point is no part of a layer"),
        (lambda t: t[f"{Q}.weight_scale"].fill_(float("nan")), f"{Q}.weight_scale holds values"),
    ],
)
def test_malformed_layers_are_named(edit, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        compress.load(changed("fp8_static", tmp_path, tensors=edit))


@pytest.mark.parametrize(
    ("key", "entry", "message"),
    [
        (
            "weights",
            {"strategy": "group", "group_size": 16},
            "weights .*readable: float8, symmetric, per channel or tensor",
        ),
        ("weights", {"strategy": "block", "block_structure": [128, 128]}, "readable: float8"),
        ("weights", {"symmetric": False}, "readable: float8, symmetric"),
        ("weights", {"num_bits": 4}, "readable: float8"),
        ("weights", {"type": "int"}, "readable: float8"),
        ("input_activations", {"symmetric": False}, "input .*readable: float8, symmetric, dynamic per token"),
        ("input_activations", {"strategy": "token"}, "dynamic per token or static per tensor"),
        ("input_activations", {"type": "int"}, "readable: float8"),
    ],
)
def test_other_schemes_are_named(key, entry, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        compress.load(changed("fp8_static", tmp_path, config=lambda group: group[key].update(entry)))


def test_float8_weights_without_a_float8_input_are_named(tmp_path):
    folder = changed("fp8_dynamic", tmp_path, config=lambda group: group.update(input_activations=None))
    with pytest.raises(CheckpointError, match=r"input .* cannot be read; readable: float8"):
        compress.load(folder)


def test_checkpoints_of_older_writers_call_it_naive(tmp_path):
    folder = changed("fp8_dynamic", tmp_path, config=lambda group: group.update(format="naive-quantized"))
    model = compress.load(folder)
    ids = load_file(LLMCOMPRESSOR / "fp8_dynamic" / "expected.safetensors")["input_ids"]
    assert torch.equal(outputs(model, ids), outputs(compress.load(LLMCOMPRESSOR / "fp8_dynamic"), ids))
