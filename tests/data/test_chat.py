"""Conversations: what a chat template makes of them, how they are packed, and what is said about them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from commands import CONTEXT, PLAIN_GPTQ, VOCABULARY, command, make_llama
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

import compress
from compress.checkpoint.read.source import DEMO
from compress.data.chat import Conversations
from compress.data.packing import RowPiece, pack
from compress.data.rows import row_of
from compress.data.text import load_tokens
from compress.data.tokens import Tokens
from compress.solvers.statistics.hessian import Hessian, HessianResult

CONFIG = PretrainedConfig()
CONFIG.vocab_size, CONFIG.max_position_embeddings = VOCABULARY, CONTEXT
# As those of the Qwen family are: tools before all, reasoning under one name, arguments of calls as mappings.
TEMPLATE = """{% if tools %}tools: {{ tools | tojson }}
{% endif %}{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}\
{{ m.content }}{% for c in m.tool_calls %}{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}\
{% endfor %}{% endfor %}"""
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
ASK = {"role": "user", "content": "What is 2 and 3?"}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}


def told(words: int) -> dict[str, Any]:
    """A row of as many words in one message, and an answer."""
    return {"messages": [{"role": "user", "content": "one " * words}, {"role": "assistant", "content": "two"}]}


def written(path: Path, *rows: Mapping[str, Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    found = AutoTokenizer.from_pretrained(DEMO)
    found.chat_template = TEMPLATE
    return found


# --- the template ------------------------------------------------------------------------------------------------


def test_reasoning_tools_and_calls_go_where_the_template_has_them(tokenizer: PreTrainedTokenizerBase) -> None:
    answer = {"role": "assistant", "content": None, "thinking": "add them", "tool_calls": [CALL]}
    row = {"messages": [ASK, answer, {"role": "tool", "content": "5"}], "tools": json.dumps([TOOL])}
    chats = Conversations(tokenizer, "a.jsonl")
    expected = f"tools: {json.dumps([TOOL])}\n<user>What is 2 and 3?<assistant>[add them] a=2 b=3<tool>5"
    assert chats.text(row, "line 1") == expected
    assert chats.notes("a.jsonl") == []


def test_what_the_template_has_no_place_for_is_left_out_and_said(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"  # enable_thinking
    chats = Conversations(tokenizer, "a.jsonl")
    answer = {"role": "assistant", "content": "5", "reasoning": "add them"}
    assert chats.text({"messages": [ASK, answer], "tools": [TOOL]}, "line 1") == "<user>What is 2 and 3?<assistant>5"
    assert [note.split("no place for ")[1] for note in chats.notes("a.jsonl")] == [
        "reasoning, which 1 conversations lose",
        "tools, which 1 conversations lose",
    ]


def test_arguments_of_calls_stay_text_for_a_template_that_joins_them(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ '>' + c.function.arguments }}"
        "{% endfor %}{% endfor %}"
    )
    row = {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}]}
    assert Conversations(tokenizer, "a").text(row, "line 1") == 'What is 2 and 3?>{"a": 2, "b": 3}'


def test_rows_of_sharegpt_and_parts_of_text_are_the_same_conversation(tokenizer: PreTrainedTokenizerBase) -> None:
    chats = Conversations(tokenizer, "a")
    shared = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}
    assert chats.text(shared, "line 1") == "<user>Hi<assistant>Ho"
    assert chats.text(parts, "line 2") == "<user>Hi"
    found = row_of({"prompt": parts["messages"], "completion": [{"role": "assistant", "content": "Ho"}]})
    assert found is not None
    assert found[0] == "prompt + completion"
    assert chats.text(found[1], "line 3") == "<user>Hi<assistant>Ho"


# --- packing -----------------------------------------------------------------------------------------------------


def test_a_piece_goes_into_the_first_window_with_room() -> None:
    sizes = [6, 5, 3, 4, 2, 9]
    windows = pack([RowPiece(0, i, [i] * size) for i, size in enumerate(sizes)], 10)
    assert [[piece.row for piece in window] for window in windows] == [[0, 2], [1, 3], [4], [5]]


def test_every_token_of_a_row_is_in_the_windows_once(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [told(2), told(90), told(3), {"messages": []}, {"text": "Once upon a time."}]
    found = load_tokens(written(tmp_path / "a.jsonl", *rows), tokenizer, CONFIG, what="calibration", packing=True)
    assert found.mask is not None
    texts = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in rows[:3]]
    expected = sorted(t for text in [*texts, "Once upon a time."] for t in tokenizer(text)["input_ids"])
    assert sorted(found.ids[found.mask].tolist()) == expected
    assert not (found.mask.long().diff(dim=1) > 0).any()  # padding is behind all tokens
    (origin,) = found.described()["files"]
    assert {k: v for k, v in origin.items() if k != "file"} == {
        "rows": 5,
        "tokens": len(expected),
        "used": 4,
        "split": 1,
        "dropped": {"empty": 1},
    }
    assert found.described()["padding"] == found.mask.numel() - len(expected)


def test_a_folder_tells_its_files_apart(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """The conversations of parquet are those of jsonl, though a table fills in what a row lacks."""
    rows = [told(2), {"messages": [{"role": "user", "content": "Hi", "reasoning_content": "so"}]}]
    written(tmp_path / "a.jsonl", *rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    (tmp_path / "c.txt").write_text("a story " * 200, encoding="utf-8")
    (tmp_path / "d.md").write_text("no text file", encoding="utf-8")
    found = load_tokens(str(tmp_path), tokenizer, CONFIG, what="calibration", samples=500, packing=True)
    first, second, third = found.origins
    assert (first.rows, first.used, first.tokens) == (second.rows, second.used, second.tokens)
    assert third.tokens == len(tokenizer("a story " * 200)["input_ids"])
    few = load_tokens(str(tmp_path), tokenizer, CONFIG, what="calibration", samples=1, packing=True)
    assert sum(origin.tokens for origin in few.origins) == (few.ids.numel() if few.mask is None else few.mask.sum())
    assert any("not needed for so many samples" in origin.dropped for origin in few.origins)


# --- padding -----------------------------------------------------------------------------------------------------


def hessians(calibration: object, monkeypatch: pytest.MonkeyPatch) -> list[HessianResult]:
    """The Hessians of all sites that GPTQ solves."""
    found, result = [], Hessian.result

    def kept(self: Hessian) -> HessianResult:
        found.append(result(self))
        return found[-1]

    with monkeypatch.context() as patch:
        patch.setattr(Hessian, "result", kept)
        compress.quantize(make_llama(), compress.GPTQ(scheme="w8a16", group_size=32, **PLAIN_GPTQ), **calibration)
    return found


def test_padded_rows_give_the_hessians_of_rows_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(VOCABULARY, (4, 32), generator=generator), torch.ones(4, 32, dtype=torch.bool)
    for row, length in enumerate((32, 5, 17, 2)):
        mask[row, length:] = False
    padded = {"calibration": Tokens(ids, "a", mask=mask).batches(4)}
    alone = {"calibration": [{"input_ids": row[kept][None]} for row, kept in zip(ids, mask, strict=True)]}
    wrong = {"calibration": [{"input_ids": ids}]}
    ours, theirs, counted = (hessians(each, monkeypatch) for each in (padded, alone, wrong))
    assert len(ours) == 8  # four sites in each of two blocks
    for one, other, third in zip(ours, theirs, counted, strict=True):
        assert one.tokens == other.tokens == int(mask.sum())
        scale = other.hessian.abs().max()
        # Float32 sums of other order; and codes of 8 bits, of which one may differ, in what comes before.
        assert (one.hessian - other.hessian).abs().max() < 1e-3 * scale
        assert (third.hessian - other.hessian).abs().max() > 1e-2 * scale


# --- the command line --------------------------------------------------------------------------------------------


def test_a_run_says_where_its_tokens_came_from(
    llama: Path, copy_of: Callable[..., Path], tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = copy_of(llama)
    (model / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    chats = written(tmp_path / "chats.jsonl", *(told(count % 30) for count in range(40)), {"messages": []})
    words = ["quantize", model, "--scheme", "w4a16", "--group-size", 32, "--calibration", chats, "--samples", 8]
    done = command(*words, "--output", tmp_path / "out")
    assert done.code == 0, done.err
    said = json.loads((tmp_path / "out/compress.json").read_text())
    (origin,) = said["calibration"]["files"]
    assert origin["file"] == "chats.jsonl"
    assert origin["tokens"] + said["calibration"]["padding"] == 8 * said["calibration"]["length"]
    left = origin["dropped"]
    assert origin["used"] + sum(left.values()) == origin["rows"] == 41
    line = f"{origin['tokens']} tokens of {origin['used']} of 41 rows"
    assert line in done.err
    assert "1 left out (empty)" in done.err
    assert any(line in note for note in said["notes"])
