"""`fit`: its choices against all others, its corrections, its clock, its words, and whole runs on small models."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import command, make_llama, save
from models import strong, tokens

import compress
from compress.base.errors import InputError
from compress.base.progress import Silent
from compress.checkpoint.sensitivity import Sensitivity, Tried, Unit
from compress.evaluation.document import Figure
from compress.jobs.request import Request
from compress.passes.protocol.recipe import load_recipe
from compress.search.budget import Budget
from compress.search.candidate import Candidate
from compress.search.fitting import duration, measure
from compress.search.fitting.choose import TableOption, as_run, below_kl, predicted_front, with_sizes, within_budget
from compress.search.fitting.duration import Deadline, FitCost, OutOfTimeError, Watched, within_time
from compress.search.fitting.paired_kl import kl_of_windows, paired_difference
from compress.search.fitting.prove import FitProof, RunPoint, markdown_of, paragraph_of
from compress.search.fitting.recipe_space import RecipeSpace, Wishes, recipe_space
from compress.search.fitting.request import FitRequest, fit_target
from compress.search.fitting.runs import RecipeRun, Remarks, recover_loss
from compress.search.sensitivity import open_study

WEIGHTS = 1000
SCORES = [(0.4, 0.1, 0.02), (0.05, 0.01, 0.001), (0.2, 0.04, 0.03)]
TABLES = [
    TableOption("as it is", (), 0, 0.0),
    TableOption("w8a16", (compress.Embeddings(scheme="w8a16"),), 700, 0.004),
    TableOption("w4a16", (compress.Embeddings(scheme="w4a16"),), 1050, 0.09),
]


def table() -> Sensitivity:
    """Units whose candidates w2, w3, w4 have these Fisher-weighted losses, which predict the KL as they are."""
    units = []
    for i, of_unit in enumerate(SCORES):
        tried = {f"w{bits}": Tried(1.0, WEIGHTS * bits // 8, 10, score) for bits, score in enumerate(of_unit, 2)}
        units.append(Unit(f"blocks.{i}.q", f"blocks.{i}", "q", [f"blocks.{i}.q"], WEIGHTS, tried))
    candidates = {f"w{bits}": [{"gptq": {"scheme": f"w{bits}a16", "refit": 0}}] for bits in (2, 3, 4)}
    uniform = {f"w{bits}": math.fsum(s[i] for s in SCORES) for i, bits in enumerate((2, 3, 4))}
    return Sensitivity({}, {}, None, candidates, units, uniform, other_bytes=1500)


def everything() -> list[tuple[int, float]]:
    """(Bytes, KL) of all recipes, in loops that share nothing with the choice."""
    found = []
    for option in TABLES:
        for taken in itertools.product(range(3), repeat=3):
            size = 1500 - option.saved + sum(WEIGHTS * (i + 2) // 8 + 10 for i in taken)
            found.append((size, option.kl + math.fsum(s[i] for s, i in zip(SCORES, taken, strict=True))))
    return found


def test_nothing_of_that_size_has_a_lower_kl_and_nothing_of_that_kl_fewer_bytes():
    for size in (1240, 1500, 1800, 2200, 2900):
        made = within_budget(table(), TABLES, Budget(bytes=size))
        assert made.bytes <= size
        assert made.predicted_kl == pytest.approx(min(kl for b, kl in everything() if b <= size))
    for most in (0.06, 0.1, 0.2, 0.5):
        made = below_kl(table(), TABLES, most)
        assert made.predicted_kl <= most * (1 + 1e-9)
        assert made.bytes == min(b for b, kl in everything() if kl <= most)
    assert within_budget(table(), TABLES, Budget(bytes=1000)) is None
    assert below_kl(table(), TABLES, 0.01) is None


def test_bits_are_of_layers_so_that_the_embedding_stays():
    made = within_budget(table(), TABLES, Budget(bits_per_weight=3))
    assert made.table is TABLES[0]
    assert made.allocation.bits_per_weight <= 3
    smaller = within_budget(table(), TABLES, Budget(bytes=1700))
    assert smaller.table is not TABLES[0]
    assert smaller.passes[-1] is smaller.table.passes[0]


def test_the_front_goes_down_and_begins_with_the_smallest_recipe():
    front = predicted_front(table(), TABLES)
    assert front[0].bytes == min(b for b, _ in everything())
    kls = [each.predicted_kl for each in front]
    assert kls == sorted(kls, reverse=True)
    assert len(kls) > 4


def test_recipes_are_run_with_other_options_than_layers_are_measured_with():
    fast = {"w3": [{"gptq": {"scheme": "w3a16", "refit": 0}}], "t": [{"trellis": {"scheme": "w2a16", "sweeps": 0}}]}
    p, q = compress.Trellis(), compress.GPTQ(objective="loss")
    found = as_run(
        fast,
        [Candidate("w3", (q,)), Candidate("t", (p,))],
        {"gptq": ("refit", "objective"), "trellis": ("sweeps", "state_bits")},
    )
    assert found["w3"][0]["gptq"] == {"scheme": "w3a16", "refit": q.refit, "objective": "loss"}
    assert found["t"][0]["trellis"] == {"scheme": "w2a16", "sweeps": p.sweeps, "state_bits": p.state_bits}


def test_sizes_are_of_recipes_as_they_are_run():
    found = table()
    made = with_sizes(found, "w3", {layer: 400 for unit in found.units for layer in unit.layers})
    assert [[tried.bytes for tried in unit.tried.values()] for unit in made.units] == [[250, 400, 500]] * 3
    assert replace(made.units[0].tried["w3"], bytes=375) == found.units[0].tried["w3"]


def evaluation(kl: Figure, ratio: Figure, perplexity: float = math.e**2) -> compress.Evaluation:
    """The figures of an evaluation that a target reads."""
    model = strong()
    found = compress.evaluate(model, reference=model, text=tokens(2, 16))
    figures = {"kl_mean": kl, "log_perplexity_ratio": ratio, "reference_perplexity": Figure(perplexity)}
    return replace(found, texts=[replace(found.texts[0], figures=figures, windows=21)])


def test_a_loss_is_met_where_that_is_nearly_certain():
    found = evaluation(Figure(0.04, 0.008), Figure(0.02, 0.001))
    student = 1.7247  # 95 %, one-sided, 20 degrees of freedom
    assert fit_target(kl=0.0538).is_met(found)
    assert not fit_target(kl=0.0537).is_met(found)
    assert fit_target(kl=0.05).measured(found) == pytest.approx((0.04, student * 0.008), rel=1e-4)
    assert fit_target(task_loss="1%").measured(found) == pytest.approx((0.01, student * 0.0005), rel=1e-4)  # of 2
    assert [fit_target(task_loss=share).is_met(found) for share in (0.0109, 0.0108)] == [True, False]


def test_the_clock_ends_work_between_steps_and_lets_nothing_begin_that_takes_too_long(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    watch = Deadline(0.01)  # 36 s
    watched = Watched(Silent(), watch)
    assert watch.allows(30)
    assert not watch.allows(35)  # which may take a tenth more
    watched.step(1, 2, "a block")
    watched.note("a remark")
    now[0] = 36.5
    with pytest.raises(OutOfTimeError, match="time is up"):
        watched.step(2, 2, "a block")
    assert (watch.is_over, Deadline(None).is_over) == (True, False)
    with pytest.raises(InputError, match=r"hours 0\.01; .* take about 0\.028 here"):
        watch.check(100)


def test_a_difference_is_paired_by_windows():
    generator = torch.Generator().manual_seed(0)
    common = torch.rand(40, generator=generator, dtype=torch.float64) * 10
    first, second = common + 0.1 + 0.01 * torch.rand(40, generator=generator, dtype=torch.float64), common
    figure = paired_difference(first.tolist(), second.tolist())
    assert figure.value == pytest.approx(0.105, abs=0.003)
    assert figure.error < 0.001  # not that of windows which differ by 10
    rows, model = tokens(3, 16), strong()
    other = compress.quantize(strong(), compress.RTN(scheme="w3a16", group_size=16)).model
    found = kl_of_windows(model, other, rows)
    whole = compress.evaluate(other, reference=model, text=rows).kl_mean
    assert sum(found) / 3 == pytest.approx(whole, rel=1e-3)


def proof(met: bool, difference: Figure | None) -> FitProof:
    figures = {"kl_mean": Figure(0.05, 0.01), "perplexity_ratio": Figure(1.02, 0.005)}
    runs = [RunPoint("fit-1", 500, 3.4, figures), RunPoint("uniform-w3", 490, 3.1, figures)]
    of = ("model", "1,000 bytes", met, False, "a text", 12, 2000, [], runs, "fit-1")
    return FitProof(*of, None if difference is None else "uniform-w3", difference, 1.0)


def test_the_words_say_what_the_figures_do():
    words = paragraph_of(proof(True, Figure(-0.02, 0.001)))
    assert "25% of the original's 2,000" in words
    assert "is met" in words
    assert "closer to the original: the difference of KL is -0.02 (-0.02196 to -0.01804)" in words
    assert "farther from" in paragraph_of(proof(True, Figure(0.02, 0.001)))
    assert "no different" in paragraph_of(proof(True, Figure(0.001, 0.001)))
    assert "MISSED" in paragraph_of(proof(False, None))
    assert "| uniform-w3 | 490 | 3.1 | 0.05 (0.0304 to 0.0696) |" in markdown_of(proof(True, None))


def test_names_on_the_page_mean_nothing_to_markdown_or_html():
    nasty = "<script>alert(1)</script> | [x](http://y)"
    found = replace(proof(True, None), model=nasty, held_out=nasty, notes=[nasty])
    page = markdown_of(replace(found, runs=[replace(each, name=nasty) for each in found.runs], chosen=nasty))
    assert "<script" not in page.replace("\\<", "")
    assert "[x](" not in page
    assert {line.replace("\\|", "").count("|") for line in page.splitlines() if line.startswith("|")} == {5, 6}


class FakeRuns:
    """`RecipeRuns` of which it is known which recipes meet the target, and the clock."""

    def __init__(self, meets: dict[str, bool], hours: float | None = None) -> None:
        self.met, self.remarks, self.watch, self.longest = meets, Remarks(Silent()), Deadline(hours), 1.0
        self.request = SimpleNamespace(
            model="", data=SimpleNamespace(rows=None), asked=SimpleNamespace(trust_remote_code=False)
        )
        self.done = {"fit-1": RecipeRun(within_budget(table(), TABLES, Budget(bytes=1700)), None, Path())}

    def run(self, choice, name):
        self.done[name] = RecipeRun(choice, None, Path())
        return name

    def meets(self, name):
        return self.met[name]


@pytest.mark.parametrize("change", [-0.01, 0.01])
@pytest.mark.parametrize("meets", [(True, True), (False, True), (True, False)])
def test_training_is_taken_where_it_is_closer_and_meets_no_less(monkeypatch, change, meets):
    monkeypatch.setattr("compress.search.fitting.runs.compare", lambda *_: Figure(change, 0.001))
    runs = FakeRuns(dict(zip(("fit-1", "fit-1-recovered"), meets, strict=True)))
    better = change < 0 and meets != (True, False)
    assert recover_loss(runs, "fit-1", 0.5) == ("fit-1-recovered" if better else "fit-1")
    assert ("it is taken" in runs.remarks.notes[-1]) == better
    first, train, table_pass = runs.done["fit-1-recovered"].choice.passes[-3:]
    assert (first.name, train.minutes, table_pass.name) == ("gptq", 0.5, "embeddings")
    late = FakeRuns({}, hours=0.001)
    assert recover_loss(late, "fit-1", 0.5) == "fit-1"
    assert late.remarks.notes == ["no time was left to recover what was lost"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path / "cache"))
    torch.save(tokens(40, 24), tmp_path / "text.pt")
    monkeypatch.chdir(tmp_path)
    return save(make_llama(), tmp_path / "model")


def test_a_size_is_met_and_the_recipe_makes_the_same_again(model, tmp_path):
    original = (model / "model.safetensors").stat().st_size
    words = ["fit", model, "--size", f"{original // 5}B", "--calibration", "text.pt", "--output", "OUT"]
    made = command(*words, "--json", "fit.json", "--hours", 1, "--no-trellis", "--no-rotate")
    assert made.code == 0, made.err
    assert "to measure layers" in made.err
    found = json.loads((tmp_path / "fit.json").read_text())
    size = sum(path.stat().st_size for path in (tmp_path / "OUT").glob("*.safetensors"))
    chosen = next(run for run in found["runs"] if run["name"] == found["chosen"])
    assert chosen["bytes"] == size <= original // 5
    (gate,) = found["gates"]
    assert (gate["value"], gate["limit"], gate["passed"]) == (size, original // 5, True)
    assert (found["summary"]["bytes"], found["met"]) == (size, True)
    assert found["windows"] == 8  # a fifth, that calibration is without
    assert found["difference"]["value"] is not None
    assert found["uniform"].startswith("uniform-w")
    assert {path.name for path in (tmp_path / "OUT.fit").iterdir()} >= {"fit.md", "recipe.yaml", "report.html"}
    assert not list((tmp_path / "OUT.fit").glob("*/model"))
    again = compress.quantize(
        str(model), load_recipe(tmp_path / "OUT.fit" / "recipe.yaml"), calibration=tokens(40, 24)[:-8], output="AGAIN"
    )
    one, other = (compress.load(path, dequantize=True).state_dict() for path in ("OUT", again.output))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.full
def test_a_loss_is_approached_from_the_first_measurement_and_a_miss_is_said(model):
    words = [
        "fit",
        model,
        "--calibration",
        "text.pt",
        "--output",
        "OUT",
        "--overwrite",
        "--json",
        "-",
        "--no-embeddings",
        "--no-trellis",
        "--no-rotate",
    ]
    made = command(*words, "--kl", "0.002")
    found = made.json()
    assert made.code == 0, made.err
    assert found["met"]
    fitted = [run for run in found["runs"] if run["name"].startswith("fit")]
    kl = next(run["figures"]["kl_mean"] for run in fitted if run["name"] == found["chosen"])
    assert kl["value"] + kl["error"] <= 0.002
    missed = command(*words, "--kl", "1e-9")
    assert missed.code == 1
    assert "the target, KL 1e-09, is missed" in missed.err
    assert not missed.json()["met"]
    assert [gate["passed"] for gate in missed.json()["gates"]] == [False]
    assert Path("OUT/compress.json").exists()


CODES, GRIDS = Candidate("w3-trellis", (compress.Trellis(),)), Candidate("w3", (compress.GPTQ(),))
WHOLE = RecipeSpace([CODES, GRIDS], (), (compress.Rotation(),))


class FakeStudy:
    """A study whose uniform models have this KL once it is edited, and 1 before."""

    def __init__(self, rotated: float, edited: bool = False) -> None:
        self.rotated, self.edits, self.model = rotated, edited, strong()

    def edited(self, first):
        return FakeStudy(self.rotated, edited=True)

    def measure(self, candidates):
        (probe,) = candidates
        notes = ["other", "rotate: 3 layers"] if self.edits else []
        return SimpleNamespace(uniform_kl={probe.name: self.rotated if self.edits else 1.0}, notes=notes)


@pytest.mark.parametrize(("rotated", "taken"), [(0.79, True), (0.81, False), (math.nan, False)])
def test_a_rotation_is_taken_where_it_lowers_the_kl_by_a_fifth(rotated, taken):
    made, notes = measure.with_or_without_rotation(FakeStudy(rotated), WHOLE)
    assert made.edits == taken
    told = f"w3-trellis has KL {rotated} with a rotation and 1 without"
    assert notes == (
        [f"the model is rotated: {told}", "rotate: 3 layers"] if taken else [f"the model is not rotated: {told}"]
    )


@pytest.mark.parametrize(
    ("hours", "left"), [(1.1, (True, True)), (0.9, (True, False)), (0.5, (False, True)), (0.2, (False, False))]
)
def test_what_takes_too_long_is_left_out_and_said(monkeypatch, hours, left):
    def cost(request, scored, full, tries):
        return FitCost(0.0, 600.0 + 2100 * (CODES in full) + 600 * (tries > 0))

    monkeypatch.setattr(duration, "cost_of_fit", cost)
    space, words = within_time(SimpleNamespace(), WHOLE, Deadline(hours), 2)
    assert words.startswith("about ")
    assert (CODES in space.schemes, space.rotation == WHOLE.rotation) == left
    said = ["trellis codes are left out", "the model is not rotated"]
    assert {note.partition(":")[0] for note in space.notes} == {
        words for words, kept in zip(said, left, strict=True) if not kept
    }


def request_of(model, ignore=()):
    """A request to fit a model to 3 bits."""
    asked = Request(model=str(model), calibration=tokens(40, 24), ignore=ignore)
    return FitRequest(asked, fit_target(bits=3.0), tokens(4, 24))


def test_what_is_offered_fits_the_model(model, tmp_path):
    other = save(make_llama(tie_word_embeddings=True, intermediate_size=80), tmp_path / "tied")
    for path, tied in ((model, False), (other, True)):
        made = recipe_space(request_of(path), Wishes())
        assert [p.hidden for p in made.rotation] == [not tied]
        assert any(c.name == "w2-trellis" for c in made.schemes)
    assert recipe_space(request_of(model), Wishes("vllm")).rotation == ()
    types = recipe_space(request_of(model), Wishes(method="k-quants"))
    assert [c.name for c in types.schemes] == ["q2_k", "q3_k", "iq4_xs", "q4_k", "q5_k", "q6_k"]
    assert (types.tables, types.rotation) == ((), ())


def test_a_layer_that_stays_dense_keeps_the_model_from_being_rotated(model, tmp_path):
    rotation = compress.Rotation(hidden=False, heads=False, online=True)
    asked = request_of(model)
    study = open_study(asked.found, asked.data.read, asked.data.rows)
    plain = study.measure([GRIDS])
    before = {name: p.data.clone() for name, p in study.model.named_parameters()}
    with measure.as_before(study.model):
        turned = study.edited((rotation,)).measure([GRIDS])
    assert plain.uniform_kl != turned.uniform_kl
    assert plain.model["fingerprint"] != turned.model["fingerprint"]
    assert plain.weights == turned.weights
    assert all(torch.equal(p, before[name]) for name, p in study.model.named_parameters())
    asked = request_of(model, ignore=("*down_proj*",))
    study = open_study(asked.found, asked.data.read, asked.data.rows, ignore=asked.asked.ignore)
    made, notes = measure.with_or_without_rotation(study, RecipeSpace([GRIDS], (), (rotation,)))
    assert made is study
    (note,) = notes
    assert note.startswith("the model is not rotated: rotate changes model.layers.0.mlp.down_proj, which is to be left")


@pytest.mark.full
def test_a_table_is_measured_without_a_change_of_the_model():
    """The KL of a model whose embedding alone is compressed."""
    rows, scheme = tokens(3, 16), compress.Embeddings(scheme="w4a16")
    model = strong()
    before = {name: p.data.clone() for name, p in model.named_parameters()}
    _, option = measure.table_options(model, rows, [(scheme, 100)], Silent())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    other = compress.quantize(strong(), scheme).model
    assert option.kl == pytest.approx(sum(kl_of_windows(model, other, rows)) / 3)
    assert option.kl > 0


@pytest.mark.slow
def test_rotation_and_trellis_codes_are_chosen_trained_and_made_again(tmp_path, model):
    outlying = make_llama()
    for block in outlying.model.layers:  # one channel is large, and what reads it has small weights
        for norm, readers in (
            (block.input_layernorm, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            (block.post_attention_layernorm, ("mlp.gate_proj", "mlp.up_proj")),
        ):
            norm.weight.data[0] *= 100
            for reader in readers:
                block.get_submodule(reader).weight.data[:, 0] /= 100
    words = ["fit", save(outlying, tmp_path / "outlying"), "--bits", 3.1, "--calibration", "text.pt", "--output", "OUT"]
    made = command(*words, "--json", "fit.json", "--recover", "20s")
    assert made.code == 0, made.err
    found = json.loads((tmp_path / "fit.json").read_text())
    kl = {run["name"]: run["figures"]["kl_mean"]["value"] for run in found["runs"]}
    assert "fit-1-recovered" in kl
    assert kl[found["chosen"]] == min(kl["fit-1"], kl["fit-1-recovered"])
    recipe = load_recipe(tmp_path / "OUT.fit" / "recipe.yaml")
    assert recipe[0].name == "rotate"
    assert any(p.name == "trellis" for p in recipe)
    assert any(p.name == "train" for p in recipe) == (found["chosen"] == "fit-1-recovered")
