"""Convolutions are linear maps of patches: every pass treats them so, and CNNs and image transformers go through."""

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from combinations import each
from commands import StopAfterOne, command, fast_gptq
from torch import nn
from torch.nn import functional
from vision import CALIBRATORS, CHANCE, batches, calibration, lost, net, points, resnet20, right, trained

import compress
from compress.base.errors import CompressError, InputError
from compress.inference.layers.integer import integer_layer, zero_of
from compress.model.convolution import elements, geometry_of, patches, patches_in_parts
from compress.model.layers import Layer, find_stacks
from compress.model.untreated_layers import UNASKED_CONVOLUTION
from compress.solvers.outliers import share_of_outliers
from compress.weights.decision import Decision, joined
from compress.weights.formats.dense import dense
from compress.weights.grid import Grid, encode, quantize
from compress.weights.matrix import Weight
from compress.weights.rounding import ActivationCodes

STATIC = {"scheme": "w8a8", "activations": "static"}
PLAIN = {"drift": 0.0, "statistics": "float64"}
CONVOLUTIONS = [
    lambda: nn.Conv2d(3, 8, 3, padding=1),
    lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(0, 2), dilation=(1, 2), groups=2),
    lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False),
    lambda: nn.Conv2d(4, 8, 3, padding="same", dilation=2, padding_mode="reflect"),
    lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", groups=4),
    lambda: nn.Conv2d(2, 4, 5, padding="valid", stride=3),
    lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1),
    lambda: nn.Conv1d(4, 4, 5, padding="same", groups=4),
    lambda: nn.Conv1d(2, 4, 3, padding=2, padding_mode="replicate"),
    lambda: nn.Conv3d(4, 6, (2, 3, 2), stride=(1, 2, 1), padding=(1, 0, 1), groups=2),
    lambda: nn.Conv3d(2, 4, 3, padding=1, padding_mode="replicate"),
]
every_convolution = pytest.mark.parametrize("make", CONVOLUTIONS)


def images_for(module, batch=3):
    sizes = (9, 8, 5)[: module.weight.ndim - 2]
    return torch.randn(batch, module.in_channels, *sizes, generator=torch.Generator().manual_seed(1))


# --- the linear map ------------------------------------------------------------------------------------------------


@every_convolution
def test_a_convolution_is_its_weight_times_its_patches(make):
    torch.manual_seed(0)
    module = make().double()
    x, geometry = images_for(module).double(), geometry_of(module)
    weight = Layer("", module).weight.unflatten(0, (geometry.groups, -1))
    product = torch.cat(list(patches(x, geometry) @ weight.mT), dim=1)
    if module.bias is not None:
        product = product + module.bias
    expected = module(x)
    torch.testing.assert_close(product, expected.movedim(1, -1).reshape(product.shape))
    parts = torch.cat(list(patches_in_parts(x, geometry)), dim=1)
    assert torch.equal(parts, patches(x, geometry))
    assert torch.equal(patches(x[0], geometry), patches(x[:1], geometry))


@every_convolution
def test_a_layer_sees_the_weight_as_a_matrix(make):
    module = make()
    layer = Layer("a", module)
    assert layer.weight.shape == layer.shape == (module.out_channels, module.weight[0].numel())
    assert layer.weight.data_ptr() == module.weight.data_ptr()
    assert torch.equal(layer.stored(layer.weight), module.weight)
    assert not layer.has_format


def test_elements_are_counted_once():
    module = nn.Conv2d(3, 4, 5, stride=7, padding=2)
    x = images_for(module)
    rows = elements(x, geometry_of(module))
    assert rows.shape == (3 * 9 * 8, 3)
    assert torch.equal(rows.T.reshape(3, -1).sort(1).values, x.transpose(0, 1).reshape(3, -1).sort(1).values)


