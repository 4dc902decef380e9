"""The table of compress/passes/README.md: which method, scheme and calibrator go together, on a decoder, an encoder
and a CNN."""

import pytest
import torch
from combinations import every, pairs
from commands import DRIFT_GPTQ
from models import build, tokens
from vision import calibration, net

import compress
from compress.base.errors import CompressError, InputError
from compress.jobs.verify import outputs, probe
from compress.solvers.statistics.calibrators import OPTIONS as CALIBRATORS

METHODS = {"rtn": compress.RTN, "gptq": compress.GPTQ, "awq": compress.AWQ, "smoothquant": compress.SmoothQuant}
KINDS = ["llama", "bert", "cnn"]
STATIC = {"activations": "static"}
SCHEMES = {
    "w2a16": {"group_size": 16},
    "w3a16 asymmetric": {"group_size": 16, "grid": "asymmetric"},
    "w4a16": {"group_size": -1},
    "w8a16 per tensor": {"group_size": -1, "per_tensor": True},
    "w4a8": {"group_size": 16},
    "w4a4": {"group_size": 16},
    "w4a4 searched": {"group_size": 16, "activation_grid": "asymmetric", "input_range": "mse"},
    "w4a4 static": {**STATIC, "group_size": -1, "activation_grid": "asymmetric"},
    "w8a8 dynamic": {},
    "w8a8 static": STATIC,
    "w8a8 asymmetric": {**STATIC, "activation_grid": "asymmetric"},
    "w8a8 unsigned": {**STATIC, "activation_grid": "unsigned"},
    "w8a8 outputs": {**STATIC, "outputs": "static"},
    "w8a8 asymmetric outputs": {**STATIC, "activation_grid": "asymmetric", "outputs": "static"},
    "w8a8 dynamic outputs": {"outputs": "static"},
    "w8a8 per channel": {**STATIC, "per_channel_inputs": True},
    "fp8 dynamic": {},
    "fp8 static": STATIC,
    "fp8 outputs": {**STATIC, "outputs": "static"},
    "fp8 per channel": {**STATIC, "per_channel_inputs": True},
}
FIXED = [name for name, options in SCHEMES.items() if "static" in options.values()]
# What the table calls no.
REFUSED = {("smoothquant", scheme) for scheme in SCHEMES if "a16" in scheme}


def made(method, scheme, **more):
    options = {"scheme": scheme.split()[0], **SCHEMES[scheme], **more}
    if method == "gptq":
        options |= DRIFT_GPTQ
    return METHODS[method](**options)


def least(scheme):
    """How much of what a model says is left, as a cosine."""
    return 0.5 if scheme.split()[0] in ("w2a16", "w3a16", "w4a16", "w4a8", "w4a4") else 0.9


def run(kind, one):
    """Compress a small model in memory, of blocks the first; its outputs before and after."""
    if kind == "cnn":
        model, images = net().eval(), calibration()
        before = model(**images[0]).detach()
        compress.quantize(model, one, calibration=images if one.calibrated else None)
        return before, model(**images[0]).detach()
    model, one = build(kind), compress.only(one, "*.0.*")
    before = outputs(model, probe(96))
    compress.quantize(model, one, calibration=tokens() if one.calibrated else None)
    return before, outputs(model, probe(96))


@pytest.mark.parametrize(("method", "scheme", "kind"), pairs([*METHODS], [*SCHEMES], KINDS))
def test_methods_and_schemes(method, scheme, kind):
    if (method, scheme) in REFUSED:
        with pytest.raises(InputError, match="smoothquant is for rounded inputs"):
            made(method, scheme)
        return
    one = made(method, scheme)
    if kind == "cnn" and getattr(one, "group_size", -1) > 0:
        one = made(method, scheme, group_size=-1)
    if kind == "cnn" and method in ("gptq", "awq") and "per tensor" in scheme:
        with pytest.raises(InputError, match="groups of depthwise one by one"):
            run(kind, one)
        return
    if "unsigned" in scheme:
        if kind != "cnn":
            with pytest.raises(CompressError, match="unsigned codes begin at 0"):
                run(kind, one)
            return
        with pytest.raises(CompressError, match="the input of stem goes down to -"):
            run(kind, one)
        one = compress.but(one, "stem")
    before, after = run(kind, one)
    assert after.isfinite().all()
    assert not torch.equal(before, after)
    assert torch.nn.functional.cosine_similarity(before.flatten(), after.flatten(), 0) > least(scheme)


