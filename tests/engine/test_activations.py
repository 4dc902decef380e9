"""Rounded inputs: the model in memory, the checkpoint, what loads it, and a run on two ranks say the same."""

import json
from dataclasses import replace

import pytest
import torch
from combinations import each, every
from commands import StopAfterOne, command, fast_gptq, make_llama, save
from models import build, tokens
from safetensors.torch import load_file

import compress
from compress.base.errors import CompressError, InputError
from compress.checkpoint.read.source import find_source
from compress.inference.check.by_transformers import load_with_transformers
from compress.inference.layers.compressed_layers import compressed_layers
from compress.inference.layers.linear import Int8Linear, PackedLinear
from compress.jobs.verify import outputs, probe
from compress.kernels import reference
from compress.solvers.statistics.calibrators import OPTIONS, calibrator, scale_and_zero_point
from compress.weights.grid import Grid, quantize
from compress.weights.rounding import ActivationCodes

DYNAMIC = {"scheme": "w8a8"}
STATIC = {"scheme": "w8a8", "activations": "static"}
ASYMMETRIC = {**STATIC, "activation_grid": "asymmetric"}
W4A8 = {"scheme": "w4a8", "group_size": 16}
OUTPUTS = {**STATIC, "outputs": "static"}
ASYMMETRIC_OUTPUTS = {**ASYMMETRIC, "outputs": "static"}
SCHEMES = [DYNAMIC, STATIC, ASYMMETRIC, W4A8, OUTPUTS, ASYMMETRIC_OUTPUTS, {**DYNAMIC, "outputs": "static"}]
METHODS = {"rtn": compress.RTN, "gptq": fast_gptq}
every_scheme = pytest.mark.parametrize("options", SCHEMES, ids=lambda o: "-".join(map(str, o.values())))


def calibration_of(method):
    return tokens() if method.calibrated else None


def test_rounded_inputs_are_what_the_kernels_multiply():
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(0)) * 3
    codes, scale, _ = reference.quantize_tokens(x)
    dynamic = ActivationCodes(Grid(bits=8, granularity="token"))
    assert dynamic.dynamic
    assert torch.equal(dynamic.fake_quantize(x.view(1, 5, 48))[0], codes.float() * scale[:, None])
    fixed, zero = torch.tensor([[0.02]]), torch.tensor([[7]], dtype=torch.int8)
    static = ActivationCodes(Grid(bits=8, symmetric=False, granularity="tensor"), fixed, zero)
    codes = reference.quantize_static(x, fixed[0], zero[0].int())
    assert torch.equal(static.fake_quantize(x), (codes.float() - 7) * 0.02)
    assert static.fake_quantize(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.first
@pytest.mark.parametrize(("options", "name"), each(SCHEMES, sorted(METHODS)), ids=str)
def test_memory_checkpoint_and_transformers_agree(name, options, tmp_path):
    pytest.importorskip("compressed_tensors", reason="needs the hf extra")
    method = METHODS[name](**options)
    source = save(build("llama"), tmp_path / "in")
    compress.quantize(source, method, calibration=calibration_of(method), output=tmp_path / "out", verify=False)
    memory = compress.load(source)
    compress.quantize(memory, method, calibration=calibration_of(method))
    low = compress.load(tmp_path / "out")
    kind = PackedLinear if options is W4A8 else Int8Linear
    layers = dict(compressed_layers(low))
    assert len(layers) == 14
    assert all(isinstance(layer, kind) for layer in layers.values())
    for layer_name, layer in layers.items():
        assert torch.equal(layer.dequantize(), memory.get_submodule(layer_name).weight)
    expected = outputs(memory, probe(96))
    theirs, loader = load_with_transformers(find_source(str(tmp_path / "out")), torch.float32)
    assert loader == "default"
    # One code of one input more or less where sums in another order round a tie the other way.
    for other in (low, theirs):
        assert (outputs(other, probe(96)) - expected).abs().max() <= 0.05 * expected.std()
    dense = outputs(compress.load(source), probe(96))
    assert (expected - dense).abs().max() > 1e-3 * dense.std()  # something was rounded


@every_scheme
def test_the_layer_gets_rounded_inputs_in_memory(options):
    method = compress.RTN(**options)
    model = build("llama")
    compress.quantize(model, method, calibration=calibration_of(method))
    layer = model.model.layers[1].mlp.down_proj
    x = torch.randn(3, 64)
    (hook,) = layer._forward_pre_hooks.values()
    rounded = hook.codes.fake_quantize(x)
    assert not torch.equal(rounded, x)
    expected = torch.nn.functional.linear(rounded, layer.weight, layer.bias)
    assert len(layer._forward_hooks) == (method.outputs == "static")
    for after in layer._forward_hooks.values():
        assert not torch.equal(after.codes.fake_quantize(expected), expected)
        expected = after.codes.fake_quantize(expected)
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("symmetric", [True, False])
def test_static_ranges_are_those_of_the_calibration(symmetric):
    model, plain = build("llama"), build("llama")
    seen = []
    plain.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda _, a: seen.append(a[0]))
    with torch.no_grad():
        plain(input_ids=tokens())
    compress.quantize(model, compress.RTN(**(STATIC if symmetric else ASYMMETRIC)), calibration=tokens())
    first = model.model.layers[0].self_attn
    hooks = [next(iter(getattr(first, f"{n}_proj")._forward_pre_hooks.values())).codes for n in "qkv"]
    x = torch.cat(seen)
    expected = quantize(x.reshape(1, -1), Grid(bits=8, symmetric=symmetric, granularity="tensor"))
    for codes in hooks:  # one tensor, one scale
        torch.testing.assert_close(codes.scale, expected.scale)
        if not symmetric:
            assert torch.equal(codes.zero_point, expected.zero_point)


