"""Figures by position, answers, facts to recall and tool calls, against plain loops and greedy decoding."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import make_llama, save
from transformers import AutoTokenizer

import compress
from compress.base.errors import InputError
from compress.checkpoint.read.source import DEMO
from compress.evaluation.document import Evaluation, TextResult
from compress.evaluation.probes.recall import recall_text
from compress.evaluation.probes.tools import conversations, tools_text
from compress.evaluation.quality import predictor
from compress.evaluation.quality.gates import parse_gate
from compress.evaluation.quality.windows import row_windows

LENGTH = 1100  # two whole bands of positions, and the beginning of a third


@pytest.fixture(scope="module")
def models() -> tuple[torch.nn.Module, torch.nn.Module]:
    """An original and a model near it, whose contexts hold three bands of positions."""
    original = make_llama(max_position_embeddings=2048).eval()
    model = copy.deepcopy(original)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
            parameter.add_(0.15 * parameter.std() * noise) if parameter.ndim == 2 else None
    return model, original


def text_of(found: Evaluation, role: str) -> TextResult:
    return next(text for text in found.texts if text.role == role)


def test_figures_by_position_are_those_of_a_loop_over_tokens(models: tuple[Any, Any]) -> None:
    model, original = models
    ids = torch.randint(model.config.vocab_size, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    bands = compress.evaluate(model, reference=original, text=ids).texts[0].by_position
    assert [(band.low, band.high) for band in bands] == [(0, 512), (512, 1024), (1024, LENGTH)]
    kl, flips, margins = [np.zeros((3, LENGTH - 1)) for _ in range(3)]
    for row in range(3):
        with torch.no_grad():
            q, p = (each(ids[row : row + 1]).logits[0, :-1].double().log_softmax(-1) for each in (model, original))
        for t in range(LENGTH - 1):
            kl[row, t] = float((p[t].exp() * (p[t] - q[t])).sum())
            flips[row, t] = p[t].argmax() != q[t].argmax()
            margins[row, t] = float(p[t].max() - p[t][q[t].argmax()])
    for band in bands:
        inside = slice(max(0, int(band.low) - 1), int(band.high) - 1)  # position t is predicted from place t - 1
        here = flips[:, inside] > 0
        assert band.tokens == here.size
        assert band.kl_mean is not None
        assert band.flips is not None
        assert band.flip_margin is not None
        assert band.kl_mean.value == pytest.approx(kl[:, inside].mean(), abs=1e-6)
        assert band.flips.value == pytest.approx(here.mean())
        assert band.flip_margin.value == pytest.approx(margins[:, inside][here].mean(), abs=1e-6)
        # The error is over windows: here of three, of equal size.
        assert band.kl_mean.error == pytest.approx(kl[:, inside].mean(1).std(ddof=1) / math.sqrt(3), rel=1e-4)
        assert band.kl_mean.interval is not None  # Student's t


def test_long_windows_are_read_in_pieces(models: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, original = models
    ids = torch.randint(model.config.vocab_size, (2, 700), generator=torch.Generator().manual_seed(1))
    whole = compress.evaluate(model, reference=original, text=ids)
    seen: list[int] = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    monkeypatch.setattr(predictor, "FORWARD_TOKENS", 256)
    pieces = compress.evaluate(model, reference=original, text=ids)
    assert max(seen) == 256
    assert pieces.kl_mean == pytest.approx(whole.kl_mean, rel=1e-4)
    assert pieces.perplexity == pytest.approx(whole.perplexity, rel=1e-5)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(A model of 3 bits, its original)."""
    output = tmp_path_factory.mktemp("probes") / "w3"
    compress.quantize("demo", compress.RTN(scheme="w3a16"), output=output)
    return output, DEMO


