"""From sensitivities and a budget to a recipe: the choice against all others, the prediction, and the words of both."""

import itertools
import json
import math

import pytest
import yaml
from commands import command, make_llama, save

import compress
from compress.base.errors import InputError
from compress.checkpoint.sensitivity import Sensitivity, Tried, Unit
from compress.model.patterns import patterns_of
from compress.passes.protocol.recipe import parse_recipe
from compress.search.budget import Budget, allocate, parse_budget, prediction

WEIGHTS = 1000


def table(scores: list[tuple[float, ...]], uniform: dict[str, float] | None = None, **more: object) -> Sensitivity:
    """Units whose candidates w2, w3, ... of so many bits have these Fisher-weighted losses."""
    units = []
    for i, of_unit in enumerate(scores):
        tried = {
            f"w{bits}": Tried(relative_loss=1e-3 / score, bytes=WEIGHTS * bits // 8, header_bytes=10, fisher=score)
            for bits, score in enumerate(of_unit, 2)
        }
        layers = [f"blocks.{i}.{name}" for name in ("q", "k")]
        units.append(Unit(f"blocks.{i}.q+k", f"blocks.{i}", "q+k", layers, WEIGHTS, tried))
    candidates = {
        f"w{bits}": [{"rtn": {"scheme": f"w{bits}a16", "group_size": 0}}] for bits in range(2, 2 + len(scores[0]))
    }
    return Sensitivity({}, {}, None, candidates, units, uniform or {}, other_bytes=500, **more)


SCORES = [(0.4, 0.1, 0.02), (0.05, 0.01, 0.001), (1.0, 0.3, 0.05), (0.2, 0.04, 0.03), (0.01, 0.009, 0.008)]


def test_nothing_within_the_budget_has_a_lower_score():
    found = table(SCORES)
    for bits in (2, 2.5, 3, 3.4, 4):
        made = allocate(found, Budget(bits_per_weight=bits))
        best = min(
            math.fsum(kl for kl, _ in combination)
            for combination in itertools.product(*[list(zip(s, (250, 375, 500), strict=True)) for s in SCORES])
            if sum(size for _, size in combination) <= bits * WEIGHTS * len(SCORES) / 8
        )
        score = math.fsum(u.tried[made.chosen[u.name]].fisher for u in found.units)
        assert score == pytest.approx(best)
        assert made.bits_per_weight <= bits


def test_a_budget_in_bytes_counts_the_whole_file():
    found = table(SCORES)
    made = allocate(found, Budget(bytes=500 + 5 * 10 + 5 * 375))
    assert made.bytes == 5 * 375
    assert made.total_bytes == 500 + 5 * 10 + 5 * 375
    assert allocate(found, Budget(bytes=500 + 5 * 10 + 5 * 375 - 1)).bytes < 5 * 375


def test_prediction_goes_through_uniform_models_and_never_falls():
    sums = [math.fsum(s[i] for s in SCORES) for i in range(3)]
    uniform = {"w2": 2.5, "w3": 0.5, "w4": 0.1}
    predict = prediction(table(SCORES, uniform))
    assert [predict(total) for total in sums] == pytest.approx(list(uniform.values()))
    assert predict(sums[2] / 2) == pytest.approx(0.05)
    points = [predict(10 ** (x / 20)) for x in range(-60, 20)]
    assert points == sorted(points)
    assert prediction(table(SCORES))(0.3) == 0.3


def test_the_fewest_bytes_whose_predicted_kl_is_low_enough():
    uniform = {"w2": 2.0, "w3": 0.5, "w4": 0.1}
    found = table(SCORES, uniform)
    predict = prediction(found)
    for most in (0.11, 0.3, 1.0, 5.0):
        made = allocate(found, max_kl=most)
        fewest = min(
            sum(size for _, size in combination)
            for combination in itertools.product(*[list(zip(s, (250, 375, 500), strict=True)) for s in SCORES])
            if predict(math.fsum(kl for kl, _ in combination)) <= most
        )
        assert made.bytes == fewest
        assert made.predicted_kl <= most


def test_a_recipe_names_each_layer_once_and_only_options_that_are_not_usual():
    found = table(SCORES)
    made = allocate(found, Budget(bits_per_weight=2.6))
    read = parse_recipe(yaml.safe_load(yaml.safe_dump(made.recipe)), "it")
    for unit in found.units:
        for layer in unit.layers:
            (scheme,) = [p.scheme for p in read if p.wants(layer)]
            assert scheme == f"{made.chosen[unit.name]}a16"
    assert all(step["rtn"].keys() == {"scheme"} for step in made.recipe["passes"])


def test_patterns_stand_for_all_layers_of_a_kind():
    everything = [f"model.layers.{i}.{kind}" for i in range(12) for kind in ("q", "gate", "gate2")]
    q = [name for name in everything if name.endswith("q")]
    assert patterns_of(q, everything) == ["model.layers.*.q"]
    assert patterns_of(q[:3], everything) == q[:3]
    assert patterns_of([*q, "model.layers.3.gate"], everything) == ["model.layers.*.q", "model.layers.3.gate"]
    assert patterns_of(["odd[1].x"], ["odd[1].x", "odd1.x"]) == ["odd[[]1].x"]


@pytest.mark.parametrize(
    ("words", "budget"),
    [
        ("3.5bpw", Budget(bits_per_weight=3.5)),
        ("2.1GB", Budget(bytes=2_100_000_000)),
        ("1 GiB", Budget(bytes=2**30)),
        ("800kb", Budget(bytes=800_000)),
        ("5714544", Budget(bytes=5_714_544)),
    ],
)
def test_words_of_a_budget(words, budget):
    assert parse_budget(words) == budget


@pytest.mark.parametrize("words", ["3.5", "bpw", "0bpw", "-1GB", "2 TB", "1e3B", "nan bpw"])
def test_words_that_are_no_budget(words):
    with pytest.raises(InputError, match=r"allowed: 3.5bpw .* 2.1GB"):
        parse_budget(words)


def test_what_cannot_be_reached_says_what_can():
    found = table(SCORES, {"w2": 2.0, "w3": 0.5, "w4": 0.1})
    with pytest.raises(InputError, match="the smallest candidates take 2bpw"):
        allocate(found, Budget(bits_per_weight=1.9))
    with pytest.raises(InputError, match=f"the smallest candidates take {500 + 5 * 260}B"):
        allocate(found, Budget(bytes=1000))
    with pytest.raises(InputError, match=r"best candidates are predicted to have 0\.1"):
        allocate(found, max_kl=0.01)
    with pytest.raises(InputError, match="one of them"):
        allocate(found, Budget(bytes=1), max_kl=0.1)


def test_a_command_finds_a_recipe_and_another_runs_it(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path / "cache"))
    model = save(make_llama(), tmp_path / "model")
    recipe, data = tmp_path / "mixed.yaml", ["--calibration", "demo", "--samples", "24"]
    words = ["--size", "4bpw", "--recipe-only", "--no-trellis", "--no-rotate", "--text", "demo", "--output", recipe]
    found = command("fit", model, *words, *data, "--json", tmp_path / "found.json")
    assert found.code == 0, found.err
    assert "predicted KL" in found.out
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "found.json", "mixed.yaml", "model"}
    told = json.loads((tmp_path / "found.json").read_text())
    assert told["bits_per_weight"] <= 4
    made = command("quantize", model, "--recipe", recipe, *data, "--output", tmp_path / "out")
    assert made.code == 0, made.err
    assert compress.evaluate(tmp_path / "out").bits_per_weight == pytest.approx(told["bits_per_weight"], rel=1e-9)
    how = {"samples": 2, "text": "demo"}
    known, unread = (
        compress.evaluate(tmp_path / "out", reference=model, cache=cache, **how) for cache in (True, False)
    )
    assert {unit.name for unit in known.sensitivity.units} == {*told["chosen"]}
    assert all(unit.fisher["w2"] > unit.fisher["w8"] > 0 for unit in known.sensitivity.units)
    assert "sensitivity" not in known.missing
    assert (unread.sensitivity, unread.missing["sensitivity"]) == (
        None,
        "nothing was read that is kept of the original",
    )
    other = compress.evaluate(tmp_path / "out", reference=tmp_path / "out", **how)
    assert (other.sensitivity, "compress fit" in other.missing["sensitivity"]) == (None, True)
    words[1] = "2.5GB"
    again = command("fit", model, *words, *data, "--overwrite")
    assert "sensitivities as measured before" in again.err
    kl = command("fit", model, "--kl", 1e-9, *words[2:], *data, "--overwrite")
    assert (kl.code, "no recipe is predicted to be within it (the best has KL" in kl.err) == (2, True)