def padded():
    """Micro-batches of two samples, most of them with pads, whose values no range may know of."""
    mask = torch.ones(6, 16, dtype=torch.int64)
    for i, length in enumerate((16, 9, 4, 16, 1, 12)):
        mask[i, length:] = 0
    return [{"input_ids": i, "attention_mask": m} for i, m in zip(tokens().split(2), mask.split(2), strict=True)]


ROUNDING_OUTPUTS = [
    compress.RTN(**OUTPUTS),
    compress.RTN(**DYNAMIC, outputs="static"),
    fast_gptq(**ASYMMETRIC_OUTPUTS),
    compress.AWQ(**OUTPUTS),
    compress.SmoothQuant(**ASYMMETRIC_OUTPUTS),
    compress.RTN(scheme="fp8", activations="static", outputs="static"),
]


@every(("method", "kind"), each(ROUNDING_OUTPUTS, ["llama", "bert"]))
def test_ranges_of_outputs_are_those_of_the_compressed_model(method, kind):
    """What each layer returns before it is rounded, when the finished model reads the calibration data again."""
    model, batches = build(kind), padded()
    record = compress.quantize(model, method, calibration=batches, batch_size=2).record
    seen = {layer.name: [] for layer in record.layers}
    masks = [batch["attention_mask"].bool() for batch in batches]
    for name, found in seen.items():
        model.get_submodule(name).register_forward_hook(lambda _, a, y, found=found: found.append(y), prepend=True)
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    assert len(seen) == (14 if kind == "llama" else 12)
    for layer in record.layers:
        y = torch.cat([part[mask] for part, mask in zip(seen[layer.name], masks, strict=True)])
        expected = quantize(y.reshape(1, -1), method.output_grid())
        (hook,) = (h for h in model.get_submodule(layer.name)._forward_hooks.values() if hasattr(h, "codes"))
        torch.testing.assert_close(hook.codes.scale, expected.scale)
        assert (hook.codes.zero_point is None) == method.output_grid().symmetric
        if hook.codes.zero_point is not None:
            assert torch.equal(hook.codes.zero_point, expected.zero_point)
        assert (layer.figures["output_lowest"], layer.figures["output_highest"]) == tuple(map(float, y.aminmax()))


def test_an_output_that_overflows_is_named():
    model = build("llama")
    model.model.layers[0].mlp.up_proj.weight.data *= 1e20
    model.model.layers[0].mlp.up_proj.weight.data *= 3e19
    with pytest.raises(CompressError, match=r"the output of model\.layers\.0\.mlp\.up_proj has non-finite values"):
        compress.quantize(model, compress.RTN(**OUTPUTS), calibration=tokens())


RELU = compress.RTN(**STATIC, activation_grid="unsigned")


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("per_channel", [False, True])
def test_unsigned_inputs_have_all_codes_above_zero(name, per_channel):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    x = torch.randn(64, 8)
    hidden = model[:2](x).detach()
    method = replace(RELU, calibrator=name, per_channel_inputs=per_channel)
    compress.quantize(model, compress.only(method, "2"), calibration=[{"input": part} for part in x.split(16)])
    (hook,) = model[2]._forward_pre_hooks.values()
    grid = Grid(bits=8, signed=False, granularity="channel" if per_channel else "tensor")
    observer = calibrator(name, grid)(16, torch.device("cpu"))
    for part in hidden.split(16):
        observer.update(part, None)
    scale = (observer.result().hi / 255).clamp(min=torch.finfo(torch.float32).tiny)
    assert torch.equal(hook.codes.scale, scale[None])
    assert hook.codes.zero_point.dtype == torch.int8
    assert bool((hook.codes.zero_point == -128).all())
    expected = (hidden / scale).round().clamp(0, 255) * scale
    assert torch.equal(hook.codes.fake_quantize(hidden), expected)