def test_a_convolution_of_its_own_making_is_left_alone():
    class Standardized(nn.Conv2d):
        def forward(self, x):
            return functional.conv2d(x, self.weight - self.weight.mean(), self.bias)

    own, normed = Standardized(2, 4, 3), nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3))
    model = nn.Sequential(own, normed, nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 4, 2))
    record = compress.quantize(model, compress.RTN(group_size=-1)).record
    assert [layer.name for layer in record.layers] == ["2"]
    assert record.left_alone["0.weight"] == "Standardized: not a linear layer"
    assert record.left_alone["3.weight"] == "ConvTranspose2d: not a linear layer"
    assert any(name.startswith("1.parametrizations") for name in record.left_alone)


# --- the passes ----------------------------------------------------------------------------------------------------


LAYERS = ["stem", "depthwise", "shortcut", "grouped", "head"]


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("grid", ["signed-scale", "asymmetric"])
def test_rounding_to_nearest_is_the_grid_on_the_rows_of_the_matrix(bits, grid):
    model, plain = net(), net()
    method = compress.RTN(scheme=f"w{bits}a16", group_size=-1, grid=grid)
    record = compress.quantize(model, method).record
    assert [layer.name for layer in record.layers] == LAYERS
    assert record.left_alone == {}
    assert record.layers[3].shape == (12, 18)
    for name in LAYERS:
        old, new = plain.get_submodule(name), model.get_submodule(name)
        expected = quantize(old.weight.data.flatten(1), method.weight_grid()).dequantize()
        assert torch.equal(new.weight.flatten(1), expected)
        assert torch.equal(new.bias, old.bias)


def inputs_of(model, name):
    seen = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, a: seen.append(a[0]))
    with torch.no_grad():
        for batch in calibration():
            model(**batch)
    hook.remove()
    return seen


@pytest.mark.parametrize("name", ["stem", "depthwise", "grouped", "shortcut"])
def test_gptq_decides_what_it_would_about_linear_layers_that_read_the_patches(name):
    method = compress.GPTQ(scheme="w3a16", group_size=-1, **PLAIN)
    model, plain = net(), net()
    done = compress.quantize(model, compress.only(method, name), calibration=calibration()).record
    layer = Layer(name, plain.get_submodule(name))
    seen = torch.cat([patches(x, layer.geometry) for x in inputs_of(plain, name)], dim=1)
    rows = layer.weight.unflatten(0, (layer.geometry.groups, -1))
    found = Layer(name, model.get_submodule(name)).weight.unflatten(0, (layer.geometry.groups, -1))
    for x, weight, result in zip(seen, rows, found, strict=True):
        linear = nn.Linear(*reversed(weight.shape), bias=False)
        linear.weight.data = weight.clone()
        compress.quantize(nn.Sequential(linear), method, calibration=[{"input": x}])
        torch.testing.assert_close(result, linear.weight.data)
    figures = done.layers[0].figures
    assert figures["loss"] < figures["rtn_loss"]
    assert figures.get("groups", 1) == layer.geometry.groups


@pytest.mark.parametrize("seed", range(3))
def test_a_convolution_some_of_whose_groups_have_no_outliers_counts_them_as_none(seed):
    model = net()
    nn.init.uniform_(model.depthwise.weight[:3], 0.9, 1.0, generator=torch.Generator().manual_seed(seed))
    method = compress.only(fast_gptq(group_size=-1, outliers=0.02), "depthwise")
    decided, whole = [], Weight.stacked.__func__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Weight, "stacked", classmethod(lambda cls, parts: decided.extend(parts) or whole(cls, parts)))
        (layer,) = compress.quantize(model, method, calibration=calibration()).record.layers
    shares = [share_of_outliers(part) for part in decided]
    assert len(shares) == layer.figures["groups"] == 8
    assert min(shares) == 0 < max(shares)
    assert layer.figures["outliers"] == pytest.approx(sum(shares) / len(shares))


