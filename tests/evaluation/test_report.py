"""`compress report`: what it says, and what it makes of runs that are broken, partial or hostile."""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path

import commands
import evaluations
import numpy as np
import pytest
import yaml
from commands import Outcome
from evaluations import hostile, runs

from compress.checkpoint.write.directory import stranger_in
from compress.evaluation.document import Evaluation, Figure, Histogram, Named, TextResult
from compress.evaluation.json_document import as_document
from compress.evaluation.quality.exact_intervals import difference_of
from compress.evaluation.quality.kl_and_perplexity import figures_of, of_few_windows
from compress.evaluation.report import wording
from compress.evaluation.report.compose import compose
from compress.evaluation.report.content import ReportTable
from compress.evaluation.report.difference import differences
from compress.evaluation.report.markdown import as_markdown, plain
from compress.evaluation.report.page import as_html
from compress.evaluation.report.pareto import Point, front
from compress.evaluation.report.runs import ReportedRun, open_runs
from compress.evaluation.report.verdict import tiles, verdict

VOID = {"meta", "link", "img", "br", "wbr", "hr", "input"}


class Page(HTMLParser):
    """What a page holds: tags, texts, attributes; every tag that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, key, value) for key, value in attrs]
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if {"td", "th"} & {*self._open}:
            self.rows[-1][-1] += data


NONE, RTN = wording.NONE, "rtn w4a16 g64"


def page(*found: Evaluation) -> Page:
    return Page(as_html(compose(runs(*found))))


def command(*given: object) -> Outcome:
    return commands.command("report", *given)


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    def write(found: Evaluation, name: str = "a.json") -> Path:
        path = tmp_path / name
        path.write_text(json.dumps(asdict(found)), encoding="utf-8")
        return path

    return write


# --- what it says --------------------------------------------------------------------------------------------------


def test_a_page_of_one_run_shows_everything_that_was_measured() -> None:
    found = page(evaluations.whole())
    headings = "Quality Tasks Size Speed Layers Sensitivity Answers Verification"
    assert all(
        word in found.text for word in [*headings.split(), "Left alone", "Not measured", "Where this comes from"]
    )
    assert ["KL, mean (nats per token)", "0.0450 ± 0.0022", "0.0406 to 0.0494", "0.000400 ± 0.000020"] in found.rows
    assert found.tags.count("svg") == 2 + 1 + 2  # two texts with a picture each, bytes, layers, sensitivities
    assert found.tags.count("rect") > 210  # a place of the map for every layer
    assert ["model.layers.29.mlp.down_proj", "w4a16", "2.22 %", "6.89 %"] in found.rows
    assert ["peak memory to load", "not measured", "512.00 MiB"] in found.rows
    assert "lambada -2.60 ± 0.60 points; the other within noise" in found.text
    assert found.tags.count("mark") == 4


def test_facts_are_words_and_what_is_not_there_is_not_shown() -> None:
    known = {"modified": False, "commit": None, "versions": {"torch": "2.11", "gemlite": None}}
    found = page(replace(evaluations.whole(), provenance=known, missing={"speed": "ask with `--speed`"}))
    assert ["changed since that commit", "no"] in found.rows
    assert ["versions", "torch 2.11"] in found.rows
    assert not any(row[0] == "commit" for row in found.rows)
    assert ["speed", "ask with --speed"] in found.rows
    assert "code" in found.tags


def test_a_page_needs_nothing_but_itself() -> None:
    found = page(*evaluations.sweep())
    assert not {"script", "img", "iframe", "object", "base", "form"} & {*found.tags}
    links = [value for _, key, value in found.attributes if key in ("src", "href", "action", "data", "srcset")]
    assert links == ["data:,"]
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org)", as_html(compose(runs(*evaluations.sweep()))))
    policy = next(value for _, key, value in found.attributes if key == "content" and value and "default-src" in value)
    assert policy.startswith("default-src 'none'")


def test_several_runs_are_held_against_each_other_and_their_original() -> None:
    found = page(*evaluations.sweep())
    begin = next(i for i, row in enumerate(found.rows) if row[0] == "run")
    by_name = {row[0]: row for row in found.rows[begin : begin + 9]}
    original = "HuggingFaceTB/SmolLM2-135M (original)"
    named = ["gptq-w3", "mixed-3.5", "smollm2-w4", "rtn-w4", "awq-w4", "w8a8", "rtn-w8", original]
    assert list(by_name)[1:] == named
    at = found.rows[begin].index("front")
    marks = dict.fromkeys(("gptq-w3", "mixed-3.5", "w8a8", "rtn-w8"), "yes") | {"smollm2-w4": "pick"}
    assert {name: row[at] for name, row in by_name.items() if row[at]} == {"run": "front", **marks}
    assert by_name["rtn-w4"][2:] == ["57.9 %", "0.350 ± 0.017", "27.69", "+29.43 ± 0.53 %", "31.2", "4.25", "", RTN]
    assert by_name[original][1:] == ["256.57 MiB", NONE, NONE, "21.39", NONE, "19.8", "16.00", "", ""]
    assert "original: HuggingFaceTB/SmolLM2-135M; text: wiki.txt (10,200 tokens); evaluated 2026-11-22" in found.text
    dull = [value for tag, key, value in found.attributes if (tag, key) == ("circle", "class")]
    assert sorted(dull) == ["main"] * 5 + ["other"] * 2


def test_the_pick_is_the_smallest_that_is_surely_close_or_else_the_closest() -> None:
    one, rtn, awq, small = evaluations.sweep()[:4]
    said = "Pick: smollm2-w4 (smallest with a KL below 0.05): 107.93 MiB, 57.9 % less than the original, KL 0.0450 ± 0."
    assert compose(runs(one, rtn, awq, small)).verdict.startswith(said)
    text = one.texts[0]
    unsure = replace(text, figures={**text.figures, "kl_mean": Figure(0.045, 0.003)})  # its interval ends at 0.0509
    far = compose(runs(replace(one, texts=[unsure]), rtn))
    assert far.verdict.startswith("Pick: smollm2-w4 (closest to the original, none has a KL surely below 0.05): 107.93")
    alone = [replace(each, reference=None, texts=[_without_reference(each)]) for each in (rtn, awq)]
    assert compose(runs(*alone)).verdict.startswith("Pick: awq-w4 (lowest perplexity): 107.93 MiB")


def _without_reference(found: Evaluation) -> TextResult:
    text = found.texts[0]
    return replace(text, figures={"perplexity": text.figures["perplexity"]})


def test_the_front_is_what_nothing_beats() -> None:
    figures = [(3, 1.0), (2, 2.0), (2, 2.0), (1, 5.0), (3, 1.5), (4, 1.0)]
    points = [Point("", "", size, Figure(value)) for size, value in figures]
    assert front(points) == {0, 1, 2, 3}


def test_runs_on_other_texts_are_not_compared() -> None:
    first, second, third = evaluations.sweep()[:3]
    other = replace(third, texts=[replace(third.texts[0], sha256="b" * 64)])
    found = page(first, second, other)
    assert "awq-w4: measured on other tokens" in found.text
    assert found.tags.count("circle") == 2
    alone = page(first, replace(second, texts=[], size=None))
    assert "rtn-w4: size was not measured" in alone.text


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (0.0004, 0.0041, "Perplexity is the original's within noise: 21.40 against 21.39, +0.04 ± 0.41 %."),
        (0.0377, 0.0041, "Perplexity is 3.84 ± 0.43 % higher: 22.21 against 21.39."),
        (-0.02, 0.002, "Perplexity is 1.98 ± 0.20 % lower: 20.97 against 21.39."),
    ],
)
def test_the_verdict_says_what_it_cost_and_what_is_noise(change: float, error: float, said: str) -> None:
    text = evaluations.text_result(change=change)
    figures = {**text.figures, "log_perplexity_ratio": Figure(change, error)}
    found = replace(evaluations.whole(), texts=[replace(text, figures=figures)])
    assert said in verdict(found)
    assert "2.38 times smaller: 107.93 MiB instead of 256.57 MiB" in verdict(found)


@pytest.mark.parametrize(
    ("windows", "error", "said", "tile"),
    [
        (
            *(1, None),
            "Too little text to tell what it cost: perplexity 22.21 against 21.39 on 255 tokens (one window).",
            "one window: too little text to tell",
        ),
        (
            *(2, 0.0041),  # of two windows 12.7 standard errors make 95 %
            "within noise: 22.21 against 21.39, +3.84 ± 0.43 % on 255 tokens (2 windows).",
            "+3.84 ± 0.43 %, within noise on 255 tokens (2 windows)",
        ),
        (
            *(20, 0.0041),
            "Perplexity is 3.84 ± 0.43 % higher: 22.21 against 21.39 on 255 tokens (20 windows).",
            "+3.84 ± 0.43 % on 255 tokens (20 windows)",
        ),
    ],
)
def test_a_small_sample_is_named_and_one_window_tells_nothing(
    windows: int, error: float | None, said: str, tile: str
) -> None:
    text = evaluations.text_result()
    ratio = of_few_windows(Figure(0.0377, error), windows)
    figures = {**text.figures, "log_perplexity_ratio": ratio, "kl_mean": Figure(0.0001)}
    found = replace(evaluations.whole(), texts=[replace(text, figures=figures, windows=windows, tokens=255)])
    assert said in verdict(found)
    assert "that is the noise floor" not in verdict(found)
    assert tile in [each.detail for each in tiles(found)]
    shown = " ".join(page(found).text.split())
    assert ("too little text to tell models apart" in shown) == (windows == 1)
    assert (f"Student's t of {windows} windows" in shown) == (windows > 1)


def test_few_questions_are_named_and_cannot_tell() -> None:
    lambada, piqa = evaluations.tasks()
    few = replace(piqa, questions=10, difference=difference_of(np.ones(10), np.ones(10)), interval=(-0.41, 0.41))
    moved = replace(lambada, questions=40)
    found = replace(evaluations.whole(), tasks=[moved, few])
    assert "Tasks beyond noise: lambada (40 questions) -2.60 ± 0.60 points. Too few questions to tell: piqa (10)." in (
        verdict(found)
    )
    row = next(row for row in page(found).rows if row[0] == "piqa")
    assert row[-1] == "too few to tell"
    assert row[4] == "+0 (-41.1 to 41.1)"
    assert "does not differ" not in verdict(replace(found, tasks=[few]))
    assert "piqa does not differ from the original beyond noise." in verdict(replace(found, tasks=[piqa]))


def test_kl_at_the_noise_floor_is_said_to_be() -> None:
    found = evaluations.whole()
    near = replace(found, texts=[evaluations.text_result(kl=0.00041)])
    assert "that is the noise floor" in verdict(near)
    assert "that is the noise floor" not in verdict(found)


def test_what_is_missing_is_said_never_zero() -> None:
    bare = Evaluation(Named("x", "LlamaForCausalLM", 10, "float32"), [], missing={"quality": "no text was given"})
    found = page(bare)
    assert "Quality was not measured." in found.text
    assert found.text.count("not measured: ") == 3  # quality, size, speed
    assert ["quality", "no text was given"] in found.rows
    text = replace(evaluations.text_result(), figures={"perplexity": Figure(math.inf)}, noise=None)
    assert ["perplexity", "infinite", "–"] in page(replace(bare, texts=[text])).rows  # noqa: RUF001


def test_perplexities_beyond_numbers_are_read_as_they_were_written(written: Callable[..., Path]) -> None:
    tokens = {"surprisal": np.array([60.0, 90.0]), "reference_surprisal": np.array([800.0, 900.0])}
    found = figures_of({**tokens, "kl": np.ones(2), "same_top": np.ones(2)}, np.arange(2))
    asked = replace(evaluations.whole(), texts=[replace(evaluations.text_result(), figures=found)])
    done = command(written(asked))
    assert done.code == 0, done.err
    assert "| perplexity of the original | infinite |" in done.out


def test_sensitivities_are_those_of_the_candidate_nearest_to_the_bits_of_the_run() -> None:
    found = evaluations.whole()
    (section,) = (part for part in compose(runs(found)).articles[0].sections if part.title.startswith("Sensitivity"))
    conditions, _, table = section.blocks
    assert conditions.text.startswith("Each unit alone replaced by w4 in the original (calibrated on c4.txt, KL on wik")
    assert table.columns == ("layers", "w3", "w4", "here")
    assert table.title == "The ten most sensitive: estimated KL alone by each candidate"
    assert [row[0].split(".")[2] for row in table.rows[:6]] == ["0", "0", "1", "1", "2", "2"]
    assert table.rows[4] == ("model.layers.2.self_attn.q_proj+k_proj+v_proj", "–", "0.000333", "w4a16")  # noqa: RUF001
    small = replace(found, size=replace(found.size, bits_per_weight=3.1))
    assert ["model.layers.3.self_attn.q_proj+k_proj+v_proj", "0.00400", "0.000250", "w4a16"] in page(small).rows
    several = compose(runs(found, replace(found, reference=None)))
    assert [part.title for part in several.overview] == ["Quality against bytes", "Sensitivity of the original"]
    assert "Sensitivity" not in page(replace(found, sensitivity=None)).text


def test_markdown_has_the_tables_of_the_page() -> None:
    content = compose(runs(evaluations.whole()))
    text = as_markdown(content)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    tables = [b for part in content.articles[0].sections for b in part.blocks if isinstance(b, ReportTable)]
    assert len(rows) == sum(len(each.rows) + 2 for each in tables) + len(content.articles[0].tiles) + 2
    assert "| lambada | 2,000 | 39.2 ± 1.1 % | 41.8 ± 1.1 % | -2.60 ± 0.60 |" in text


def test_numbers_have_as_many_digits_as_their_error_leaves() -> None:
    assert wording.with_error(Figure(0.12904, 0.0043)) == "0.1290 ± 0.0043"
    assert wording.with_error(Figure(25.8257, 2.1)) == "25.8 ± 2.1"
    assert wording.with_error(Figure(1234.5, 210)) == "1,234 ± 210"
    assert wording.interval(Figure(1.0, 0.1)) == "0.80 to 1.20"
    assert (wording.number(0.0), wording.number(1e-9), wording.number(math.nan)) == ("0", "1.000e-09", "not a number")
    assert (wording.data(0), wording.data(1023), wording.data(2603248)) == ("0 B", "1023 B", "2.48 MiB")


# --- two runs ------------------------------------------------------------------------------------------------------


def test_two_runs_side_by_side(written: Callable[..., Path], tmp_path: Path) -> None:
    first, second = evaluations.sweep()[0], evaluations.sweep()[3]
    assert second.run is not None
    moved = [replace(r, figures={**r.figures, "loss": 9 * float(r.figures["loss"])}) for r in second.run.layers[:1]]
    second = replace(second, run=replace(second.run, layers=[*moved, *second.run.layers[1:]]))
    done = command(written(first, "a.json"), written(second, "b.json"), "--diff", "--output", tmp_path / "d.html")
    assert done.code == 0, done.err
    found = Page((tmp_path / "d.html").read_text(encoding="utf-8"))
    assert ["weight files", "113,175,416", "99,900,000", "-13,275,416"] in found.rows
    assert ["KL, mean (nats per token)", "0.0450 ± 0.0022", "0.410 ± 0.020", "+0.365"] in found.rows
    assert ["model.layers.0.self_attn.q_proj", "0.0400 %", "0.360 %", "9.00 times"] in found.rows
    assert ["passes[0].gptq.scheme", "w4a16", "w3a16"] in found.rows
    assert "b is smaller by 12.66 MiB (-11.7 %)" in done.out + done.err


def test_divergences_from_two_originals_do_not_compare() -> None:
    first, second = evaluations.sweep()[0], evaluations.sweep()[3]
    assert second.reference is not None
    second = replace(second, reference=replace(second.reference, fingerprint=None, name="another"))
    page = as_html(differences(*(ReportedRun(each.model.name, Path(), each) for each in (first, second))))
    assert ["KL, mean (nats per token)", "0.0450 ± 0.0022", "0.410 ± 0.020", wording.NONE] in Page(page).rows
    assert "measured against different originals" in page
    assert "Its perplexity is" in page
    assert "Its KL" not in page


# --- the command ---------------------------------------------------------------------------------------------------


def test_the_end_of_a_name_says_what_is_written(written: Callable[..., Path], tmp_path: Path) -> None:
    given = [written(each, f"{each.model.name}.json") for each in evaluations.sweep()[:3]]
    for name in ("r.html", "r.md", "r.json", "r.svg"):
        assert command(*given, "--output", tmp_path / name, "--quiet") == Outcome(0, "", "")
    assert (tmp_path / "r.md").read_text("utf-8").startswith("# 3 runs compared\n")
    data = json.loads((tmp_path / "r.json").read_text("utf-8"))
    assert [each["name"] for each in data["runs"]] == ["smollm2-w4", "rtn-w4", "awq-w4"]
    assert data["runs"][0]["evaluation"] == json.loads(json.dumps(as_document(evaluations.sweep()[0])))
    picture = Page((tmp_path / "r.svg").read_text("utf-8"))
    assert picture.tags[:2] == ["svg", "style"]
    assert command(given[0]).out.startswith("# smollm2-w4: gptq w4a16 g64\n")


def test_a_directory_without_an_evaluation_is_reported_by_its_record(llama_w4: Path) -> None:
    (run,) = open_runs([str(llama_w4)])
    found = Page(as_html(compose([run])))
    assert "no evaluation is kept in this directory" in found.text
    assert ["embedding", "model.embed_tokens", "1"] in found.rows
    assert "Not verified" in found.text
    assert "Errors by layer were not measured" in found.text  # plain rounding computes none


def test_broken_and_partial_runs_are_named(
    copy_of: Callable[..., Path], llama_w4: Path, llama: Path, written: Callable[..., Path], tmp_path: Path
) -> None:
    broken = copy_of(llama_w4, "broken")
    (broken / "compress.json").write_text('{"layers": 5}', encoding="utf-8")
    other = copy_of(llama_w4, "other")
    shutil.copy(written(evaluations.whole()), other / "evaluation.json")
    half = copy_of(llama_w4, "half")
    (half / "evaluation.json").write_text('{"format": 2, "model": {"na', encoding="utf-8")
    strange = written(replace(evaluations.whole(), texts=[{"name": 3}]), "strange.json")  # type: ignore[list-item]
    text = evaluations.text_result()
    uneven = written(
        replace(evaluations.whole(), texts=[replace(text, kl_histogram=Histogram([0.0, 1.0], [3, 4]))]), "uneven.json"
    )
    partial = tmp_path / "out.partial"
    partial.mkdir()
    for given, said in {
        broken: f"{broken}/compress.json: layers is 5; it must be a list",
        other: "evaluation.json is about other weights",
        half: "half/evaluation.json cannot be read",
        strange: "strange.json: texts[0].name is 3; it must be a word",
        uneven: "uneven.json: texts[0].kl_histogram must have counts of 0 or more",
        llama: "holds no compress.json; give a directory that compress wrote",
        partial: "is the work of a run that is not finished",
        tmp_path / "out": "does not exist; give a directory",
    }.items():
        done = command(given)
        assert done.code in (1, 2)
        assert said in done.err
        assert len(done.err.strip().splitlines()) == 1


def test_a_card_needs_a_directory(written: Callable[..., Path]) -> None:
    done = command(written(evaluations.whole()), "--card")
    assert (done.code, "is an evaluation alone" in done.err) == (2, True)


# --- the model card ------------------------------------------------------------------------------------------------


def test_a_card_has_front_matter_and_replaces_only_what_is_ours(copy_of: Callable[..., Path], llama_w4: Path) -> None:
    out = copy_of(llama_w4)
    (run,) = open_runs([str(out)])
    kept = replace(evaluations.whole(), model=run.evaluation.model, run=None)
    (out / "evaluation.json").write_text(json.dumps(asdict(kept)), encoding="utf-8")
    assert command(out, "--card").code == 0
    text = (out / "README.md").read_text(encoding="utf-8")
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["base_model"] == "HuggingFaceTB/SmolLM2-135M"
    assert front["tags"] == ["compress", "gptq", "w4a16"]
    (held_out, *tasks) = front["model-index"][0]["results"]
    assert {"type": "kl_divergence", "value": 0.045} in held_out["metrics"]
    assert [each["dataset"]["name"] for each in tasks] == ["lambada", "piqa"]
    assert "## Quality" in text
    assert str(out.parent) not in text  # a reader learns nothing of this machine's folders
    (out / "evaluation.json").unlink()
    assert stranger_in(out) is None  # --overwrite of the run may replace it with the rest
    assert command(out, "--card").code == 0
    assert yaml.safe_load((out / "README.md").read_text("utf-8").split("---\n")[1]).get("base_model") is None


def test_a_readme_of_somebody_else_stays(copy_of: Callable[..., Path], llama_w4: Path) -> None:
    out = copy_of(llama_w4)
    (out / "README.md").write_text("mine", encoding="utf-8")
    done = command(out, "--card")
    assert (done.code, (out / "README.md").read_text("utf-8")) == (2, "mine")
    assert "README.md exists and is not ours" in done.out + done.err
    assert command(out, "--card", "--overwrite").code == 0
    assert (out / "README.md").read_text("utf-8") != "mine"


# --- hostile names -------------------------------------------------------------------------------------------------


def test_hostile_names_are_text_and_nothing_else() -> None:
    text = as_html(compose([*runs(hostile()), *runs(evaluations.whole())]))
    found = Page(text)
    assert not {"script", "img"} & {*found.tags}
    assert not any(key.startswith("on") for _, key, _ in found.attributes)
    assert found.text.count("<script>alert('x')</script>") > 20
    assert not set(text) & {"\u202e", "\x1b"}
    markdown = as_markdown(compose(runs(hostile())))
    assert not set(markdown) & {"\u202e", "\x1b"}
    outside = re.sub(r"(?s)```+text\n.*?\n```+\n", "", markdown)
    assert not re.search(r"(?<!\\)<(?!/?(details|summary)>)", outside)
    assert "http://" not in outside


def test_plain_text_stays_plain_in_markdown() -> None:
    assert plain("a|b\n# c") == r"a\|b # c"
    assert plain("run `compress verify --json a.b`_") == r"run `compress verify --json a.b`\_"
    assert plain("``a`` `<b>` `c\\`") == r"\`\`a\`\` \`\<b\>\` \`c\\\`"
    assert plain("# no heading") == r"\# no heading"
    assert plain("self_attn.q_proj _x_") == r"self_attn.q_proj \_x\_"