@pytest.mark.parametrize(
    ("scheme", "calibrator", "kind"), pairs([name for name in FIXED if "unsigned" not in name], [*CALIBRATORS], KINDS)
)
def test_calibrators(scheme, calibrator, kind):
    if scheme.startswith("fp8") and calibrator == "kl":
        with pytest.raises(InputError, match="kl"):
            made("rtn", scheme, calibrator=calibrator)
        return
    before, after = run(kind, made("rtn", scheme, calibrator=calibrator))
    assert torch.nn.functional.cosine_similarity(before.flatten(), after.flatten(), 0) > least(scheme)


@every("scheme", sorted(set(SCHEMES) - set(FIXED)))
@every("calibrator", sorted(set(CALIBRATORS) - {"minmax"}))
def test_calibrators_of_nothing_are_refused(scheme, calibrator):
    with pytest.raises(InputError, match="fixed ranges"):
        made("rtn", scheme, calibrator=calibrator)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "w8a8", "group_size": 16}, "one scale per output channel"),
        ({"scheme": "w8a8", "activation_grid": "asymmetric"}, "static"),
        ({"scheme": "fp8", "group_size": 16}, "fp8"),
        ({"scheme": "fp8", "activations": "static", "activation_grid": "asymmetric"}, "fp8"),
        ({"scheme": "w4a8", "outputs": "static"}, "w4a8"),
        ({"scheme": "w8a8", "activation_grid": "unsigned"}, "static"),
        ({"scheme": "w8a8", "per_channel_inputs": True}, "static"),
        ({"scheme": "w4a16", "activations": "static"}, "w4a16"),
        ({"scheme": "w3a8"}, "allowed"),
    ],
)
@every("method", ["rtn", "gptq", "awq"])
def test_what_the_table_does_not_have_is_refused(method, options, message):
    with pytest.raises(InputError, match=message):
        METHODS[method](**options)


EVERYTHING = [
    compress.SmoothQuant(
        **STATIC, activation_grid="asymmetric", outputs="static", calibrator="mse", rounding="nearest"
    ),
    compress.Embeddings(),
    compress.KVCache(granularity="head", calibrator="percentile"),
]


@pytest.mark.first
@pytest.mark.parametrize("kind", ["llama", "gemma"])  # a head of its own, and one tied to an embedding that is scaled
def test_all_of_it_together(kind, tmp_path):
    """Weights, inputs, outputs, embedding, head and cache: memory, checkpoint and transformers say the same."""
    pytest.importorskip("compressed_tensors", reason="needs the hf extra")
    model = build(kind)
    model.save_pretrained(tmp_path / "in")
    done = compress.quantize(model, EVERYTHING, calibration=tokens()).record
    assert not done.left_alone
    compress.quantize(tmp_path / "in", EVERYTHING, calibration=tokens(), output=tmp_path / "out", verify=False)
    low, expected = compress.load(tmp_path / "out"), outputs(model, probe(96))
    # One code more or less, where sums in another order round a tie the other way; nothing like what rounding does.
    rounding = (outputs(build(kind), probe(96)) - expected).abs().mean()
    assert rounding > 3e-3 * expected.std()
    assert (outputs(low, probe(96)) - expected).abs().mean() <= 0.1 * rounding
    found = compress.verify(tmp_path / "out")
    assert (found["transformers"], found["cache"], found["loader"]) == ("compared", "compared", "default")
