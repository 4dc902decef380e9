"""Every family of mixtures by every method: decided, verified, loaded, and equal to the dense emulation of its codes.

A few combinations run by default; all of them are slow.
"""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from checkpoints import same
from combinations import each
from commands import DRIFT_GPTQ
from mixtures import FAMILIES, made, tokens
from mixtures_worker import EXACT
from places import RANKS
from processes import python
from transformers import AutoModelForCausalLM

import compress
from compress.base.errors import InputError
from compress.inference.check.dense_twin import compare_layers
from compress.inference.layers.compressed_layers import compressed_layers
from compress.inference.layers.experts import StackedExperts
from compress.inference.load.quantizer import transformers_alone

G16 = {"group_size": 16}
# name -> (passes, options of the run, the kernel of experts multiplies all of them).
METHODS = {
    "rtn": (compress.RTN(scheme="w4a16", group_size=-1), {}, True),
    "gptq": (compress.GPTQ(scheme="w4a16", group_size=-1, **DRIFT_GPTQ), {}, True),
    "gptq in groups": (compress.GPTQ(scheme="w4a16", **G16, **DRIFT_GPTQ), {}, False),
    "awq": (compress.AWQ(scheme="w4a16", **G16), {}, False),
    "smoothquant": (compress.SmoothQuant(), {}, True),
    "spqr": (compress.SpQR(**G16, outliers=0.02), {}, False),
    "w8a8": (compress.GPTQ(scheme="w8a8", **DRIFT_GPTQ), {}, True),
    "w8a8 static": (compress.RTN(scheme="w8a8", activations="static"), {}, False),
    "2:4": (compress.SparseGPT(pattern="2:4"), {"store": "2:4"}, False),
    "2:4 w4a16": (
        [compress.Wanda(pattern="2:4"), compress.RTN(scheme="w4a16", **G16)],
        {"store": "2:4"},
        False,
    ),
    "qat": (
        [compress.RTN(scheme="w4a16", group_size=-1), compress.Train(steps=4, learning_rate=1e-4)],
        {"training": tokens(8)},
        True,
    ),
}


def check(family: str, method: str, folder) -> None:
    passes, options, together = METHODS[method]
    made(family).save_pretrained(folder / "model")
    out, given = folder / "out", {"calibration": tokens(48), "batch_size": 16, "verify": False, **options}
    if method in ("rtn",):
        del given["calibration"]
    record = compress.quantize(folder / "model", passes, output=out, **given).record
    _, _, _, layers = FAMILIES[family]
    assert len({layer.name for layer in record.layers}) == layers
    assert not [name for name, why in record.left_alone.items() if "expert" in name and "gate" not in why]
    verified = compress.verify(out)
    assert verified["layers"] == layers
    x, model = tokens(2, seed=3), compress.load(out)
    assert len(dict(compressed_layers(model))) == layers
    found = [module for module in model.modules() if isinstance(module, StackedExperts)]
    assert found
    assert {not experts.reasons for experts in found} == {together}, found[0].reasons
    with torch.no_grad():
        logits = model(x).logits
        for experts in found:
            experts.stacks = None
        with compare_layers(model):
            emulated = model(x).logits
        original = made(family)(x).logits
    assert logits.isfinite().all()
    # Codes of an input that are ties take either value, and the router then sees another number.
    close = 1e-4 if all(layer.scheme.inputs is None for _, layer in compressed_layers(model)) else 2e-2
    assert (logits - emulated).abs().mean() <= close * emulated.abs().mean()
    alike = torch.nn.functional.cosine_similarity(logits.flatten(), original.flatten(), 0)
    assert (0.3 if "2:4" in method else 0.8) < alike < 1
    if close == 1e-4:
        dense = compress.load(out, dequantize=True)
        with torch.no_grad():
            assert torch.allclose(dense(x).logits, logits, atol=1e-4 * float(logits.abs().max()))
    if "2:4" in method:
        for name, layer in compressed_layers(model):
            assert (layer.values().unflatten(1, (-1, 4)) != 0).sum(-1).max() <= 2, name


# What transformers makes of merged experts, by scheme and family: words of the reason, and whether it loads them.
MISREAD = {
    ("nvfp4a16", "mixtral"): ("merged experts without their global scale", True),
    ("nvfp4", "qwen3-moe"): ("merged experts without their global scale", True),
    ("fp8", "mixtral"): ("does not round the inputs of merged experts", True),
    ("w8a8", "deepseek-v3"): ("cannot merge experts of this scheme", False),
    ("w4a16", "granite"): ("makes random ones in their place", True),
    ("w4a16", "gpt-oss"): ("makes random ones in their place", True),
}


@pytest.mark.parametrize(("scheme", "family"), MISREAD)
def test_what_transformers_misreads_is_said_and_not_compared(scheme, family, tmp_path):
    why, loads = MISREAD[scheme, family]
    made(family, intermediate_size=64).bfloat16().save_pretrained(tmp_path / "model")
    passes = compress.RTN(scheme=scheme, **(G16 if scheme == "w4a16" else {}))
    out, given = tmp_path / "out", {"calibration": tokens(8) if scheme == "nvfp4" else None}
    result = compress.quantize(tmp_path / "model", passes, output=out, **given)
    assert why in result.verification["transformers"]
    assert any(why in note for note in result.record.notes)
    with pytest.raises(InputError, match="transformers takes these experts for others: "):
        compress.quantize_for("transformers", tmp_path / "model", passes, output=tmp_path / "not", **given)
    # Once transformers reads them right, this fails, and the reason is to go.
    x = tokens(2, seed=3)
    with transformers_alone(), torch.no_grad(), nullcontext() if loads else pytest.raises(RuntimeError):
        theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)(x).logits
        ours = compress.load(out)(x).logits
        assert (theirs - ours).abs().max() > 0.2 * ours.std()


# Each method and each family once.
SOME = [pair for pair in each(list(METHODS), list(FAMILIES)) if pair[0] not in ("gptq in groups", "w8a8 static", "2:4")]


@pytest.mark.first
@pytest.mark.parametrize(("method", "family"), SOME)
def test_a_family_by_a_method(method, family, tmp_path):
    check(family, method, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "family"), [pair for pair in product(METHODS, FAMILIES) if pair not in SOME])
def test_every_family_by_every_method(method, family, tmp_path):
    check(family, method, tmp_path)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.skipif(not hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state"), reason="torch < 2.13")
def test_two_ranks_decide_of_every_family_what_one_process_decides(tmp_path):
    for family in FAMILIES:
        made(family).save_pretrained(tmp_path / family)
        for name, method in EXACT.items():
            given = {"calibration": tokens(8), "batch_size": 2, "verify": False}
            compress.quantize(tmp_path / family, method, output=tmp_path / f"{family}-{name}-1", **given)
    done = python(RANKS / "mixtures_worker.py", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    for family, (_, _, _, layers) in FAMILIES.items():
        for name in EXACT:
            same(tmp_path / f"{family}-{name}-1", tmp_path / f"{family}-{name}-2", layers=layers)
