"""Statistics of the original model's inputs: gathered once, kept in a folder, and the same results with them."""

import json
import shutil
from dataclasses import dataclass, field
from typing import ClassVar

import mixtures
import pytest
import torch
import transformers
from commands import DRIFT_GPTQ, PLAIN_GPTQ, StopAfterOne, command, last_line, make_llama, save
from models import build, strong, tokens

import compress
from compress.checkpoint.sensitivity import folder
from compress.checkpoint.statistics_folder import StatisticsFolder
from compress.passes.gptq import GPTQ
from compress.system.progress import Silent

ORIGINAL = {**PLAIN_GPTQ, "prefix": "original", "group_size": 16}
DATA = {"calibration": tokens(12, 16), "batch_size": 4}
SEEN: dict[str, torch.Tensor] = {}


@dataclass(frozen=True, kw_only=True)
class Shown(GPTQ):
    """GPTQ that leaves the Hessians that it was shown."""

    name: ClassVar[str] = "shown"

    def apply(self, site):
        SEEN.update(dict.fromkeys(site.weights, site.stats["hessian"].hessian.clone()))
        return super().apply(site)


@dataclass
class Notes(Silent):
    said: list[str] = field(default_factory=list)

    def note(self, message):
        self.said.append(message)


def hessians_of(model, ids):
    """{layer: mean of x x^T} of every linear layer in the blocks of a model, by hooks."""
    found, hooks = {}, []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers" in name:

            def add(_, args, name=name):
                x = args[0].reshape(-1, args[0].shape[-1])
                found[name] = found.get(name, 0) + x.T @ x

            hooks.append(module.register_forward_pre_hook(add))
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return {name: total / ids.numel() for name, total in found.items()}


def codes_of(passes, model=None, data=DATA, **options):
    """(The codes of every layer, forwards of blocks, notes) of a run in memory."""
    notes = Notes()
    made = compress.quantize(
        build("llama") if model is None else model, passes, **data, keep_codes=True, reporter=notes, **options
    )
    values = {name: (decision.weight.dequantize(), decision.figures) for name, decision in made.codes.items()}
    return values, made.record.block_forwards, notes.said


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, (weight, figures) in expected.items():
        assert torch.equal(found[name][0], weight), name
        assert found[name][1] == figures, name


# --- what is gathered -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beside", ["alone", "with rtn", "with gptq", "with reconstruct", "repeated"])
def test_statistics_are_of_the_original_models_inputs_whatever_is_compressed_before(beside, monkeypatch):
    model, ids = strong(), DATA["calibration"]
    expected = hessians_of(model, ids)
    SEEN.clear()
    shown, mine = Shown(**ORIGINAL, scheme="w2a16"), "*self_attn*"
    passes = {
        "with rtn": (compress.but(compress.RTN(scheme="w2a16", group_size=16), mine), compress.only(shown, mine)),
        "with gptq": (compress.but(GPTQ(**DRIFT_GPTQ, group_size=16), mine), compress.only(shown, mine)),
        "with reconstruct": (shown, compress.Reconstruct(steps=2)),
    }.get(beside, (shown,))
    if beside == "repeated":
        monkeypatch.setattr("compress.api.prepare.lack_of_memory", lambda *_: "too little")
    compress.quantize(model, passes, **DATA)
    assert len(SEEN) == (8 if "rtn" in beside or "gptq" in beside else 14)
    for name, hessian in SEEN.items():
        torch.testing.assert_close(hessian, expected[name], rtol=1e-4, atol=1e-5)


def test_behind_compressed_layers_they_are_others():
    expected = hessians_of(strong(), DATA["calibration"])
    SEEN.clear()
    compress.quantize(strong(), Shown(**{**ORIGINAL, "prefix": "compressed"}, scheme="w2a16"), **DATA)
    first, last = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
    torch.testing.assert_close(SEEN[first], expected[first], rtol=1e-4, atol=1e-5)
    assert (SEEN[last] - expected[last]).norm() > 0.01 * expected[last].norm()