def test_negative_inputs_are_no_unsigned_ones(tmp_path):
    with pytest.raises(
        CompressError, match=r"the input of model\.layers\.0\.self_attn\.q_proj goes down to -\d"
    ) as raised:
        compress.quantize(build("llama"), RELU, calibration=tokens(), output=tmp_path / "out")
    assert "activation_grid=asymmetric" in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_unsigned_inputs_are_stored_as_asymmetric_ones(tmp_path):
    pytest.importorskip("compressed_tensors", reason="needs the hf extra")
    model = build("opt")
    passes = [
        compress.only(replace(RELU, outputs="static"), "*.fc2"),
        compress.but(compress.RTN(scheme="w8a16", group_size=-1), "*.fc2"),
    ]
    compress.quantize(model, passes, calibration=tokens(), output=tmp_path / "out", verify=False)
    layer = "model.decoder.layers.1.fc2"
    held = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        held |= load_file(path)
    assert held[f"{layer}.input_zero_point"].tolist() == [-128]
    rows = {row["name"]: row["scheme"] for row in command("inspect", tmp_path / "out", "--json", "-").json()["layers"]}
    assert rows[layer] == "w8a8 channel symmetric, input static asymmetric, output static asymmetric"
    expected = outputs(model, probe(96))
    theirs, loader = load_with_transformers(find_source(str(tmp_path / "out")), torch.float32)
    assert loader == "default"
    for other in (compress.load(tmp_path / "out"), theirs):
        assert (outputs(other, probe(96)) - expected).abs().max() <= 0.05 * expected.std()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_each_input_channel_has_its_own_range(name, symmetric):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 4))
    x = torch.randn(64, 12) * torch.logspace(-2, 1, 12) + 0.1
    grid = "symmetric" if symmetric else "asymmetric"
    method = compress.RTN(**STATIC, activation_grid=grid, calibrator=name, per_channel_inputs=True)
    record = compress.quantize(model, method, calibration=[{"input": part} for part in x.split(16)]).record
    (hook,) = model[0]._forward_pre_hooks.values()
    assert hook.codes.scale.shape == (1, 12)
    rounded = hook.codes.fake_quantize(x)
    for channel in range(12):
        alone = calibrator(name, Grid(bits=8, symmetric=symmetric, granularity="tensor"))(1, torch.device("cpu"))
        for part in x[:, channel : channel + 1].split(16):
            alone.update(part, None)
        scale, zero = scale_and_zero_point(alone.result(), alone.grid)
        codes = ActivationCodes(alone.grid, scale[None], None if symmetric else zero[None].to(torch.int8))
        assert torch.equal(rounded[:, channel], codes.fake_quantize(x[:, channel : channel + 1]).flatten())
    figures = record.layers[0].figures
    assert figures["input_lowest"] == float(x.min())
    assert figures["input_highest"] == float(x.max())
    together = torch.nn.functional.linear(rounded, model[0].weight, model[0].bias)
    assert torch.equal(model(x), together)


def test_ranges_per_channel_stay_in_memory(tmp_path):
    method = compress.SmoothQuant(activations="static", per_channel_inputs=True)
    with pytest.raises(InputError, match="per_channel_inputs of smoothquant cannot be written: no format"):
        compress.quantize(build("llama"), compress.only(method, "*.mlp.*"), calibration=tokens(), output=tmp_path / "o")
    assert not list(tmp_path.iterdir())
    compress.quantize(build("llama"), method, calibration=tokens())
    passes = [replace(method, rounding="none"), compress.RTN(**STATIC)]
    compress.quantize(build("llama"), passes, calibration=tokens(), output=tmp_path / "out", verify=False)


def test_the_command_line_rounds_outputs(tmp_path, token_file):
    source = save(make_llama(), tmp_path / "in")
    words = ("--method", "rtn", "--scheme", "w8a8", "--set", "outputs=static", "--calibration", token_file, "--quiet")
    done = command("quantize", source, *words, "--output", tmp_path / "out")
    assert done.code == 0, done.err
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    fixed = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": "tensor"}
    assert group["output_activations"] == fixed
    assert command("verify", tmp_path / "out", "--json", "-").json()["layers"] == 14
    refused = command("quantize", source, *words[:4], "--set", "per_channel_inputs=true", "--output", tmp_path / "no")
    assert refused.code == 2
    assert "give activations=static" in refused.err