def test_decisions_about_groups_become_one_whatever_each_of_them_says():
    weight, kept = dense(torch.ones(2, 3)), torch.tensor([[True, False, True]] * 2)
    parts = [
        Decision(weight, {"loss": 0.5, "rank": 2, "solution": "gptq"}, kept=kept),
        Decision(weight, {"rank": 3, "solution": "rounding", "share": 0.25, "dead_channels": 2}),
    ]
    whole = joined(parts)
    expected = {"loss": 0.5, "rank": 2, "solution": "gptq, rounding", "share": 0.25, "dead_channels": 2, "groups": 2}
    assert whole.figures == expected
    assert torch.equal(whole.kept, torch.cat([kept, torch.ones(2, 3, dtype=torch.bool)]))
    assert joined(parts[::-1]).figures.keys() == expected.keys()


@pytest.mark.parametrize("method", [compress.GPTQ, compress.AWQ])
def test_methods_with_statistics_beat_rounding_on_every_layer(method):
    record = compress.quantize(net(), method(scheme="w3a16", group_size=-1), calibration=calibration()).record
    assert {layer.name for layer in record.layers} == set(LAYERS)
    for layer in record.layers:
        assert layer.figures["loss"] <= layer.figures["rtn_loss"] * (1 + 1e-6)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("method", [compress.RTN, fast_gptq, compress.SmoothQuant])
def test_static_ranges_count_every_element_of_the_input(method, symmetric):
    model, plain = net(), net()
    grid = "symmetric" if symmetric else "asymmetric"
    compress.quantize(model, method(**STATIC, activation_grid=grid), calibration=calibration())
    (hook,) = model.stem._forward_pre_hooks.values()
    x = torch.cat([batch["x"] for batch in calibration()])
    expected = quantize(x.reshape(1, -1), Grid(bits=8, symmetric=symmetric, granularity="tensor"))
    torch.testing.assert_close(hook.codes.scale, expected.scale)
    hooks = [next(iter(model.get_submodule(n)._forward_pre_hooks.values())).codes for n in ("depthwise", "shortcut")]
    assert torch.equal(hooks[0].scale, hooks[1].scale)  # one tensor, read in two ways
    with torch.no_grad():
        assert (model(x) - plain(x)).abs().max() < 0.05 * plain(x).abs().max()
        assert not torch.equal(model(x), plain(x))
        rounded = functional.conv2d(
            expected.dequantize().reshape(x.shape), model.stem.weight, model.stem.bias, padding=1
        )
        torch.testing.assert_close(model.stem(x), rounded)


@pytest.mark.parametrize("options", [{}, {"activations": "dynamic"}, {"activation_grid": "asymmetric"}])
@pytest.mark.parametrize("method", [compress.RTN, fast_gptq])
def test_ranges_of_outputs_are_those_of_the_compressed_layers(method, options):
    """What each layer, grouped or not, returns before it is rounded when the model reads the calibration data again."""
    model, method = net(), method(**{**STATIC, **options}, outputs="static")
    compress.quantize(model, method, calibration=calibration())
    seen = {name: [] for name in LAYERS}
    for name, found in seen.items():
        model.get_submodule(name).register_forward_hook(lambda _, a, y, found=found: found.append(y), prepend=True)
    with torch.no_grad():
        for batch in calibration():
            model(**batch)
    for name, found in seen.items():
        (hook,) = (h for h in model.get_submodule(name)._forward_hooks.values() if hasattr(h, "codes"))
        expected = quantize(torch.cat(found).reshape(1, -1), method.output_grid())
        torch.testing.assert_close(hook.codes.scale, expected.scale)
        assert hook.codes.zero_point is None or torch.equal(hook.codes.zero_point, expected.zero_point)


