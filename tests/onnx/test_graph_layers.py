"""Layers in a graph: what ONNX Runtime computes from them against the values that their codes stand for."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from compress.base.errors import CompressError
from compress.onnx.exporters import Form, graph_layer
from compress.onnx.graph_edits import in_16_bits, narrow_tables
from compress.onnx.layers import GraphLayer
from compress.onnx.onnxruntime_weights import layer_weights, session
from compress.onnx.repacked import BlockCodes, block_of, blocks_of, pack
from compress.onnx.tracing import trace_module
from compress.weights.grid import Grid, Quantized, quantize
from compress.weights.rounding import ActivationCodes

onnx_ir = pytest.importorskip("onnx_ir")
pytest.importorskip("onnxruntime")

ROWS, COLUMNS = 24, 192
NBITS, PORTABLE = Form(portable=False, level=0), Form(portable=True, level=0)
TOKEN, TENSOR = Grid(bits=8, granularity="token"), Grid(bits=8, symmetric=False, granularity="tensor")


def weight_on(grid: Grid, columns: int = COLUMNS) -> Quantized:
    generator = torch.Generator().manual_seed(grid.bits)
    return quantize(torch.randn(ROWS, columns, generator=generator), grid, torch.bfloat16)


def grouped(bits: int, size: int, **more: bool) -> Grid:
    return Grid(bits=bits, granularity="group", group_size=size, **more)


# {name: (weights, inputs, form)}: every operator, width, kind of zero point, and a block smaller than its group.
CASES: dict[str, tuple[Quantized, ActivationCodes | None, Form]] = {
    "nbits2": (weight_on(grouped(2, 16, symmetric=False)), None, NBITS),
    "nbits4": (weight_on(grouped(4, 64, signed_scale=True)), None, NBITS),
    "nbits4 zeros": (weight_on(grouped(4, 96, symmetric=False)), None, NBITS),
    "nbits8 channel": (weight_on(Grid(bits=8)), None, NBITS),
    "nbits4 partial": (weight_on(Grid(bits=4, symmetric=False), 300), None, NBITS),
    "int4": (weight_on(grouped(4, 32)), None, PORTABLE),
    "uint4": (weight_on(grouped(4, 64, symmetric=False)), None, PORTABLE),
    "int8 channel": (weight_on(Grid(bits=8), 300), None, PORTABLE),
    "uint8": (weight_on(grouped(8, 32, symmetric=False)), None, PORTABLE),
    "static": (weight_on(Grid(bits=8)), ActivationCodes(TENSOR, torch.tensor([[0.03]]), torch.tensor([[9]])), NBITS),
    "dynamic": (weight_on(Grid(bits=8)), ActivationCodes(TOKEN), NBITS),
}


class Beside(nn.Module):
    """Layers beside each other; each reads the first of the channels that it is given."""

    def __init__(self, layers: dict[str, GraphLayer], columns: dict[str, int]) -> None:
        super().__init__()
        self.layers, self.columns = nn.ModuleDict(layers), columns

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x[..., : self.columns[name]]) for name, layer in self.layers.items())


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """(The file of a graph of all cases, a bias)."""
    bias = torch.randn(ROWS, generator=torch.Generator().manual_seed(1))
    layers = {name: graph_layer(weight, bias, inputs, form) for name, (weight, inputs, form) in CASES.items()}
    model = Beside(layers, {name: weight.codes.shape[1] for name, (weight, *_) in CASES.items()})
    program = trace_module(model, {"x": torch.zeros(3, 300)}, [f"y{i}" for i in range(len(CASES))])
    path = tmp_path_factory.mktemp("graph") / "model.onnx"
    onnx_ir.save(program, path, external_data="model.onnx.data")
    return path, bias


def values(quantized: Quantized) -> Tensor:
    """The exact values of codes with scales in bfloat16."""
    scale, zero = quantized.scale.float(), quantized.zero_point
    return Quantized(quantized.codes, scale, zero, quantized.grid).dequantize()


def test_onnxruntime_reads_the_weights_bit_for_bit(traced):
    path, _ = traced
    for name, read in layer_weights(path, [f"layers.{name}" for name in CASES]):
        assert np.array_equal(read, values(CASES[name.removeprefix("layers.")][0]).numpy()), name


def test_onnxruntime_multiplies_by_them(traced):
    path, bias = traced
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(2))
    found = session(path, 0).run(None, {"x": x.numpy()})
    for (name, (weight, inputs, _)), y in zip(CASES.items(), found, strict=True):
        given = x[:, : weight.codes.shape[1]]
        given = given if inputs is None else inputs.fake_quantize(given)
        expected = given.double() @ values(weight).double().t() + bias
        torch.testing.assert_close(torch.from_numpy(y).double(), expected, atol=1e-4, rtol=1e-5, msg=name)


def test_level_4_rounds_inputs_and_level_0_does_not(traced):
    path, _ = traced
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(2)).numpy()
    exact, rounded = (session(path, level).run(None, {"x": x})[1] for level in (0, 4))
    assert 0 < np.abs(exact - rounded).max() < 0.1 * exact.std()


@pytest.mark.parametrize(
    ("group", "columns", "block"),
    [(32, 96, 32), (96, 96, 32), (48, 96, 16), (512, 1024, 256), (None, 20, 32), (None, 576, 256), (8, 64, None)],
)
def test_blocks_fit_groups(group, columns, block):
    assert block_of(group, columns) == block


def test_a_byte_holds_codes_lowest_bits_first():
    assert pack(torch.tensor([[1, 2, 3, 0, 3]], dtype=torch.uint8), 2).tolist() == [[0b00111001, 0b11]]
    assert pack(torch.tensor([[5, 9, 15]], dtype=torch.uint8), 4).tolist() == [[0x95, 0x0F]]


def test_groups_repeat_their_scale():
    held = blocks_of(weight_on(grouped(4, 96)))
    assert isinstance(held, BlockCodes)
    assert held.scale.shape == (ROWS, COLUMNS // 32)
    assert torch.equal(held.scale[:, 0], held.scale[:, 2])
    assert not torch.equal(held.scale[:, 2], held.scale[:, 3])


@pytest.mark.first
@pytest.mark.parametrize(("dtype", "kind"), [(torch.float16, "FLOAT16"), (torch.bfloat16, "BFLOAT16")])
def test_tables_of_16_bits_stay_so(dtype, kind, tmp_path):
    """A token embedding is widened behind its rows, the same table as a head and a bias before they are used."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(300, 16), nn.Linear(16, 300))
    model[1].weight = model[0].weight
    if dtype == torch.bfloat16:  # which float16 has no number for
        model[0].weight.data[0, 0] = model[1].bias.data[0] = 1e6
    model = model.to(dtype).float()
    program = trace_module(model, {"input": torch.zeros(2, 5, dtype=torch.long)}, ["y"])
    narrow_tables(program)
    assert {value.dtype.name for value in program.graph.initializers.values()} == {kind}
    onnx_ir.save(program, tmp_path / "model.onnx")
    ids = torch.randint(300, (3, 5))
    (found,) = session(tmp_path / "model.onnx").run(None, {"input": ids.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(ids).detach())
    assert in_16_bits(np.float32([0.1])) is None


def test_what_torch_cannot_trace_is_one_line(monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise ValueError("no node for it\nand a page about it")

    monkeypatch.setattr("torch.onnx.export", fails)
    with pytest.raises(CompressError, match=r"^torch\.onnx cannot trace Linear: no node for it$"):
        trace_module(nn.Linear(4, 4), {"x": torch.zeros(3, 4)}, ["y"])
