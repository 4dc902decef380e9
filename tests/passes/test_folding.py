"""SmoothQuant and AWQ in a run: the function stays, the error falls, a stopped run folds again."""

import json

import pytest
import torch
from combinations import each, every
from commands import StopAfterOne, command, fast_gptq, make_llama, save
from models import DECODERS, build, tokens

import compress
from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.checkpoint.read.compressed_layers import read_tensors
from compress.checkpoint.read.source import find_source
from compress.jobs.verify import outputs, probe
from compress.model.edits.folds import UNTOUCHED
from compress.passes.protocol.sites import FoldSite, Reader
from compress.solvers.awq import balance
from compress.solvers.smoothquant import smoothing
from compress.solvers.statistics.hessian import Hessian
from compress.solvers.statistics.input_statistics import ChannelMean, MinMax, TokenSample
from compress.weights.grid import fake_quantize

FOLD_ONLY = {
    "smoothquant": compress.SmoothQuant(rounding="none"),
    "smoothquant-0.85": compress.SmoothQuant(rounding="none", alpha=0.85),
    "awq": compress.AWQ(group_size=16, rounding="none"),
}


@pytest.mark.parametrize("kind", [*DECODERS, "bert", "t5"])
def test_folding_leaves_the_function_of_every_family_unchanged(kind):
    model, original = build(kind), build(kind)
    passes = [compress.only(FOLD_ONLY[name], "*.0.*") for name in ("smoothquant-0.85", "awq")]  # the first block
    record = compress.quantize(model, passes, calibration=_inputs(kind)).record
    assert {fold.method for fold in record.folds} == {"smoothquant", "awq"}
    assert record.layers == []
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), original.parameters(), strict=True))
    expected = outputs(original, probe(96))
    assert (outputs(model, probe(96)) - expected).abs().max() <= 1e-4 * expected.abs().max()


def _inputs(kind):
    ids = tokens()
    return [{"input_ids": p, "decoder_input_ids": p} for p in ids.split(3)] if kind == "t5" else ids


def _site(weights, x, channel_of_K=None, channels=None):
    """A fold site of layers that read x [M, K]."""
    stats = {}
    for name, statistic in (
        ("extremes", MinMax(x.shape[1], x.device)),
        ("mean", ChannelMean(x.shape[1], x.device)),
        ("hessian", Hessian(x.shape[1], x.device)),
        ("sample", TokenSample(x.shape[1], x.device, per_batch=64)),
    ):
        statistic.update(x, None)
        stats[name] = statistic.result()
    found = torch.arange(x.shape[1]) if channel_of_K is None else channel_of_K
    readers = {n: Reader(w, stats, found, torch.float32) for n, w in weights.items()}
    return FoldSite(readers, channels or x.shape[1], Comm())


def _outlying(M=256, K=32, N=24):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(M, K, generator=g)
    x[:, 5] *= 60
    return {"a": torch.randn(N, K, generator=g), "b": torch.randn(2 * N, K, generator=g)}, x


def test_smoothing_is_equation_4():
    largest, heaviest = torch.tensor([4.0, 1.0, 0.0, 9.0]), torch.tensor([1.0, 4.0, 2.0, 0.0])
    s = smoothing(largest, heaviest, 0.5)
    assert s[0] / s[1] == pytest.approx((4 / 1) ** 0.5 / (1 / 4) ** 0.5)
    assert s[2] == s[3] == 1  # never active, never used
    assert smoothing(largest, heaviest, 1.0)[0] / smoothing(largest, heaviest, 1.0)[1] == pytest.approx(4)


def test_searched_smoothing_takes_the_outlier_away():
    weights, x = _outlying()
    site = _site(weights, x)
    found = compress.SmoothQuant().scaling(site)
    assert found.scale_C[5] > 3 * found.scale_C.median()
    assert found.figures["loss"] < 0.5

    def error(s):
        grid = compress.SmoothQuant()
        rounded = fake_quantize(x / s, grid.input_grid(), torch.float32)
        return sum(
            (rounded @ fake_quantize(w * s, grid.weight_grid(), torch.float32).t() - x @ w.t()).square().sum()
            for w in weights.values()
        )

    sampled = error(found.scale_C) / error(torch.ones(32))
    assert sampled < 0.5  # on all tokens, not only those it looked at