@pytest.mark.parametrize(("make", "calibrator"), each(CONVOLUTIONS[:3] + CONVOLUTIONS[6:8], CALIBRATORS))
def test_each_channel_of_an_image_has_its_own_range(make, calibrator):
    torch.manual_seed(0)
    model = nn.Sequential(make())
    x = images_for(model[0], 8) * torch.logspace(-1, 1, model[0].in_channels).view(-1, *[1] * len(model[0].kernel_size))
    method = compress.RTN(**STATIC, activation_grid="asymmetric", calibrator=calibrator, per_channel_inputs=True)
    compress.quantize(model, method, calibration=[{"input": part} for part in x.split(2)])
    (hook,) = model[0]._forward_pre_hooks.values()
    assert hook.codes.scale.shape == (1, model[0].in_channels)
    rounded = torch.empty_like(x)
    for channel in range(x.shape[1]):
        alone = nn.Sequential(nn.Conv1d(1, 1, 1))
        one = replace(method, per_channel_inputs=False)
        data = x[:, channel].flatten(1)[:, None]
        compress.quantize(alone, one, calibration=[{"input": part} for part in data.split(2)])
        (single,) = alone[0]._forward_pre_hooks.values()
        assert torch.equal(hook.codes.scale[:, channel], single.codes.scale[0])
        rounded[:, channel] = single.rounded(data).view_as(x[:, channel])
    assert torch.equal(hook.rounded(x), rounded)
    assert torch.equal(hook.rounded(x[0]), rounded[0])
    with torch.no_grad():
        assert torch.equal(model(x), type(model[0]).forward(model[0], rounded))


@pytest.mark.parametrize("options", [{"scheme": "w8a8"}, {"scheme": "w4a8", "group_size": -1}])
def test_a_dynamic_range_is_of_one_sample(options):
    model = net()
    compress.quantize(model, compress.RTN(**options))
    x = torch.randn(4, 3, 10, 10)
    x[1] *= 50
    with torch.no_grad():
        together, alone = model.stem(x), torch.cat([model.stem(image[None]) for image in x])
        torch.testing.assert_close(together, alone)
        torch.testing.assert_close(model.stem(x[0]), together[0])
        scale = x.abs().flatten(1).amax(1).view(4, 1, 1, 1) / 127.5
        rounded = (x / scale).round().clamp(-128, 127) * scale
        torch.testing.assert_close(together, functional.conv2d(rounded, model.stem.weight, model.stem.bias, padding=1))


def test_groups_of_inputs_where_they_divide_the_row():
    model = nn.Sequential(nn.Conv2d(16, 8, 2), nn.Conv2d(8, 8, 4))
    record = compress.quantize(model, compress.RTN(scheme="w4a16", group_size=32)).record
    assert [layer.group_size for layer in record.layers] == [32, 32]
    with pytest.raises(InputError, match="group size 128 does not divide the 27 inputs of stem"):
        compress.quantize(net(), compress.RTN(group_size=128))
    made = compress.quantize(net(), compress.RTN()).record  # no usual size divides them all
    for layer in made.layers:
        assert layer.group_size == next((size for size in (128, 64, 32) if layer.shape[1] % size == 0), None)


def test_one_scale_for_groups_decided_one_by_one_is_refused():
    method = fast_gptq(group_size=-1, per_tensor=True)
    with pytest.raises(InputError, match="the 8 groups of depthwise one by one"):
        compress.quantize(net(), method, calibration=calibration())
    compress.quantize(net(), compress.RTN(group_size=-1, per_tensor=True))
    compress.quantize(net(), method, calibration=calibration(), ignore=["depthwise", "grouped"])


def test_padding_masks_do_not_fit_convolutions():
    class Audio(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(2, 4, 3)

        def forward(self, x, attention_mask):
            return self.conv(x)

    batch = {"x": torch.randn(2, 2, 9), "attention_mask": torch.tensor([[1] * 9, [1] * 5 + [0] * 4])}
    with pytest.raises(CompressError, match=r"conv is a convolution.*padding mask"):
        compress.quantize(Audio(), compress.RTN(**STATIC), calibration=[batch])


# --- blocks and checkpoints ----------------------------------------------------------------------------------------


def vit():
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=5,
    )
    return transformers.ViTForImageClassification(config).eval()


def resnet():
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config).eval()