def test_greedy_decoding_leaves_the_answers_where_they_are_said_to_part(pair: tuple[Path, Path]) -> None:
    output, original = pair
    prompts, tokens = ["The little dog", "Once there was a girl who", "Tom and Anna went to the"], 24
    probes = compress.Probes(prompts=prompts, answers=3, answer_tokens=tokens)
    asked: dict[str, Any] = {"probes": probes, "reference": original}
    found = text_of(compress.evaluate(output, **asked), "answers")
    again = text_of(compress.evaluate(output, cache=False, **asked), "answers")
    assert again.sha256 == found.sha256  # cached, and made anew
    tokenizer = AutoTokenizer.from_pretrained(original)
    same = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        written = []
        for name in (output, original):
            model = compress.load(name, torch.float32, dequantize=name == output)
            more = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": tokens}
            written.append(model.generate(ids, **more)[0, ids.shape[1] :].tolist())
        ours, theirs = written
        same.append(next((i for i, token in enumerate(theirs) if ours[i : i + 1] != [token]), len(theirs)))
    assert found.by_part[0].figures["reference_exact"].value == 1
    assert max(same) > 0
    for each in found.agreement:
        wanted = np.mean([n >= (tokens if each.tokens is None else each.tokens) for n in same])
        assert each.share.value == pytest.approx(wanted)
        assert each.share.interval is not None  # of three answers


def test_the_original_answers_as_it_would_itself(pair: tuple[Path, Path]) -> None:
    found = compress.evaluate(
        pair[1], reference=pair[1], text="demo", samples=4, probes=compress.Probes(answers=4, answer_tokens=16)
    )
    answers = text_of(found, "answers")
    assert [each.share.value for each in answers.agreement] == [1, 1, 1, 1, 1]
    assert answers.by_part[0].figures["kl_mean"].value == pytest.approx(0, abs=1e-6)