def test_awq_lowers_the_loss_that_it_states_and_never_takes_a_worse_scale():
    weights, x = _outlying()
    site = _site(weights, x)
    method = compress.AWQ(scheme="w3a16", group_size=16)
    found = method.scaling(site)
    hessian = x.t() @ x / len(x)

    def loss(s):
        total = 0.0
        for w in weights.values():
            e = fake_quantize(w * s, method.weight_grid().with_range("minmax")) / s - w
            total += ((e @ hessian) * e).sum().double()
        return total

    assert found.figures["loss"] < 1
    assert float(loss(found.scale_C.float()) / loss(torch.ones(32))) == pytest.approx(found.figures["loss"], rel=1e-3)
    flat = {"a": torch.ones(8, 32)}
    same = compress.AWQ(scheme="w8a16", group_size=-1).scaling(_site(flat, torch.ones(64, 32)))
    assert torch.equal(same.scale_C, torch.ones(32))  # nothing to gain: the identity


def test_query_heads_that_share_a_value_head_share_a_scale():
    weights, x = _outlying()
    channel_of_K = torch.arange(32) // 8 * 4 + torch.arange(32) % 4
    channel_of_K[-1] = UNTOUCHED
    site = _site(weights, x, channel_of_K, 16)
    merged = site.merged(lambda reader: reader.stats["extremes"][1], "max")
    assert merged.shape == (16,)
    assert merged[1] == x[:, [1, 5]].max()  # channel 5 and channel 1 come from producer channel 1
    for method in (compress.SmoothQuant(), compress.AWQ(group_size=16)):
        assert method.scaling(site).scale_C.shape == (16,)


def test_scales_stay_usable():
    assert torch.equal(balance(torch.tensor([0.0, float("inf"), float("nan")])), torch.ones(3))
    found = balance(torch.tensor([0.0, 4.0, 1.0]))
    assert found[0] == 1
    assert found[1] / found[2] == 4


# --- a whole run ---------------------------------------------------------------------------------------------------


def _injected(factor=60.0):
    """The tiny Llama with outliers that leave its function alone: norms scaled up, what reads them scaled down."""
    model = make_llama()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for block in model.model.layers:
            for norm, readers in (
                (block.input_layernorm, [getattr(block.self_attn, f"{n}_proj") for n in "qkv"]),
                (block.post_attention_layernorm, [block.mlp.gate_proj, block.mlp.up_proj]),
            ):
                s = torch.ones(64)
                s[torch.randperm(64, generator=generator)[:4]] = factor
                norm.weight.mul_(s)
                for reader in readers:
                    reader.weight.div_(s)
    return model


def test_smoothquant_recovers_what_outliers_cost():
    ids = torch.randint(2048, (8, 32), generator=torch.Generator().manual_seed(7))
    kl = {}
    for name, method in (("rtn", compress.RTN(scheme="w8a8")), ("smoothquant", compress.SmoothQuant())):
        for kind, make in (("plain", make_llama), ("injected", _injected)):
            model = make()
            compress.quantize(model, method, calibration=ids if method.calibrated else None)
            kl[name, kind] = compress.evaluate(model, reference=make(), text=ids).kl_mean
    assert kl["rtn", "injected"] > 10 * kl["rtn", "plain"]
    assert kl["smoothquant", "injected"] <= kl["rtn", "plain"] + 0.1 * (kl["rtn", "injected"] - kl["rtn", "plain"])


def test_awq_then_gptq(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "passes:\n  - awq: {scheme: w4a16, group_size: 16, rounding: none}\n  - gptq: {scheme: w4a16, group_size: 16}\n"
    )
    source = save(build("llama"), tmp_path / "in")
    words = ("--calibration", _token_file(tmp_path), "--output", tmp_path / "out")
    outcome = command("quantize", source, "--recipe", recipe, *words)
    assert outcome.code == 0, outcome.err
    record = json.loads((tmp_path / "out" / "compress.json").read_text())
    assert {fold["method"] for fold in record["folds"]} == {"awq"}
    assert {layer["method"] for layer in record["layers"]} == {"gptq"}
    assert compress.verify(tmp_path / "out")["transformers"] == "compared"
    assert any("q_proj" in reason for reason in record["not_folded"])
    norms = read_tensors(find_source(str(tmp_path / "out")))["model.layers.0.input_layernorm.weight"]
    assert not torch.equal(norms, build("llama").model.layers[0].input_layernorm.weight)


def _token_file(tmp_path):
    torch.save(tokens(), tmp_path / "tokens.pt")
    return tmp_path / "tokens.pt"


@pytest.mark.first
@pytest.mark.parametrize("name", ["awq", "smoothquant", "smoothquant-awq-gptq"])
def test_a_stopped_run_folds_again(name, tmp_path):
    passes = {
        "awq": [compress.AWQ(group_size=16)],
        "smoothquant": [compress.SmoothQuant(activations="static")],
        "smoothquant-awq-gptq": [*map(FOLD_ONLY.get, ("smoothquant", "awq")), fast_gptq(group_size=16)],
    }[name]

    arguments = {"calibration": tokens(), "verify": False}
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(build("llama"), passes, output=tmp_path / "out", reporter=StopAfterOne(), **arguments)
    again = compress.quantize(build("llama"), passes, output=tmp_path / "out", resume=True, **arguments).record
    whole = compress.quantize(build("llama"), passes, output=tmp_path / "whole", **arguments).record
    assert [(f.producer, f.figures) for f in again.folds] == [(f.producer, f.figures) for f in whole.folds]
    names = sorted(p.name for p in (tmp_path / "whole").glob("*.safetensors"))
    assert names == sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    for file in names:
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "out" / file).read_bytes(), file