def pixels():
    return torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "method",
    [
        compress.RTN(scheme="w4a16", group_size=32),
        fast_gptq(scheme="w4a16", group_size=-1),
        compress.RTN(scheme="w8a8"),
        compress.RTN(**STATIC, calibrator="mse"),
    ],
    ids=lambda m: f"{m.name}-{m.scheme}-{m.activations}",
)
def test_an_image_transformer_is_written_and_loads_as_what_is_in_memory(method, tmp_path):
    model, x = vit(), pixels()
    data = [{"pixel_values": part} for part in x.split(3)] if method.needs() else None
    result = compress.quantize(model, method, calibration=data, output=tmp_path / "out", verify=False)
    assert len(result.record.layers) == 12
    alone = result.record.left_alone
    assert alone["vit.embeddings.patch_embeddings.projection"] == UNASKED_CONVOLUTION
    assert alone["vit.embeddings.cls_token"] == "ViTEmbeddings: not a linear layer"
    assert alone["classifier"] == "outside the blocks"
    with torch.no_grad():
        expected = model(pixel_values=x).logits
        found = compress.load(tmp_path / "out")(pixel_values=x).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05 * float(expected.std()))
    pytest.importorskip("compressed_tensors", reason="needs the hf extra")
    checked = compress.verify(tmp_path / "out")
    assert checked["transformers"] == "compared"
    assert checked["layers"] == 12


def test_convolutions_join_when_asked_and_are_written_dense(tmp_path):
    model, x = vit(), pixels()
    method = fast_gptq(scheme="w3a16", group_size=-1)
    options = {"calibration": [{"pixel_values": x}], "one_block": True, "convolutions": True, "verify": False}
    result = compress.quantize(model, method, output=tmp_path / "out", **options)
    names = [layer.name for layer in result.record.layers]
    assert "vit.embeddings.patch_embeddings.projection" in names
    assert "classifier" in names
    (note,) = (note for note in result.record.notes if "calibration tokens" not in note)
    assert "1 layers are stored dense" in note
    assert "no Conv2d" in note
    loaded = compress.load(tmp_path / "out")
    projection = "vit.embeddings.patch_embeddings.projection.weight"
    assert torch.equal(loaded.get_parameter(projection), model.get_parameter(projection))
    assert compress.verify(tmp_path / "out")["layers"] == len(names)
    assert (
        compress.quantize(vit(), compress.RTN(group_size=-1), convolutions=True).record.left_alone[
            "vit.embeddings.patch_embeddings.projection"
        ]
        == "outside the blocks"
    )


def test_the_command_line_takes_convolutions_along(tmp_path):
    vit().save_pretrained(tmp_path / "in")
    words = ("--method", "rtn", "--group-size", -1, "--one-block", "--convolutions", "--quiet")
    done = command("quantize", tmp_path / "in", *words, "--output", tmp_path / "out")
    assert done.code == 0, done.err
    rows = command("inspect", tmp_path / "out", "--json", "-").json()["layers"]
    remarks = {row["name"]: row["remark"] for row in rows}
    assert remarks["vit.embeddings.patch_embeddings.projection.weight"] == "rtn w4a16, stored dense"


def test_a_stopped_run_resumes_with_its_convolutions(tmp_path):
    method = fast_gptq(scheme="w4a16", group_size=-1)
    options = {"calibration": [{"pixel_values": pixels()}], "verify": False}
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(resnet(), method, output=tmp_path / "out", reporter=StopAfterOne(), **options)
    compress.quantize(resnet(), method, output=tmp_path / "out", resume=True, **options)
    result = compress.quantize(resnet(), method, output=tmp_path / "whole", **options)
    assert result.record.left_alone["classifier.1"] == "outside the blocks"
    assert len(result.record.layers) == 5
    for path in sorted((tmp_path / "whole").glob("*.safetensors")):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name
    loaded = transformers.ResNetForImageClassification.from_pretrained(tmp_path / "whole")
    assert compress.verify(tmp_path / "whole")["transformers"] == "compared"
    for layer in result.record.layers:
        assert torch.equal(loaded.get_submodule(layer.name).weight, result.model.get_submodule(layer.name).weight)