def test_a_rounded_embedding_changes_no_statistic():
    table = compress.Embeddings(scheme="w2a16")
    plain, *_ = codes_of(GPTQ(**ORIGINAL))
    beside, *_ = codes_of((table, GPTQ(**ORIGINAL)))
    assert_same({name: beside[name] for name in plain}, plain)


# --- kept, and read ---------------------------------------------------------------------------------------------------


def albert():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "embedding_size": 16}
    torch.manual_seed(0)
    config = transformers.AlbertConfig(vocab_size=128, num_hidden_layers=3, **sizes)
    return transformers.AlbertModel(config).eval()


ROUNDED = {"scheme": "w8a8", "activations": "static", "outputs": "static"}
STATIC = {"activations": "static", "calibrator": "percentile"}
KINDS = {
    "llama": (lambda: build("llama"), {}),
    "few tokens, in float64": (lambda: build("llama"), {"shrink": True, "statistics": "float64"}),
    "fixed ranges": (lambda: build("llama"), {**STATIC, "scheme": "w8a8", "group_size": -1}),
    "experts": (lambda: mixtures.made("qwen3-moe"), {}),
    "two stacks": (lambda: build("t5"), {}),
    "called several times": (albert, {}),
    "spqr": (lambda: build("llama"), {"method": "spqr"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kept_statistics_give_the_same_codes_without_a_forward(kind, tmp_path):
    make, options = KINDS[kind]
    options = dict(options)
    if options.pop("method", "gptq") == "spqr":
        first = compress.SpQR(prefix="original", drift=0)
        other = compress.SpQR(prefix="original", drift=0, scheme="w2a16")
    else:
        first = GPTQ(**{**ORIGINAL, **options})
        other = GPTQ(**{**ORIGINAL, **options, "scheme": "w4a8" if "activations" in options else "w2a16"})
    kept = {"keep_statistics": tmp_path / "kept"}
    without, forwards, _ = codes_of(first, make())
    assert forwards > 0
    gathering, again, said = codes_of(first, make(), **kept)
    assert again == forwards
    assert any("of 0 inputs read" in line for line in said)
    assert_same(gathering, without)
    expected, *_ = codes_of(other, make())
    for p, codes in ((first, without), (other, expected)):
        with pytest.MonkeyPatch.context() as patch:
            if kind != "called several times":  # which shows when the blocks are captured
                patch.setattr("compress.run.pipeline.capture", None)
            read, none, said = codes_of(p, make(), **kept)
        assert none == 0
        assert any("of 0 gathered" in line for line in said), said
        assert_same(read, codes)


def test_passes_beside_each_other_share_what_is_kept(tmp_path):
    kept = {"keep_statistics": tmp_path / "kept"}
    codes_of(GPTQ(**ORIGINAL), **kept)
    parts = [GPTQ(**ORIGINAL, scheme=f"w{bits}a16") for bits in (2, 3)]
    mixed = compress.only(parts[0], "*q_proj", "*mlp*"), compress.but(parts[1], "*q_proj", "*mlp*")
    expected, *_ = codes_of(mixed)
    found, forwards, _ = codes_of(mixed, **kept)
    assert forwards == 0
    assert_same(found, expected)


def test_layers_that_were_left_out_are_gathered_later(tmp_path):
    kept = {"keep_statistics": tmp_path / "kept"}
    codes_of(compress.only(GPTQ(**ORIGINAL), "*layers.0*"), **kept)
    expected, *_ = codes_of(GPTQ(**ORIGINAL))
    found, forwards, said = codes_of(GPTQ(**ORIGINAL), **kept)
    assert forwards > 0
    assert any("statistics of 4 inputs read, of 4 gathered" in line for line in said), said
    assert_same(found, expected)
    again, none, _ = codes_of(GPTQ(**ORIGINAL), **kept)
    assert none == 0
    assert_same(again, expected)


def test_a_stopped_run_leaves_the_blocks_that_it_finished(tmp_path):
    kept = {"keep_statistics": tmp_path / "kept"}
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(build("llama"), GPTQ(**ORIGINAL), **DATA, **kept, reporter=StopAfterOne())
    expected, *_ = codes_of(GPTQ(**ORIGINAL))
    found, _, said = codes_of(GPTQ(**ORIGINAL), **kept)
    assert any("statistics of 4 inputs read, of 4 gathered" in line for line in said), said
    assert_same(found, expected)


def test_a_block_counts_only_once_all_of_it_is_there(tmp_path, monkeypatch):
    """The process dies between the files of a block and its entry."""
    kept = {"keep_statistics": tmp_path / "kept"}
    monkeypatch.setattr("compress.checkpoint.statistics_folder.KeptKind.finish", lambda *_: None)
    codes_of(GPTQ(**ORIGINAL), **kept)
    monkeypatch.undo()
    assert list((tmp_path / "kept").glob("*/*.safetensors"))
    _, forwards, said = codes_of(GPTQ(**ORIGINAL), **kept)
    assert forwards > 0
    assert any("of 0 inputs read" in line for line in said)


def test_other_data_or_settings_are_gathered_beside_with_a_reason(tmp_path):
    kept = {"keep_statistics": tmp_path / "kept"}
    codes_of(GPTQ(**ORIGINAL), **kept)
    other = {**DATA, "calibration": tokens(12, 16, 5)}
    expected, *_ = codes_of(GPTQ(**ORIGINAL), data=other)
    found, _, said = codes_of(GPTQ(**ORIGINAL), data=other, **kept)
    assert any("of another calibration data: statistics are gathered anew" in line for line in said), said
    assert_same(found, expected)
    _, _, said = codes_of(GPTQ(**ORIGINAL), data={**DATA, "batch_size": 3}, **kept)
    assert any("of another batch size" in line for line in said), said
    for data in (DATA, other):
        assert codes_of(GPTQ(**ORIGINAL), data=data, **kept)[1] == 0


def test_rotated_models_have_statistics_of_their_own(tmp_path):
    model, kept = str(save(make_llama(), tmp_path / "model")), {"keep_statistics": tmp_path / "kept"}
    codes_of(GPTQ(**ORIGINAL), model, **kept)
    rotated = compress.Rotation(), GPTQ(**ORIGINAL)
    expected, *_ = codes_of(rotated, model)
    found, forwards, said = codes_of(rotated, model, **kept)
    assert forwards > 0
    assert any("of another structure" in line for line in said), said
    assert_same(found, expected)
    again, none, _ = codes_of(rotated, model, **kept)
    assert none == 0
    assert_same(again, expected)


@pytest.mark.parametrize(
    ("passes", "why"),
    [
        (GPTQ(**PLAIN_GPTQ, group_size=16), "gptq gathers them behind compressed layers"),
        (compress.RTN(group_size=16), "no pass gathers any"),
        ((compress.SmoothQuant(rounding="none"), GPTQ(**ORIGINAL)), "smoothquant changes what the layers are given"),
    ],
)
def test_what_cannot_be_kept_is_said(passes, why, tmp_path):
    data = {} if isinstance(passes, compress.RTN) else DATA
    _, _, said = codes_of(passes, data=data, keep_statistics=tmp_path / "kept")
    assert any(f"no statistics are kept in {tmp_path / 'kept'}: {why}" in line for line in said), said
    assert not (tmp_path / "kept").exists()


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def desk(tmp_path, monkeypatch):
    monkeypatch.setattr("compress.api.job.VERIFY_LIMIT", 0)
    save(make_llama(), tmp_path / "model")
    torch.save(torch.randint(2048, (10, 16), generator=torch.Generator().manual_seed(0)), tmp_path / "tokens.pt")
    for bits in (2, 3):
        options = json.dumps({**PLAIN_GPTQ, "scheme": f"w{bits}a16", "group_size": 32})
        (tmp_path / f"w{bits}.yaml").write_text(f"passes:\n  - gptq: {options}\n")
    (tmp_path / "nearest.yaml").write_text("passes:\n  - rtn: {scheme: w8a16, group_size: 32}\n")
    (tmp_path / "drift.yaml").write_text(f"passes:\n  - gptq: {json.dumps({**DRIFT_GPTQ, **ROUNDED})}\n")
    return tmp_path


def swept(desk, *recipes, more=()):
    data = ["--calibration", desk / "tokens.pt", "--text", desk / "tokens.pt", "--output", desk / "out"]
    return command("sweep", desk / "model", *(desk / f"{name}.yaml" for name in recipes), *data, *more)


def record_of(desk, name):
    return json.loads((desk / "out" / name / "model" / "compress.json").read_text())


def test_recipes_of_a_sweep_gather_once(desk):
    made = swept(desk, "w2", "w3", "drift", "nearest", more=["--original-inputs"])
    assert made.code == 0, made.err
    assert "as they are: drift, nearest" in made.err
    assert "gathered once for w2, w3; not for drift (gptq gathers them behind compressed layers" in made.err
    forwards = {name: record_of(desk, name)["block_forwards"] for name in ("w2", "w3", "drift")}
    assert (forwards["w3"], forwards["w2"] > 0, forwards["drift"] > 0) == (0, True, True)
    assert not (desk / "out" / ".statistics").exists()
    words = ["--method", "gptq", "--scheme", "w3a16", "--group-size", 32, "--calibration", desk / "tokens.pt"]
    options = {**PLAIN_GPTQ, "prefix": "original"}
    settings = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
    alone = command("quantize", desk / "model", *words, *settings, "--output", desk / "alone")
    assert alone.code == 0, alone.err
    record = json.loads((desk / "alone" / "compress.json").read_text())
    assert record["checksums"]["tensors"] == record_of(desk, "w3")["checksums"]["tensors"]


def test_a_sweep_reads_what_another_has_kept(desk):
    more = ["--original-inputs", "--keep-statistics", desk / "kept"]
    assert swept(desk, "w2", more=more).code == 0
    made = swept(desk, "w3", more=more)
    assert made.code == 0, made.err
    assert record_of(desk, "w3")["block_forwards"] == 0
    assert (desk / "kept" / "statistics.json").exists()


def test_measured_layers_and_runs_share_statistics(desk):
    kept = ["--keep-statistics", desk / "kept"]
    data = ["--calibration", desk / "tokens.pt", "--text", desk / "tokens.pt"]
    settings = [word for name, value in PLAIN_GPTQ.items() for word in ("--set", f"{name}={value}")]
    words = ["allocate", desk / "model", *data, "--group-sizes", 32, "--budget", "3.6bpw", *settings]
    plain = command(*words, "--bits", "2,4", "--json", desk / "plain.json", "--output", desk / "a.yaml")
    assert plain.code == 0, plain.err
    first = command(*words, "--bits", "2,3", *kept, "--output", desk / "b.yaml")
    assert "of 0 inputs read" in first.err
    (desk / "plain.json").rename(desk / "without.json")
    for table in folder().glob("*.json"):
        table.unlink()
    again = command(*words, "--bits", "2,4", *kept, "--json", desk / "plain.json", "--output", desk / "c.yaml")
    assert "of 0 gathered" in again.err
    tables = [json.loads((desk / name).read_text())["sensitivity"] for name in ("without.json", "plain.json")]
    assert tables[0]["units"] == tables[1]["units"]
    run = [*("quantize", desk / "model", "--calibration", desk / "tokens.pt", "--group-size", 32), *settings]
    made = command(*run, "--set", "prefix=original", *kept, "--output", desk / "out")
    assert made.code == 0, made.err
    assert json.loads((desk / "out" / "compress.json").read_text())["block_forwards"] == 0


def kept_by(place, kept, out):
    words = ["quantize", place / "model", "--calibration", place / "tokens.pt", "--group-size", 32]
    options = {**PLAIN_GPTQ, "prefix": "original"}
    settings = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
    return command(*words, *settings, "--no-verify", "--keep-statistics", kept, "--output", out)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    place = tmp_path_factory.mktemp("kept")
    save(make_llama(), place / "model")
    torch.save(torch.randint(2048, (10, 16), generator=torch.Generator().manual_seed(0)), place / "tokens.pt")
    assert kept_by(place, place / "kept", place / "out").code == 0
    return place


def first_of(folder, ending):
    return next(path for path in sorted(folder.glob(f"*/*{ending}")) if path.name != "about.json")


def cut_off(folder):
    path = first_of(folder, ".safetensors")
    path.write_bytes(path.read_bytes()[:-8])


def flip(folder):
    path = first_of(folder, ".safetensors")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))


def change(folder):
    path = first_of(folder, ".json")
    path.write_text(path.read_text().replace("q_proj", "k_proj"))


def of_another_model(folder):
    path = folder / "statistics.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model": "0" * 64}))


