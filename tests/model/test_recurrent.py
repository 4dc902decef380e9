"""LSTM, GRU and RNN as linear layers: the same outputs, statistics of every step, codes written and run."""

import pytest
import torch
from combinations import pairs
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import compress
from compress.base.errors import CheckpointError, InputError
from compress.solvers.gptq import gptq
from compress.solvers.hessian_with_drift import POLISH_DAMP

KINDS = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}
CELLS = {"LSTM": nn.LSTMCell, "GRU": nn.GRUCell, "RNN": nn.RNNCell}


class LanguageModel(nn.Module):
    def __init__(self, kind=nn.LSTM, **options):
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.rnn = kind(32, 64, batch_first=True, **options)
        width = options.get("proj_size") or 64 * (1 + options.get("bidirectional", False))
        self.head = nn.Linear(width, 48)

    def forward(self, x):
        return self.head(self.rnn(self.embed(x))[0])


def language_model(kind=nn.LSTM, dtype=torch.float32, **options):
    torch.manual_seed(0)
    return LanguageModel(kind, **options).to(dtype).eval()


def batch(seed=0):
    return {"x": torch.randint(48, (4, 12), generator=torch.Generator().manual_seed(seed))}


def flat(found):
    output, state = found
    return [output, *(state if isinstance(state, tuple) else (state,))]