def test_rounded_inputs_of_convolutions_cannot_be_written(tmp_path):
    message = "is a Conv2d, which compressed-tensors cannot hold with a rounded input"
    with pytest.raises(InputError, match=message):
        compress.quantize(resnet(), compress.RTN(scheme="w8a8"), output=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_convolutions_between_linear_layers_wait_to_be_asked_for():
    config = transformers.MambaConfig(vocab_size=96, hidden_size=32, state_size=4, num_hidden_layers=2)
    model = transformers.MambaForCausalLM(config).eval()
    record = compress.quantize(model, compress.RTN(group_size=2)).record
    assert record.left_alone["backbone.layers.0.mixer.conv1d"] == UNASKED_CONVOLUTION
    record = compress.quantize(model, compress.RTN(group_size=2), convolutions=True).record
    assert "backbone.layers.0.mixer.conv1d" in {layer.name for layer in record.layers}


def test_blocks_of_convolutions_are_a_stack_only_where_none_is_of_linear_layers():
    assert [stack.name for stack in find_stacks(resnet())] == ["resnet.encoder.stages"]
    assert [stack.name for stack in find_stacks(vit())] == ["vit.layers"]
    with pytest.raises(InputError, match="no linear layer to compress"):
        compress.quantize(nn.Sequential(nn.Conv2d(3, 4, 1)), compress.RTN(group_size=-1), convolutions=False)
    with pytest.raises(InputError, match="no linear layer or convolution to compress"):
        compress.quantize(nn.Sequential(nn.ReLU()), compress.RTN())


# --- trained models ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "task"), [("plain", "patterns"), ("separable", "digits")])
def test_int8_keeps_the_accuracy_of_a_trained_cnn(kind, task):
    model, data = trained(kind, task)
    whole = right(model, data)
    assert points(whole) > 80
    assert compress.fold_batch_norm(model, {"x": data.seen[:2]}).left_alone == {}
    for calibrator, grid in each(CALIBRATORS, ("symmetric", "asymmetric")[kind == "separable" :]):
        rounded = copy.deepcopy(model)
        method = compress.RTN(**STATIC, calibrator=calibrator, activation_grid=grid)
        compress.quantize(rounded, method, calibration=batches(data.seen))
        assert lost(whole, right(rounded, data)) <= CHANCE, (calibrator, grid)
    rounded = copy.deepcopy(model)
    compress.quantize(rounded, compress.RTN(scheme="w8a8"))
    assert lost(whole, right(rounded, data)) <= CHANCE
    found = {}
    for method in (compress.RTN(scheme="w2a16", group_size=-1), compress.GPTQ(scheme="w2a16", group_size=-1)):
        rounded = copy.deepcopy(model)
        compress.quantize(rounded, method, calibration=batches(data.seen) if method.needs() else None)
        found[method.name] = right(rounded, data)
    assert lost(whole, found["rtn"]) > 2 * CHANCE  # which is how the bound is known to see a loss
    assert lost(found["gptq"], found["rtn"]) > CHANCE


@pytest.mark.parametrize("grid", ["symmetric", "asymmetric", "unsigned"])
@pytest.mark.parametrize("make", [*CONVOLUTIONS[:3], CONVOLUTIONS[6], lambda: nn.Linear(40, 6)])
def test_integers_compute_what_a_model_with_rounded_outputs_does(make, grid):
    torch.manual_seed(0)
    model = nn.Sequential(make())
    layer = Layer("0", model[0])
    method = compress.RTN(**STATIC, activation_grid=grid, outputs="static")
    weight = quantize(layer.weight, method.weight_grid())
    x = torch.randn(12, 40) if layer.geometry is None else images_for(model[0], 12)
    x = x.abs() if grid == "unsigned" else x
    compress.quantize(model, method, calibration=[{"input": part} for part in x[:8].split(4)])
    (inside,) = (hook.codes for hook in model[0]._forward_pre_hooks.values())
    (outside,) = (hook.codes for hook in model[0]._forward_hooks.values())
    codes = encode(x, inside.scale.flatten(), torch.tensor(float(zero_of(inside))), inside.grid).to(torch.int8)
    with torch.no_grad():
        expected = model(x) / outside.scale.flatten() + zero_of(outside)
    found = integer_layer(model[0], weight, inside, outside)(codes)
    assert found.dtype == torch.int8
    assert (expected - expected.round()).abs().max() < 1e-3  # codes
    steps = (found - expected.round()).abs()
    assert steps.max() <= 1
    assert steps.mean() < 0.05


def test_a_trained_cnn_in_integers_only():
    """Every layer on the codes that the one before it returned: images are rounded once, at the start."""
    model, data = trained("plain", "patterns")
    compress.fold_batch_norm(model, {"x": data.seen[:2]})
    method = compress.RTN(**STATIC, activation_grid="asymmetric")
    names = ["features.0", "features.3", "features.6", "head"]
    weights = [quantize(Layer(n, model.get_submodule(n)).weight, method.weight_grid()) for n in names]
    compress.quantize(model, method, calibration=batches(data.seen))
    modules = [model.get_submodule(n) for n in names]
    inputs = [next(iter(module._forward_pre_hooks.values())).codes for module in modules]
    with torch.no_grad():
        logits = model(data.unseen)
    grid = inputs[0].grid
    last = quantize(logits.reshape(1, -1), grid, torch.float32)
    outputs = [*inputs[1:], ActivationCodes(grid, last.scale, last.zero_point)]
    first = quantize(data.unseen.reshape(1, -1), grid, torch.float32, inputs[0].scale, inputs[0].zero_point)
    codes = first.codes.reshape(data.unseen.shape)
    for name, module, weight, inside, outside in zip(names, modules, weights, inputs, outputs, strict=True):
        if name == "head":
            codes = codes.amax((2, 3))
        codes = integer_layer(module, weight, inside, outside, relu=name != "head")(codes)
    assert codes.dtype == torch.int8
    steps = (codes.double() - (last.codes.reshape(codes.shape).double())).abs()
    assert steps.max() <= 4
    assert steps.mean() < 0.3
    assert lost(logits.argmax(1) == data.labels, codes.int().argmax(1) == data.labels) <= CHANCE


@pytest.fixture(scope="module")
def folded_resnet20(real_data):
    """The ResNet-20 with its batch norms folded, its images, and which it labels right."""
    model, data = resnet20(real_data)
    with torch.no_grad():
        before = model(data.unseen[:50])
        assert len(compress.fold_batch_norm(model, {"x": data.seen[:2]}).folded) == 19
        after = model(data.unseen[:50])
    assert (after - before).abs().max() <= 1e-5 * before.abs().max()
    whole = right(model, data)
    assert points(whole) == pytest.approx(82.5, abs=0.3)  # two images
    return model, data, whole


def resnet20_after(folded, method):
    model, data, _ = folded
    rounded = copy.deepcopy(model)
    record = compress.quantize(rounded, method, calibration=batches(data.seen)).record
    assert len(record.layers) == 20
    assert record.left_alone == {}
    return right(rounded, data)


@pytest.mark.first
def test_resnet20_in_int8(folded_resnet20):
    method = compress.RTN(**STATIC, calibrator="mse", activation_grid="asymmetric")
    assert lost(folded_resnet20[2], resnet20_after(folded_resnet20, method)) <= CHANCE


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("calibrator", CALIBRATORS)
def test_resnet20_in_int8_by_every_calibrator(folded_resnet20, calibrator, grid):
    method = compress.RTN(**STATIC, calibrator=calibrator, activation_grid=grid)
    assert lost(folded_resnet20[2], resnet20_after(folded_resnet20, method)) <= CHANCE


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "loss"), [(4, 0.5), (3, 1.5), (2, 6)])
def test_gptq_on_resnet20(folded_resnet20, bits, loss):
    """Rounding to nearest loses 1.3, 20 and 62 points."""
    method = compress.GPTQ(scheme=f"w{bits}a16", group_size=-1)
    assert points(resnet20_after(folded_resnet20, method)) > points(folded_resnet20[2]) - loss
