"""Recipes: what is written is what is read, every option is checked, and what is wrong is said in one line."""

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, get_args

import pytest
import yaml
from combinations import every

from compress import GPTQ, RTN, SpQR, but, only
from compress.base.errors import InputError
from compress.passes.options.weight_format import GridName
from compress.passes.protocol.base import Pass
from compress.passes.protocol.recipe import (
    BUILT_IN,
    PASSES,
    about,
    describe,
    load_recipe,
    make_pass,
    options_of,
    parse_recipe,
    pass_class,
    regrouped,
)


@dataclass(frozen=True, kw_only=True)
class Foreign(RTN):
    """A third party's pass."""

    name: ClassVar[str] = "foreign"

    strength: float = 0.5


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name under which a recipe imports `Foreign`."""
    monkeypatch.setitem(sys.modules, Foreign.__module__, sys.modules[__name__])
    return f"{Foreign.__module__}:Foreign"


def round_trip(*passes: Pass) -> tuple[Pass, ...]:
    """Through the text of a YAML file."""
    return parse_recipe(yaml.safe_load(yaml.safe_dump(describe(passes))), "recipe")


@pytest.mark.parametrize(
    "passes",
    [
        (RTN(),),
        (GPTQ(),),
        (
            GPTQ(
                scheme="w3a16",
                group_size=-1,
                grid="asymmetric",
                clip=False,
                damp=1e-5,
                drift=0.25,
                act_order="group",
                refit=0,
                sweeps=7,
                statistics="float64",
            ),
        ),
        (RTN(per_tensor=True, group_size=-1, grid="narrow"), GPTQ(clip=True)),
        (only(GPTQ(), "*.mlp.*", "*.q_proj"), but(RTN(scheme="w8a16"), "*.mlp.*")),
        (but(only(RTN(), "model.*"), "*.down_proj"),),
        (only(but(RTN(), "*.down_proj"), "model.*"),),
    ],
    ids=lambda passes: " + ".join(type(p).__name__ for p in passes),
)
def test_a_described_recipe_reads_back_as_the_same_treatment_of_every_layer(passes: tuple[Pass, ...]) -> None:
    read = round_trip(*passes)
    assert describe(read) == describe(passes)
    names = [f"model.layers.0.{n}" for n in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj")] + ["head.down_proj"]
    for before, after in zip(passes, read, strict=True):
        assert [after.wants(n) for n in names] == [before.wants(n) for n in names]
        assert set(after.where) == set(before.where)
        assert replace(after, where=()) == replace(before, where=())


def test_single_filters_and_plain_passes_read_back_equal() -> None:
    passes = (RTN(group_size=32), only(GPTQ(damp=0.05), "*.mlp.*"), but(RTN(), "a", "b"))
    assert round_trip(*passes) == passes


def test_a_third_partys_pass_reads_back_equal(foreign: str) -> None:
    passes = (Foreign(strength=0.75, group_size=64), only(Foreign(), "*.mlp.*"))
    described = describe(passes)
    assert list(described["passes"][0]) == [foreign]
    assert round_trip(*passes) == passes


def test_two_filters_of_one_kind_are_refused_rather_than_lost() -> None:
    with pytest.raises(InputError, match="cannot hold two `only` filters"):
        describe([only(only(RTN(), "a"), "b")])


def test_filters_stand_beside_the_options_the_last_one_first() -> None:
    """These keys are in the identity by which a stopped run is resumed."""
    (step,) = describe([but(only(RTN(), "model.*", "head"), "*.down_proj")])["passes"]
    assert list(step) == ["rtn", "but", "only"]
    assert step["rtn"] == describe([RTN()])["passes"][0]["rtn"]
    assert (step["only"], step["but"]) == (["model.*", "head"], ["*.down_proj"])
    assert not {"where", "kind", "patterns"} & set(step["rtn"])


def test_a_description_spells_out_every_option() -> None:
    for name in PASSES:
        kind = pass_class(name)
        (step,) = describe([kind()])["passes"]
        assert set(step) == {name}
        assert set(step[name]) == set(options_of(kind))


OPTIONS = [
    (name, key, f.default)
    for name in PASSES
    for key, f in options_of(pass_class(name)).items()
    if not isinstance(f.default, tuple)  # a list is the pass's own to read, and no word
]
WRONG = {
    int: ["many", "1.5", 1.5, True, None, [1]],
    float: ["much", "nan", "inf", True, None, [1.0]],
    bool: ["maybe", 1, None],
    str: [4, True, None, ["w4a16"]],
    type(None): ["many", "nan", True, [1]],  # a number, or none
}


@every(("name", "option", "default"), OPTIONS)
def test_every_option_refuses_values_of_another_type(name: str, option: str, default: object) -> None:
    like = "or none" if default is None else f"like {default!r}"
    for value in WRONG[type(default)]:
        with pytest.raises(InputError, match=f"option {option} of {name} is .*; it must be .*, {like}"):
            make_pass(name, {option: value})


@every(("name", "option", "default"), OPTIONS)
def test_every_option_is_read_from_a_word_as_from_yaml(name: str, option: str, default: object) -> None:
    word = "none" if default is None else str(default)
    assert make_pass(name, {option: word}) == make_pass(name, {option: default}) == pass_class(name)()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("scheme", "w16a16"),
        ("grid", "asym"),
        ("group_size", -2),
        ("damp", -1.0),
        ("drift", 1.1),
        ("drift", -0.1),
        ("act_order", "static "),
        ("statistics", "float16"),
        ("refit", -1),
        ("sweeps", -1),
    ],
)
def test_values_out_of_range_are_refused_with_what_is_allowed(option: str, value: object) -> None:
    with pytest.raises(InputError, match="allowed: "):
        make_pass("gptq", {option: value})


def test_every_grid_is_allowed_and_means_something_else() -> None:
    assert len({make_pass("rtn", {"grid": name}).weight_grid() for name in get_args(GridName)}) == 4


@every(("word", "value"), [("1e-3", 1e-3), ("0.05", 0.05), ("1", 1.0), ("5E-1", 0.5), (1, 1.0), (0.5, 0.5)])
def test_numbers_are_read_as_people_write_them(word: object, value: float) -> None:
    damp = make_pass("gptq", {"damp": word}).damp
    assert (damp, type(damp)) == (value, float)


@every(("word", "value"), [("true", True), ("False", False), ("yes", True), ("off", False), (True, True)])
def test_truth_values_are_read_as_people_write_them(word: object, value: bool) -> None:
    assert make_pass("gptq", {"clip": word}).clip is value


@pytest.mark.parametrize("text", ["passes:\n- gptq: {damp: 1e-3}", "passes:\n- gptq: {damp: 0.001}"])
def test_scientific_numbers_in_yaml_are_numbers(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert load_recipe(path) == (GPTQ(damp=0.001),)


def test_a_pass_without_options_has_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("passes:\n- rtn:\n- gptq: {}\n")
    assert load_recipe(path) == (RTN(), GPTQ())


def test_a_recipe_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"passes: [rtn: {}] # caf\xe9")
    with pytest.raises(InputError, match="cannot be read"):
        load_recipe(path)


@every("key", ["only", "but"])
@every("patterns", ["*.mlp.*", [], [1], None, {"a": 1}])
def test_filters_are_lists_of_patterns(key: str, patterns: object) -> None:
    with pytest.raises(InputError, match=f"step 1: `{key}` must be a list of layer patterns"):
        parse_recipe({"passes": [{"rtn": {}, key: patterns}]}, "recipe")


def test_errors_name_the_step() -> None:
    with pytest.raises(InputError, match="recipe, step 2 must name one pass; it has gptq, rtn"):
        parse_recipe({"passes": [{"rtn": {}}, {"gptq": {}, "rtn": {}}]}, "recipe")
    with pytest.raises(InputError, match="recipe, step 2: unknown option of rtn 'schema'; did you mean 'scheme'"):
        parse_recipe({"passes": [{"rtn": {}}, {"rtn": {"schema": 1}}]}, "recipe")


def test_a_misspelt_pass_is_corrected() -> None:
    with pytest.raises(InputError, match="unknown method 'gtpq'; did you mean 'gptq'"):
        make_pass("gtpq", {})


def test_a_third_partys_module_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_written_pass.py").write_text("class Mine(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"'half_written_pass:Mine' cannot be imported \(SyntaxError"):
        make_pass("half_written_pass:Mine", {})
    with pytest.raises(InputError, match=r"cannot be imported \(AttributeError"):
        make_pass("compress:NoSuchPass", {})


@pytest.mark.parametrize(
    "path", ["compress.passes.protocol.base:Pass", "compress.passes.options.quantize:QuantizeWeights"]
)
def test_classes_that_cannot_run_are_refused(path: str) -> None:
    with pytest.raises(InputError, match="is no pass that runs by itself"):
        make_pass(path, {})


# --- the recipes that come with the package ------------------------------------------------------------------------


def test_every_built_in_recipe_can_be_read_and_says_what_it_is_for_and_how_it_is_run() -> None:
    assert {"w4a16-gptq", "w8a16-rtn", "fp8-kv"} <= set(BUILT_IN)
    for name, path in BUILT_IN.items():
        assert load_recipe(name) == load_recipe(path)
        text = path.read_text(encoding="utf-8")
        assert f"--recipe {name} " in text
        assert ("--calibration" in text) == any(p.calibrated for p in load_recipe(name))
        assert 20 < len(about(text)) < 120


@pytest.mark.parametrize("inputs", [27, 60, 100, 240, 576])
def test_a_built_in_recipe_fits_a_model_of_any_width(inputs: int) -> None:
    folder = Path(__file__).parents[2] / "recipes" / "sweeps"
    for recipe in (*BUILT_IN, *sorted(folder.glob("*.yaml"))):
        for p in load_recipe(recipe):
            if p.treats == "layers" and getattr(p, "pattern", "") != "2:4":  # 27 inputs are no whole fours
                p.fitted({inputs, 4 * inputs}).check({"up": (4 * inputs, inputs), "down": (inputs, 4 * inputs)})


def test_a_usual_size_is_one_with_a_kernel_and_for_a_size_that_is_left_open() -> None:
    for wrong, says in (
        ({"group_up_to": 48}, "group_up_to 48; allowed: 128, 64, 32"),
        ({"group_up_to": 64, "group_size": 64}, "here it is 64; leave one of them out"),
        ({"group_up_to": 64, "scheme": "w8a8"}, "here it is -1"),
    ):
        with pytest.raises(InputError, match=says):
            make_pass("rtn", wrong)


def test_what_a_recipe_is_for_is_the_first_sentence_of_its_first_comment() -> None:
    assert about("# Groups of 3.5, so\n# to say. More.\n#   a command\npasses: []  # not this\n") == (
        "Groups of 3.5, so to say"
    )
    assert about("passes: []\n# late") == ""


def test_the_recipe_that_the_guide_shows_is_the_built_in_one() -> None:
    guide = (Path(__file__).parents[2] / "compress/passes/README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    assert parse_recipe(yaml.safe_load(shown), "README") == load_recipe("w4a16-mixed")


def test_a_file_comes_before_a_built_in_recipe_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = load_recipe("w8a16-rtn")
    (tmp_path / "w8a16-rtn").write_text("passes: [rtn: {scheme: w2a16}]")
    assert load_recipe("w8a16-rtn") == (RTN(scheme="w2a16"),) != before
    with pytest.raises(InputError, match="unknown recipe 'w8a16rtn'; did you mean 'w8a16-rtn'"):
        load_recipe("w8a16rtn")


def test_another_group_size_is_for_the_passes_that_have_groups() -> None:
    channel, whole = RTN(group_size=-1), RTN(scheme="w8a8")
    passes = (but(only(GPTQ(group_size=64), "a*"), "ab"), channel, RTN(), whole, pass_class("kv-cache")())
    found, changed = regrouped((*passes, SpQR(), RTN(group_up_to=64)), 32)
    assert changed == ["gptq", "rtn", "spqr", "rtn"]
    assert found[:5] == (but(only(GPTQ(group_size=32), "a*"), "ab"), channel, RTN(group_size=32), *passes[3:])
    assert found[5:] == (SpQR(group_size=32), RTN(group_size=32))
    assert regrouped((channel, whole), 32) == ((channel, whole), [])
    with pytest.raises(InputError, match="group_size -1; allowed: 0 or more"):
        regrouped((SpQR(),), -1)