def test_later_layers_see_the_rounded_inputs_of_earlier_ones():
    """The Hessian of down_proj is that of a block whose other inputs are rounded already."""
    seen = {}
    for scheme in ("w8a16", "w8a8"):
        model = build("llama")
        p = fast_gptq(scheme=scheme, group_size=-1, drift=0.0)
        record = compress.quantize(model, p, calibration=tokens()).record
        seen[scheme] = next(r.figures["loss"] for r in record.layers if r.name.endswith("1.mlp.down_proj"))
    assert seen["w8a16"] != seen["w8a8"]


def test_the_checkpoint_says_what_it_holds(tmp_path):
    model = build("llama", torch.bfloat16)
    passes = [
        compress.only(compress.RTN(**ASYMMETRIC), "*.mlp.*"),
        compress.only(compress.RTN(scheme="w4a16", group_size=16), "*.self_attn.*"),
    ]
    compress.quantize(model, passes, calibration=tokens(), output=tmp_path / "out", verify=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    formats = {g["format"]: g["input_activations"] for g in config["config_groups"].values()}
    assert formats["pack-quantized"] is None
    assert formats["int-quantized"]["symmetric"] is False
    held = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        held |= load_file(path)
    prefix = "model.layers.0.mlp.up_proj"
    assert held[f"{prefix}.weight"].dtype == torch.int8
    assert held[f"{prefix}.input_scale"].shape == (1,)
    assert held[f"{prefix}.input_scale"].dtype == torch.bfloat16
    assert held[f"{prefix}.input_zero_point"].dtype == torch.int8
    low = compress.load(tmp_path / "out", torch.float32)
    kinds = {name.split(".")[3]: type(layer) for name, layer in compressed_layers(low)}
    assert kinds == {"mlp": Int8Linear, "self_attn": PackedLinear}
    rows = command("inspect", tmp_path / "out", "--json", "-").json()["layers"]
    schemes = {row["name"]: row["scheme"] for row in rows}
    assert schemes[prefix] == "w8a8 channel symmetric, input static asymmetric"


@pytest.mark.first
@every_scheme
def test_a_stopped_run_resumes_to_the_same_files(options, tmp_path):
    method = fast_gptq(**options)

    arguments = {"calibration": tokens(), "verify": False}
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(build("llama"), method, output=tmp_path / "out", reporter=StopAfterOne(), **arguments)
    compress.quantize(build("llama"), method, output=tmp_path / "out", resume=True, **arguments)
    compress.quantize(build("llama"), method, output=tmp_path / "whole", **arguments)
    for path in sorted((tmp_path / "whole").glob("*.safetensors")):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "w8a8", "group_size": 32}, "one scale per output channel"),
        ({"scheme": "w8a8", "grid": "asymmetric"}, "symmetric weights"),
        ({"scheme": "w8a8", "activation_grid": "asymmetric"}, "give activations=static"),
        ({"scheme": "w4a16", "activations": "static"}, "schemes that round inputs; w4a16: its inputs are not rounded"),
        ({"scheme": "w8a8", "activations": "sometimes"}, "allowed: dynamic, static"),
        ({"scheme": "w8a8", "activation_grid": "odd"}, "allowed: symmetric, asymmetric"),
        ({"scheme": "w8a8", "activation_grid": "unsigned"}, "give activations=static with unsigned"),
        ({"scheme": "fp8", "activations": "static", "activation_grid": "unsigned"}, "fp8 is symmetric"),
        ({"scheme": "w8a8", "outputs": "dynamic"}, "outputs 'dynamic'; allowed: none, static"),
        ({"scheme": "w4a8", "outputs": "static"}, "outputs are for w8a8 and fp8; w4a8"),
        ({"scheme": "w8a16", "outputs": "static"}, "its inputs are not rounded"),
        ({"scheme": "w8a8", "per_channel_inputs": True}, "give activations=static with it"),
        ({"scheme": "w4a16", "per_channel_inputs": True}, "its inputs are not rounded"),
        ({"scheme": "fp8", "outputs": "static", "calibrator": "kl"}, "kl"),
        ({"scheme": "w3a8"}, "allowed: .*w4a4, w4a8, w8a8"),
        ({"scheme": "w4a8", "activation_grid": "asymmetric"}, r"asymmetric below 8 bits \(w2a2, w3a3, w4a4\)"),
        ({"scheme": "w4a4", "activation_grid": "unsigned"}, "give activations=static with unsigned"),
        ({"scheme": "w4a4", "input_range": "best"}, "input_range 'best'; allowed: minmax, mse"),
        ({"scheme": "w8a8", "input_range": "mse"}, "integer inputs below 8 bits .*; w8a8, activations=dynamic"),
        ({"scheme": "w4a4", "activations": "static", "input_range": "mse"}, "w4a4, activations=static: leave it out"),
        ({"scheme": "w4a16", "input_range": "mse"}, "its inputs are not rounded"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        compress.RTN(**options)


def by_hand(x_MK, factors):
    """Inputs rounded to 16 asymmetric levels, of the factors of a token's range the one of least squared error."""
    best = torch.full((len(x_MK), 1), torch.inf)
    found = torch.zeros_like(x_MK)
    for factor in factors:
        low, high = (x_MK.amin(-1, True).clamp(max=0) * factor, x_MK.amax(-1, True).clamp(min=0) * factor)
        step = (high - low) / 15
        zero = torch.round(-8 - low / step).clamp(-8, 7)
        values = ((torch.round(x_MK / step) + zero).clamp(-8, 7) - zero) * step
        error = (values - x_MK).square().sum(-1, keepdim=True)
        found, best = torch.where(error < best, values, found), torch.minimum(error, best)
    return found


@pytest.mark.parametrize(("choice", "factors"), [("minmax", [1.0]), ("mse", [1 - i / 50 for i in range(40)])])
def test_inputs_of_four_bits_are_asymmetric_or_searched(tmp_path, choice, factors):
    method = compress.RTN(scheme="w4a4", group_size=16, activation_grid="asymmetric", input_range=choice)
    compress.quantize(build("llama"), method, output=tmp_path / "out", verify=True)
    layer = compress.load(tmp_path / "out").model.layers[0].mlp.down_proj
    x_MK = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)) + 0.5
    rounding = layer.rounding("input")
    torch.testing.assert_close(rounding.fake_quantize(x_MK), by_hand(x_MK, factors))
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == ("compressed-tensors" if choice == "minmax" else "compress")
    assert ("searched" in str(layer)) == (choice == "mse")


