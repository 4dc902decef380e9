"""CNNs that were quantized in memory, as ONNX graphs: their codes, what ONNX Runtime makes of them, and refusals."""

from collections import Counter

import pytest
import torch
import transformers
from torch import nn
from vision import calibration, net

import compress
from compress.base.errors import InputError
from compress.checkpoint.write.manifest import read_record

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
STATIC = {"scheme": "w8a8", "activations": "static", "activation_grid": "asymmetric"}
# Of the outputs' deviation, where nothing is fused: sums in another order, and the ties that they decide.
CLOSE = 0.01


def pixels() -> torch.Tensor:
    return torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def resnet() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 5}
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes)).eval()


def run_operators(folder) -> Counter:
    """How many nodes of each kind ONNX Runtime runs."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(folder / "optimized.onnx", load_external_data=False).graph.node)


def found_in(folder) -> dict:
    """What was read back, once outputs are close where nothing is fused."""
    found = read_record(folder)["verification"]
    assert found["exact_mean_difference"] < CLOSE * found["deviation"]
    return found


@pytest.mark.first
@pytest.mark.parametrize("to", ["onnx", "onnx-exact", "onnx-qdq"])
def test_convolutions_in_int8(to, tmp_path):
    """Depthwise and grouped ones, a stem, and a shortcut that is added to another convolution."""
    model = net()
    passes = compress.but(compress.RTN(**STATIC), "shortcut"), compress.only(compress.RTN(scheme="w8a16"), "shortcut")
    result = compress.quantize(model, passes, calibration=calibration(), keep_codes=True, ignore=["head"])
    assert sorted(result.codes) == ["depthwise", "grouped", "shortcut", "stem"]
    done = compress.export_onnx(result, calibration()[0], tmp_path / "out", to)
    assert found_in(done.output)["layers"] == done.layers == 4
    assert compress.verify(done.output)["layers"] == 4
    # The stem and the depthwise one end in a ReLU that is rounded again; the others are added in float32.
    assert run_operators(done.output)["QLinearConv"] == 2


def test_residual_blocks_of_transformers_stay_in_integers(tmp_path):
    model, x = resnet(), pixels()
    assert compress.fold_batch_norm(model, {"pixel_values": x}).left_alone == {}
    last = ["*.layer.1.convolution", "*.shortcut.convolution"]
    passes = compress.only(compress.RTN(**STATIC, outputs="static"), *last), compress.but(compress.RTN(**STATIC), *last)
    given = [{"pixel_values": x}]
    result = compress.quantize(model, passes, calibration=given, one_block=True, keep_codes=True)
    done = compress.export_onnx(result, given[0], tmp_path / "out")
    found = found_in(done.output)
    assert found["same_top"] == 1
    assert found["kl"] < 1e-3
    ran = run_operators(done.output)
    assert ran["QLinearConv"] == sum(isinstance(module, nn.Conv2d) for module in model.modules())
    assert ran["QLinearAdd"] >= 1
    assert ran["Conv"] == ran["FusedConv"] == 0
    assert onnxruntime.InferenceSession(done.output / "model.onnx").run(None, {"pixel_values": x[:3].numpy()})


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_weights_alone_of_every_shape_of_convolution(tmp_path):
    torch.manual_seed(0)
    odd = nn.Conv2d(4, 8, 3, padding="same", dilation=2, padding_mode="reflect")
    model = nn.Sequential(odd, nn.Conv2d(8, 6, (3, 2), padding="same", groups=2), nn.Flatten(2), nn.Conv1d(6, 4, 3))
    grids = [("0", {"scheme": "w3a16"}), ("1", {"grid": "asymmetric"}), ("3", {"scheme": "w8a16"})]
    passes = [compress.only(compress.RTN(group_size=-1, **options), name) for name, options in grids]
    result = compress.quantize(model.eval(), passes, keep_codes=True)
    x = torch.randn(3, 4, 7, 8, generator=torch.Generator().manual_seed(1))
    assert found_in(compress.export_onnx(result, {"input": x}, tmp_path / "out").output)["layers"] == 3


REFUSED = {
    "groups": ({"scheme": "w4a16", "group_size": 3}, "has groups of 3; .* give group_size=-1"),
    "dynamic inputs": ({"scheme": "w8a8"}, "activations='static'"),
    "16 bits": ({"scheme": "w8a16"}, "quantized in bfloat16, and graphs compute in float32; quantize model.float"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_convolution_without_a_form_names_the_alternative(name, tmp_path):
    options, says = REFUSED[name]
    model = nn.Sequential(nn.Conv2d(3, 4, 1)).to(torch.bfloat16 if name == "16 bits" else torch.float32).eval()
    result = compress.quantize(model, compress.RTN(**options), keep_codes=True)
    with pytest.raises(InputError, match=f"^0 .*{says}"):
        compress.export_onnx(result, {"input": torch.randn(2, 3, 4, 4)}, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported_is_said_before_work(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 4, 1)).eval()
    with pytest.raises(InputError, match="keep_codes is for a model that stays in memory"):
        compress.quantize(model, compress.RTN(group_size=-1), output=tmp_path / "out", keep_codes=True)
    plain = compress.quantize(model, compress.RTN(group_size=-1))
    with pytest.raises(InputError, match="holds no codes; give keep_codes=True"):
        compress.export_onnx(plain, {"input": torch.randn(2, 3, 4, 4)}, tmp_path / "out")
    kept = compress.quantize(model, compress.RTN(group_size=-1), keep_codes=True)
    with pytest.raises(InputError, match="two or more samples"):
        compress.export_onnx(kept, {"input": torch.randn(1, 3, 4, 4)}, tmp_path / "out")
    with pytest.raises(InputError, match="'gguf' of a model in memory; allowed: onnx, onnx-exact, onnx-qdq"):
        compress.export_onnx(kept, {"input": torch.randn(2, 3, 4, 4)}, tmp_path / "out", "gguf")