@pytest.mark.parametrize("beside", [[], [compress.Embeddings()], [compress.KVCache()]], ids=["", "tables", "caches"])
def test_a_run_that_only_folds_says_so(beside):
    record = compress.quantize(build("llama"), [FOLD_ONLY["smoothquant-0.85"], *beside], calibration=tokens()).record
    assert any("prepared, not compressed" in note for note in record.notes)


def test_layers_that_are_not_wanted_are_left_to_themselves():
    model, original = build("llama"), build("llama")
    only = compress.only(compress.AWQ(group_size=16), "*.mlp.down_proj")
    record = compress.quantize(model, only, calibration=tokens()).record
    assert {fold.producer.rpartition(".")[2] for fold in record.folds} == {"up_proj"}
    attention = [m.model.layers[0].self_attn.state_dict() for m in (model, original)]
    assert all(torch.equal(attention[0][key], attention[1][key]) for key in attention[0])


def test_what_is_quantized_already_is_not_folded():
    """v is a producer of the fold that serves o: once its codes are fixed it cannot be divided."""
    passes = [
        compress.only(compress.RTN(group_size=16), "*.v_proj"),
        compress.only(compress.AWQ(group_size=16), "*.o_proj"),
    ]
    record = compress.quantize(build("llama"), passes, calibration=tokens()).record
    assert record.folds == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: compress.SmoothQuant(scheme="w4a16"), "smoothquant is for rounded inputs"),
        (lambda: compress.SmoothQuant(alpha=1.5), "alpha 1.5; allowed: 0 to 1"),
        (lambda: compress.SmoothQuant(rounding="up"), "rounding 'up'; allowed: nearest, none"),
        (lambda: compress.AWQ(statistics="int8"), "statistics 'int8'"),
        (lambda: compress.RTN(scheme="w8a8", calibrator="kl"), "give activations=static"),
        (
            lambda: compress.RTN(scheme="w8a8", histograms=True),
            "histograms are of fixed ranges.*give activations=static",
        ),
        (lambda: compress.RTN(histograms=True), "histograms are of fixed ranges.*give activations=static"),
        (
            lambda: compress.SmoothQuant(activations="static", histograms=True, rounding="none"),
            "histograms are of ranges that a pass fixes as it rounds",
        ),
        (lambda: compress.RTN(scheme="w8a8", activations="static", calibrator="lk"), "unknown calibrator 'lk'"),
        (lambda: compress.RTN(scheme="w8a8", activations="static", percentile=99.0), "percentile is of the calibrator"),
        (
            lambda: compress.RTN(scheme="w8a8", activations="static", calibrator="percentile", percentile=40.0),
            "percentile of percentile is 40.0; allowed",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


@every(("calibrator", "kind"), each(["minmax", "moving-average", "percentile", "mse", "kl"], ["llama", "bert"]))
def test_every_calibrator_fixes_a_range(calibrator, kind):
    method = compress.RTN(scheme="w8a8", activations="static", calibrator=calibrator, activation_grid="asymmetric")
    model, original = build(kind), build(kind)
    record = compress.quantize(model, method, calibration=tokens()).record
    for layer in record.layers:
        assert layer.figures["calibrator"] == calibrator
        assert layer.figures["input_low"] >= layer.figures["input_lowest"] - 1e-6
        assert 0 <= layer.figures.get("input_clipped", 0.0) < 0.5
    similarity = torch.nn.functional.cosine_similarity(
        outputs(model, probe(96)).flatten(), outputs(original, probe(96)).flatten(), 0
    )
    assert similarity > 0.95


def test_methods_by_their_command(tmp_path):
    source = save(build("llama"), tmp_path / "in")
    ids = _token_file(tmp_path)
    words = ["--calibration", ids, "--quiet"]
    for arguments in (
        ["--method", "smoothquant", "--scheme", "w8a8"],
        ["--method", "awq", "--group-size", "16"],
        ["--method", "rtn", "--scheme", "w8a8", "--activations", "static", "--calibrator", "kl"],
    ):
        out = tmp_path / f"out-{arguments[1]}"
        outcome = command("quantize", source, *arguments, *words, "--output", out)
        assert outcome.code == 0, outcome.err
        assert outputs(compress.load(out), probe(96)).isfinite().all()