DAMAGES = {
    "a file that is cut off": (cut_off, "damaged or incomplete"),
    "a bit that is another": (flip, "is damaged; remove the folder"),
    "a file that is missing": (
        lambda folder: first_of(folder, ".safetensors").unlink(),
        "is missing; remove",
    ),
    "another name of a layer": (change, "is damaged; remove the folder"),
    "an entry without inputs": (
        lambda folder: first_of(folder, ".json").write_text('{"block": "x"}'),
        "inputs is missing",
    ),
    "another model": (of_another_model, "statistics of another model; give another folder"),
    "no entry": (
        lambda folder: (folder / "statistics.json").unlink(),
        "no statistics.json; give an empty",
    ),
    "an empty entry": (lambda folder: (folder / "statistics.json").write_text("{}"), "is missing; it must be"),
    "something else": (
        lambda folder: (shutil.rmtree(folder), folder.write_text("x")),
        "is a file; statistics",
    ),
}


def test_what_a_killed_run_left_of_the_first_file_hinders_nobody(tmp_path):
    left = tmp_path / f".statistics.json.{'0' * 16}"
    left.touch()
    StatisticsFolder(tmp_path, "model")
    assert [path.name for path in tmp_path.iterdir()] == ["statistics.json"]


def test_a_run_that_sums_otherwise_and_is_killed_spoils_nothing_of_another(tmp_path):
    first, second = (StatisticsFolder(tmp_path, "model").kind({"statistic": "sum"}) for _ in range(2))
    first.keep("block", ["layer"], [torch.ones(2)], {})
    first.finish("block", {})
    second.keep("block", ["layer"], [torch.zeros(2)], {})
    found = StatisticsFolder(tmp_path, "model").kind({"statistic": "sum"})
    (value,), _ = found.read(found.entry("block", "layer"), torch.device("cpu"))
    assert torch.equal(value, torch.ones(2))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folders_are_refused_before_any_work(kept, damage, tmp_path):
    act, says = DAMAGES[damage]
    folder = shutil.copytree(kept / "kept", tmp_path / "kept")
    act(folder)
    made = kept_by(kept, folder, tmp_path / "out")
    assert made.code == 2, made.err
    assert says in last_line(made)
    assert not list(tmp_path.glob("out*"))


def test_a_sweep_refuses_a_damaged_folder_before_any_recipe(desk, kept, tmp_path):
    folder = shutil.copytree(kept / "kept", tmp_path / "damaged")
    flip(folder)
    made = swept(desk, "w2", "w3", more=["--original-inputs", "--keep-statistics", folder])
    assert made.code == 2, made.err
    assert "is damaged" in made.err
    assert not (desk / "out" / "w2").exists()