@pytest.mark.parametrize("mode", [*KINDS, "relu", "projected"])
def test_outputs_and_states_are_those_of_torch(mode):
    kind = KINDS.get(mode, nn.RNN if mode == "relu" else nn.LSTM)
    own = {"relu": {"nonlinearity": "relu"}, "projected": {"proj_size": 3}}.get(mode, {})
    for first, both, layers, bias in pairs([False, True], [False, True], [1, 3], [False, True]):
        torch.manual_seed(1)
        model = (
            nn.Sequential(kind(5, 7, layers, bias=bias, batch_first=first, bidirectional=both, **own)).double().eval()
        )
        x = torch.randn(3, 6, 5).double()
        packed = pack_padded_sequence(x, torch.tensor([2, 6, 4]), batch_first=True, enforce_sorted=False)
        size = layers * (1 + both), 3 if first else 6
        state = torch.randn(*size, own.get("proj_size", 7)).double()
        given = (state, torch.randn(*size, 7).double()) if kind is nn.LSTM else state

        def all_outputs(model=model, x=x, packed=packed, given=given):
            of_packed, state = model[0](packed)
            calls = [model[0](x), model[0](x, given), model[0](x[0]), (pad_packed_sequence(of_packed)[0], state)]
            return [each for call in calls for each in flat(call)]

        expected = all_outputs()
        assert compress.split_layers(model) == ["0"]
        for one, other in zip(all_outputs(), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", CELLS)
def test_cells_return_what_those_of_torch_do(mode):
    for bias in (False, True):
        model = nn.Sequential(CELLS[mode](5, 7, bias)).double()
        x, state = torch.randn(3, 5).double(), torch.randn(3, 7).double()
        given = (state, state.flip(0)) if mode == "LSTM" else state
        calls = [(x,), (x, given), (x[0],)]
        expected = [model[0](*call) for call in calls]
        compress.split_layers(model)
        for call, wanted in zip(calls, expected, strict=True):
            torch.testing.assert_close(model[0](*call), wanted, rtol=1e-9, atol=1e-9)


def test_layers_hold_the_parameters_of_the_module_and_learn():
    model = language_model()
    held = model.rnn.weight_hh_l0
    compress.split_layers(model)
    assert model.rnn.hh_l0.weight is held
    model(batch()["x"]).sum().backward()
    assert bool(held.grad.any())


def test_a_module_under_two_names_and_a_weight_of_two_modules_stay_shared():
    model = nn.ModuleList([nn.LSTM(4, 4), nn.LSTM(4, 4)])
    model.append(model[0])
    model[1].weight_hh_l0 = model[0].weight_hh_l0
    compress.split_layers(model)
    assert model[2] is model[0]
    assert model[1].hh_l0.weight is model[0].hh_l0.weight
    record = compress.quantize(model, compress.RTN(scheme="w8a16")).record
    assert record.left_alone["0.hh_l0"] == "shares its weight with another module"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_gptq_sees_every_step_of_the_state_once(kind):
    """Codes of W_hh are those of GPTQ on the states that torch's own module has had before each step."""
    model = language_model(kind, torch.float64)
    tokens, weight = batch()["x"], model.rnn.weight_hh_l0.detach().clone()
    with torch.no_grad():
        states = model.rnn(model.embed(tokens))[0]
    read = torch.cat([torch.zeros(4, 1, 64, dtype=torch.float64), states[:, :-1]], 1).flatten(0, 1)
    compress.split_layers(model)
    p = compress.GPTQ(scheme="w3a16", group_size=32, drift=0.0, shrink=False, statistics="float64")
    ignored = ["rnn.ih_l0", "head"]
    result = compress.quantize(model, p, calibration=[{"x": tokens}], ignore=ignored, keep_codes=True)
    assert result.record.layers[0].figures["tokens"] == tokens.numel()
    how = {"refit": p.refit, "sweeps": p.sweeps, "polish_damp": POLISH_DAMP + 64 / tokens.numel()}
    expected = gptq(weight, read.T @ read / len(read), grid=p.weight_grid(), **how).weight
    found = result.codes["rnn.hh_l0"].weight
    assert torch.equal(found.codes, expected.codes)
    torch.testing.assert_close(found.dequantize(), expected.dequantize())


CASES = {
    "rtn w4a16": (compress.RTN(scheme="w4a16"), {"bidirectional": True, "num_layers": 2}),
    "rtn w8a8": (compress.RTN(scheme="w8a8"), {"proj_size": 32}),
    "gptq w8a8": (compress.GPTQ(scheme="w8a8"), {"bidirectional": True}),
    "smoothquant w4a8": (compress.SmoothQuant(scheme="w4a8"), {}),
    "spqr": (compress.SpQR(), {"proj_size": 32}),
}


@pytest.mark.first
@pytest.mark.parametrize("words", CASES)
def test_every_weight_gets_codes_that_run_in_memory_and_from_disk(words, tmp_path):
    p, options = CASES[words]
    shown = {"calibration": [batch(), batch(1)]}
    model, other, empty = (language_model(nn.LSTM, **options) for _ in range(3))
    for each in (model, other):
        compress.split_layers(each)
    written = compress.quantize(model, p, output=tmp_path / "out", **shown)
    expected = model(batch()["x"])
    compressed = {layer.name for layer in written.record.layers}
    assert compressed == {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert set(written.record.left_alone) == {"embed"}
    kept = compress.on_codes(compress.quantize(other, p, keep_codes=True, **shown))
    loaded = compress.load(tmp_path / "out", into=empty)
    for found in (kept, loaded):
        assert isinstance(found.rnn.hh_l0, compress.QuantLinear)
        # Of rounded inputs a few lie on the edge between two codes.
        torch.testing.assert_close(found(batch()["x"]), expected, rtol=0, atol=5e-3 if "a8" in words else 1e-5)
    assert torch.equal(kept(batch()["x"]), loaded(batch()["x"]))
    assert compress.verify(tmp_path / "out")["layers"] == len(compressed)


def test_a_stopped_run_goes_on_and_dense_weights_come_back(tmp_path, monkeypatch):
    model = language_model()
    compress.split_layers(model)
    result = compress.quantize(model, compress.RTN(scheme="w4a16"), output=tmp_path / "out")
    dense = compress.load(tmp_path / "out", into=language_model(), dequantize=True)
    assert type(dense.rnn.hh_l0) is nn.Linear
    torch.testing.assert_close(dense(batch()["x"]), model(batch()["x"]))
    assert "is not of transformers" in result.record.notes[-1]
    assert "into=" in (tmp_path / "out" / "README.md").read_text()


def test_what_cannot_be_done_is_said_in_one_line(tmp_path):
    def normed():
        model = nn.Sequential(nn.LSTM(4, 4))
        parametrizations.weight_norm(model[0], "weight_hh_l0")
        return model

    model = language_model()
    with pytest.raises(InputError, match=r"has no linear layer.*; 0 is an LSTM: compress\.split_layers"):
        compress.quantize(nn.Sequential(nn.LSTM(4, 4)), compress.RTN())
    assert compress.quantize(model, compress.RTN()).record.left_alone["rnn.weight_hh_l0"].startswith("LSTM: ")
    with pytest.raises(InputError, match=r"^the model is itself an LSTM.*Sequential"):
        compress.split_layers(nn.LSTM(4, 4))
    with pytest.raises(InputError, match=r"^0 computes its weights from others"):
        compress.split_layers(normed())
    compress.split_layers(model)
    with pytest.raises(InputError, match=r"expected a state of \(1, 2, 64\), got \(1, 3, 64\)"):
        model.rnn(torch.zeros(2, 3, 32), (torch.zeros(1, 3, 64), torch.zeros(1, 2, 64)))
    with pytest.raises(InputError, match="expected an input of 2 or 3 dimensions, got 1"):
        model.rnn(torch.zeros(32))
    with pytest.raises(InputError, match=r"^the result holds no codes; give keep_codes=True"):
        compress.on_codes(compress.quantize(model, compress.RTN()))
    compress.quantize(language_model(), compress.RTN(scheme="w8a16"), output=tmp_path / "out")
    with pytest.raises(InputError, match=r"not of transformers \(LanguageModel\).*into=model"):
        compress.load(tmp_path / "out")
    with pytest.raises(CheckpointError, match="head is stored as"):
        compress.load(tmp_path / "out", into=language_model(bidirectional=True))
    with pytest.raises(InputError, match="fuse is for models of transformers"):
        compress.load(tmp_path / "out", into=language_model(), fuse=True)
    with pytest.raises(InputError, match="demo is not compressed"):
        compress.load("demo", into=language_model())