class Words:
    """A tokenizer of characters, for texts that can be read back."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


def test_facts_to_recall_are_in_the_text_as_far_back_as_is_said() -> None:
    filler = row_windows(torch.full((4, 4096), ord("x")))
    text = recall_text(filler, Words(), 2)
    windows = text.windows
    assert windows.length == 4096
    assert {part.partition(",")[0] for part in text.parts} == {"fact", "order", "pair"}
    assert len({part for part in text.parts if part.startswith("fact")}) > 2  # near and far
    found = 0
    for span in windows.spans:
        ids, items = windows.ids_N[span.begin : span.end], windows.item_N[span.begin : span.end]
        said = "".join(map(chr, ids.tolist()))
        for item in sorted(set(items.tolist()) - {-1}):
            (places,) = (items == item).nonzero(as_tuple=True)
            begin = int(places[0])
            answer = said[begin : int(places[-1]) + 1]
            question = said[said.rindex("\n", 0, begin) : begin]
            key = question.strip().removeprefix("The ")
            kind, _, distance = text.parts[item].partition(", ")
            if kind == "order":
                place, _, name = key.partition(" note on the ")
                notes = [
                    i for i in range(len(said)) if said.startswith(f"\nA note on the {name[: name.index(':')]}:", i)
                ]
                fact = notes[("first", "second", "third", "fourth").index(place)]
            else:
                fact = said.index(question)
            assert answer.strip() in said[fact : fact + 80]
            low, high = (int(word.replace(",", "")) for word in distance.split(" tokens")[0].split(" to "))
            assert low <= begin - fact < high
            found += 1
    assert found == len(text.parts) == 2 * 3 * 12


NATIVE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    "template", [None, NATIVE, "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"]
)
def test_what_the_assistant_says_is_predicted_and_nothing_else(template: str | None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = template
    config = make_llama(max_position_embeddings=8192).config
    text = tools_text(tokenizer, config)
    assert text.parts == ("calls", "prose") * 50
    windows = text.windows
    for i in (0, 49):
        row, ids = conversations()[i], windows.ids_N.view(50, -1)[i]
        items = windows.item_N.view(50, -1)[i]
        call, prose = (tokenizer.decode(ids[items == 2 * i + j]) for j in (0, 1))
        asked = row["messages"][1]["tool_calls"][0]["function"]
        assert json.loads(call[call.index("{") : call.rindex("}") + 1]) == asked
        assert row["messages"][3]["content"] in prose
        assert "}" not in prose
        assert row["messages"][0]["content"] in tokenizer.decode(ids)
        assert row["messages"][0]["content"] not in call + prose


def test_arguments_of_calls_are_those_of_their_schemas() -> None:
    kinds = {"string": str, "integer": int, "number": int | float, "boolean": bool, "array": list}
    for row in conversations():
        call = row["messages"][1]["tool_calls"][0]["function"]
        (schema,) = (t["function"]["parameters"] for t in row["tools"] if t["function"]["name"] == call["name"])
        assert set(schema["required"]) <= set(call["arguments"]) <= set(schema["properties"])
        for name, value in call["arguments"].items():
            about = schema["properties"][name]
            assert isinstance(value, kinds[about["type"]])
            assert value in about.get("enum", [value])


@pytest.fixture(scope="module")
def probed(models: tuple[Any, Any]) -> Evaluation:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model, original = (make_llama(seed, vocab_size=len(tokenizer), max_position_embeddings=1024) for seed in (0, 1))
    ids = torch.randint(len(tokenizer), (2, 700), generator=torch.Generator().manual_seed(0))
    probes = compress.Probes(recall=1, tools=True, answers=2, answer_tokens=4)
    return compress.evaluate(model, reference=original, text=ids, tokenizer=tokenizer, probes=probes)


def test_all_that_was_asked_is_shown(probed: Evaluation) -> None:
    said = compress.report(probed)._repr_html_()
    for words in (
        "By use",
        "beyond 512",
        "tools: calls",
        "Facts to recall",
        "Answers in the same words",
    ):
        assert words in said
    assert "of 50 tool calls exact" in probed.to_dict()["summary"]["verdict"]


@pytest.mark.parametrize(
    ("gate", "passed"),
    [
        ("far.kl_mean > 1e9", True),
        ("far.flips >= 0", False),
        ("tools.exact < 1", False),
        ("tools.unflipped > 1", True),
        ("answers.kl_mean < 0", True),
        ("recall.reference_exact > 0", True),
    ],
)
def test_gates_know_the_figures(probed: Evaluation, gate: str, passed: bool) -> None:
    assert parse_gate(gate).check(probed).passed is passed


def test_a_gate_of_what_was_not_asked_fails(pair: tuple[Path, Path]) -> None:
    found = compress.evaluate(pair[0], reference=pair[1], text="demo", samples=2)
    results = [parse_gate(gate).check(found) for gate in ("answers.exact < 0", "far.kl_mean > 9")]
    assert [result.passed for result in results] == [False, False]
    assert "--answers" in str(results[0].reason)
    assert "longer than 512" in str(results[1].reason)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"text": "demo", "answers": 0}, "answers 0"),
        ({"text": "demo", "recall": 0}, "recall 0"),
        ({"text": "demo", "prompts": ["a"]}, "say how many"),
        ({"prompts": ["a"], "answers": 2}, "answers 2 to 1 prompts"),
        ({"prompts": [""], "answers": 1}, "holds no token"),
        ({"answers": 1, "prompts": ["a"], "answer_tokens": 300}, "ask for shorter answers"),
        ({"text": "demo", "samples": 1, "answers": 99}, "give more text"),
        ({"text": "demo", "length": 128, "recall": 1}, "allowed: 256 or more"),
        ({"tools": True}, "the model reads at most 256"),
        ({"answers": 1, "prompts": [{"messages": [{"role": "user", "content": "a"}]}]}, "no chat template"),
    ],
)
def test_probes_that_cannot_be_are_refused(asked: dict[str, Any], said: str) -> None:
    of_text = {name: asked.pop(name) for name in ("text", "samples", "length") if name in asked}
    with pytest.raises(InputError, match=said):
        compress.evaluate("demo", reference="demo", probes=compress.Probes(**asked), **of_text)


def test_answers_need_the_original(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="those of the original"):
        compress.evaluate(save(make_llama(), tmp_path / "m"), text="demo", probes=compress.Probes(answers=1))