def test_a_model_that_rounds_its_inputs_is_not_compressed_again():
    model = build("llama")
    compress.quantize(model, compress.only(compress.RTN(**DYNAMIC), "*.down_proj"))
    with pytest.raises(InputError, match=r"layers\.0\.mlp\.down_proj rounds its input already"):
        compress.quantize(model, compress.RTN(scheme="w4a16", group_size=16))
    model = build("llama")
    compress.quantize(model, compress.only(compress.RTN(**OUTPUTS), "*.down_proj"), calibration=tokens())
    for layer in model.model.layers:
        layer.mlp.down_proj._forward_pre_hooks.clear()
    with pytest.raises(InputError, match=r"layers\.0\.mlp\.down_proj rounds its output already"):
        compress.quantize(model, compress.RTN(scheme="w4a16", group_size=16))


def test_outputs_are_of_the_pass_that_rounds():
    with pytest.raises(InputError, match="rounding=none leaves outputs to the pass that rounds"):
        compress.SmoothQuant(rounding="none", activations="static", outputs="static")


def test_gradients_pass_rounded_inputs(tmp_path):
    model = build("llama")
    method = compress.RTN(**DYNAMIC, outputs="static")
    compress.quantize(model, method, calibration=tokens(), output=tmp_path / "out", verify=False)
    found = []
    for network in (model, compress.load(tmp_path / "out")):
        x = model.get_input_embeddings()(probe(96)).detach().requires_grad_()
        network(inputs_embeds=x, labels=probe(96)).loss.backward()
        found.append(x.grad.flatten())
    assert torch.nn.functional.cosine_similarity(*found, dim=0) > 0.999


def test_evaluation_sees_rounded_inputs(tmp_path):
    source = save(make_llama(), tmp_path / "in")
    ids = tokens(4, 32)
    for options in (DYNAMIC, ASYMMETRIC, ASYMMETRIC_OUTPUTS):
        method = compress.RTN(**options)
        out = tmp_path / f"out-{len(options)}"
        compress.quantize(source, method, calibration=calibration_of(method), output=out, verify=False)
        memory = compress.load(source)
        compress.quantize(memory, method, calibration=calibration_of(method))
        found = compress.evaluate(out, reference=source, text=ids)
        expected = compress.evaluate(memory, reference=compress.load(source), text=ids)
        assert found.kl_mean > 0
        assert found.kl_mean == pytest.approx(expected.kl_mean, rel=0.2)
