"""Every method on a model of 16 bits: its output verifies, and no weight has become wider. A new one
joins `METHODS`."""

import pytest
import torch
from combinations import each
from commands import fast_gptq
from models import GATED, tokens
from transformers import LlamaConfig, LlamaForCausalLM

import compress
from compress.checkpoint.read.source import find_source
from compress.passes.protocol.recipe import PASSES

FEW = {"steps": 1, "rows": 2, "held_out": 0.0}
METHODS: list[list[compress.Pass]] = [
    [compress.RTN(group_size=16), compress.KVCache()],
    [fast_gptq(group_size=16), compress.Reconstruct(steps=1), compress.Embeddings()],
    [fast_gptq(scheme="nvfp4a16")],
    [fast_gptq(scheme="mxfp6e3m2a16")],
    [compress.RTN(scheme="mxfp6e3m2a16")],
    [compress.AWQ(scheme="mxfp4")],
    [compress.SmoothQuant(scheme="nvfp4")],
    [compress.SpQR(group_size=16)],
    [compress.KQuants()],
    [compress.Trellis()],
    [compress.Rotation(online=True), compress.RTN(group_size=16)],
    [compress.Ternary()],
    [compress.Binary()],
    [compress.AWQ(group_size=16)],
    [compress.LowRank(rank=4)],
    [compress.LQS(rank=2, group_size=16)],
    [compress.SmoothQuant()],
    [compress.Taylor()],
    [compress.Wanda(), compress.RTN(scheme="w8a8")],
    [compress.RTN(group_size=16), compress.Train(**FEW)],
]
# What is trained has 32 bits meanwhile.
TRAINED_DENSE: list[list[compress.Pass]] = [
    [compress.Structure(channels=0.25), compress.Train(**FEW)],
    [compress.Magnitude(), compress.Train(**FEW)],
    [compress.SparseGPT(steps=0), compress.Train(**FEW), compress.only(compress.RTN(scheme="w8a8"), "*.q_proj")],
    [compress.Train(**FEW, sparsity=0.5)],
]
BITS_16 = [torch.float16, torch.bfloat16]
CASES = [*each(METHODS, BITS_16), *((passes, dtype) for passes in TRAINED_DENSE for dtype in BITS_16)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A Llama of one block in each dtype, as folders."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**GATED, "num_hidden_layers": 1}))
    folders = {dtype: tmp_path_factory.mktemp("models") / str(dtype) for dtype in BITS_16}
    for dtype, folder in folders.items():
        model.to(dtype).save_pretrained(folder)
    return folders


def test_every_method_is_here():
    assert {one.name for passes, _ in CASES for one in passes} == PASSES.keys()


@pytest.mark.parametrize(
    ("passes", "dtype"), CASES, ids=lambda case: str(case) if case in BITS_16 else "-".join(one.name for one in case)
)
def test_what_is_written_verifies(passes, dtype, models, tmp_path):
    forecast = None if any(p.removes for p in passes) else compress.plan(models[dtype], passes)
    result = compress.quantize(models[dtype], passes, calibration=tokens(), output=tmp_path / "out", verify=False)
    if forecast is not None:
        assert result.record.saving is not None
        assert not forecast.exact or forecast.saving == result.record.saving
        assert forecast.exact or abs(forecast.saving.after / result.record.saving.after - 1) < 0.05
    assert compress.verify(tmp_path / "out")["layers"] > 0
    before, after = (find_source(str(path)).headers for path in (models[dtype], tmp_path / "out"))
    weights = {name: stored for name, (_, stored) in after.items() if name in before}
    assert {stored for name, stored in weights.items() if stored != "I8"} <= {before[name][1] for name in weights}


def test_trellis_codes_take_any_number_of_inputs(tmp_path):
    """Of 72, the words of 3 bits have room for 96."""
    model = LlamaForCausalLM(LlamaConfig(**{**GATED, "num_hidden_layers": 1, "intermediate_size": 72})).eval()
    model.save_pretrained(tmp_path / "model")
    forecast = compress.plan(tmp_path / "model", [compress.Trellis()])
    result = compress.quantize(tmp_path / "model", [compress.Trellis()], calibration=tokens(), output=tmp_path / "out")
    assert forecast.saving == result.record.saving
    packed, dense = (compress.load(tmp_path / "out", dequantize=how) for how in (False, True))
    assert packed.get_submodule("model.layers.0.mlp.down_proj").dequantize().shape == (32, 72)
    torch.testing.assert_close(packed(tokens()[:1]).logits, dense(tokens()[:1]).logits, rtol=1e-4, atol=1e-4)
