"""Text and tokens: every format, the windows cut from it, which of them are taken, and what is said about it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from combinations import every
from commands import CONTEXT, VOCABULARY
from places import SHARED
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PretrainedConfig

from compress.base.errors import InputError
from compress.checkpoint.read.source import DEMO
from compress.data.bos import Bos
from compress.data.documents import read_documents, read_folder
from compress.data.text import DEFAULT_LENGTH, batches_of, default_length, load_tokens, windows

CONFIG = PretrainedConfig()
CONFIG.vocab_size, CONFIG.max_position_embeddings = VOCABULARY, CONTEXT
NO_BOS = Bos(None, False, "none")
STORIES = ["Once upon a time\nthere was a cat.", "Ein Bär, 熊 und ein Fuchs.", "The end\u2028of it."]


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return AutoTokenizer.from_pretrained(DEMO)


def never() -> object:
    raise AssertionError("token ids need no tokenizer")


# --- text ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.raw", "a.md", "a"])
def test_plain_text_may_have_these_endings_or_none(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(STORIES[0], encoding="utf-8")
    assert read_documents(str(tmp_path / name), "calibration").text() == STORIES[0]


def test_txt_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(STORIES[1], encoding="utf-8")
    assert read_documents(str(path), "calibration").text() == STORIES[1]


def test_jsonl_and_parquet_join_documents_by_a_blank_line(tmp_path: Path) -> None:
    documents = [STORIES[0], "  ", *STORIES[1:]]  # blank documents are nothing
    jsonl = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": d, "id": i}, ensure_ascii=False) for i, d in enumerate(documents)]
    jsonl.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    parquet = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": documents, "id": [1, 2, 3, 4]}), parquet)
    assert read_documents(str(jsonl), "calibration").text() == "\n\n".join(STORIES)
    assert read_documents(str(parquet), "calibration").text() == "\n\n".join(STORIES)


ROWS: list[dict[str, Any]] = [  # of datasets, and the text in each
    {"text": STORIES[0]},
    {"text": None},
    {"prompt": "2 + 3 =", "completion": " 5"},
    {"instruction": "Add.", "input": "2, 3", "output": "5"},
    {"instruction": "Add 2 and 3.", "input": "", "output": "5"},
    {"instruction": "Add.", "context": None, "response": None},
    {"question": "2 + 3?", "answer": "5"},
    {"text": "  "},
]
READ = [STORIES[0], "2 + 3 = 5", "Add.\n\n2, 3\n\n5", "Add 2 and 3.\n\n5", "Add.", "2 + 3?\n\n5"]


def test_the_usual_fields_are_read_and_empty_rows_are_counted(tmp_path: Path, tokenizer: object) -> None:
    texts = {
        "a.jsonl": "\n".join(map(json.dumps, ROWS)),
        "lines.json": "\n".join(map(json.dumps, ROWS)),
        "b.json": json.dumps(ROWS, indent=1),
        "strings.json": json.dumps([*READ, "", " "]),
    }
    for name, content in texts.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert read_documents(str(tmp_path / name), "calibration").text() == "\n\n".join(READ), name
        found = load_tokens(str(tmp_path / name), tokenizer, CONFIG, what="calibration", length=8)
        assert found.described()["files"][0]["dropped"] == {"empty": 2}
        assert any("2 of 8 rows left out (empty)" in note for note in found.notes)
        read = [note.split("rows are read as ")[1] for note in found.notes if "are read as" in note]
        assert (read == []) == (name == "strings.json")
        assert name == "strings.json" or read[:2] == ["prompt + completion", "instruction + input + output"]
    others = {"infos": '{"features": {}}', "stats": '[{"id": 1}]', "splits": '["train", "test"]', "sizes": "[9"}
    for name, content in others.items():  # beside the rows of a folder
        (tmp_path / f"{name}.json").write_text(content)
    rows = sorted({*texts} - {"strings.json"})
    assert [each.name for each in read_folder(str(tmp_path))] == [str(tmp_path / name) for name in rows]
    table = pa.Table.from_pylist([row for row in ROWS if "instruction" in row])
    pq.write_table(table, tmp_path / "c.parquet")
    assert read_documents(str(tmp_path / "c.parquet"), "calibration").text() == "\n\n".join(READ[2:5])


def test_a_category_of_parquet_is_counted_once(tmp_path: Path) -> None:
    """Beside many rows: every batch of a column of categories carries all of them."""
    texts = [f"{i} {i * 7919 % 65536:060d}" for i in range(70_000)]
    pq.write_table(pa.table({"text": pa.array(texts).dictionary_encode()}), tmp_path / "a.parquet", compression="zstd")
    assert [text for _, text in read_documents(str(tmp_path / "a.parquet"), "calibration").rows] == texts


@every("ending", ["txt", "jsonl"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    content = STORIES[0] if ending == "txt" else json.dumps({"text": STORIES[0]})
    path.write_bytes(b"\xef\xbb\xbf" + content.encode())
    assert read_documents(str(path), "calibration").text() == STORIES[0]


def test_windows_line_endings_of_jsonl_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\r\n{"text": "two"}\r\n')
    assert read_documents(str(path), "calibration").text() == "one\n\ntwo"


def test_demo_calibration_and_demo_held_out_text_share_less_than_a_hundredth() -> None:
    seen, unseen = (read_documents("demo", what).text() for what in ("calibration", "held-out"))
    known = set(seen.split("\n\n"))
    shared = sum(len(p) for p in unseen.split("\n\n") if p in known)
    assert shared < 0.01 * len(unseen)
    assert min(len(seen), len(unseen)) > 100_000


def test_a_dataset_is_read_by_id_and_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load_dataset(*arguments: object, **keywords: object) -> object:
        asked.append((arguments, keywords))
        return datasets.Dataset.from_dict({"text": STORIES, "id": [1, 2, 3]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_documents("owner/name:small", "calibration").text() == "\n\n".join(STORIES)
    assert asked == [(("owner/name", "small"), {"split": "train"})]


def test_a_dataset_without_text_is_refused_with_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    found = datasets.Dataset.from_dict({"story": STORIES, "id": [1, 2, 3]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: found)
    with pytest.raises(InputError, match=r"'owner/name' has no column 'text'; it has story, id"):
        read_documents("owner/name", "calibration").text()


# --- windows -------------------------------------------------------------------------------------------------------


def test_windows_follow_each_other_and_a_partial_last_one_is_dropped(tokenizer: object) -> None:
    ids = tokenizer(read_documents("demo", "held-out").text()[:5000])["input_ids"]
    cut = windows(torch.tensor(ids), 50, "demo", NO_BOS)
    assert cut.shape == (len(ids) // 50, 50)
    assert len(ids) % 50  # or nothing was dropped
    assert cut.flatten().tolist() == ids[: len(ids) // 50 * 50]


def test_exactly_one_window_is_enough_and_one_token_less_is_not() -> None:
    assert windows(torch.arange(7), 7, "t", NO_BOS).shape == (1, 7)
    with pytest.raises(InputError, match="t has 7 tokens; at least one window of 8 is needed"):
        windows(torch.arange(7), 8, "t", NO_BOS)


def test_samples_are_spread_evenly_from_the_first_window_to_the_last(tokenizer: object) -> None:
    every = load_tokens("demo", tokenizer, CONFIG, what="held-out", length=32).ids
    count = len(every)
    picked = load_tokens("demo", tokenizer, CONFIG, what="held-out", length=32, samples=7)
    expected = [round(i * (count - 1) / 6) for i in range(7)]
    assert torch.equal(picked.ids, every[expected])
    assert picked.notes == ()


def test_one_sample_and_all_samples_are_allowed(tokenizer: object) -> None:
    every = load_tokens("demo", tokenizer, CONFIG, what="held-out", length=32).ids
    assert torch.equal(load_tokens("demo", tokenizer, CONFIG, what="held-out", length=32, samples=1).ids, every[:1])
    whole = load_tokens("demo", tokenizer, CONFIG, what="held-out", length=32, samples=len(every))
    assert torch.equal(whole.ids, every)
    assert whole.notes == ()


def test_too_few_windows_are_noted_with_both_numbers(tokenizer: object, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(STORIES[0] * 20, encoding="utf-8")
    found = load_tokens(str(path), tokenizer, CONFIG, what="calibration", length=32, samples=500)
    assert len(found.notes) == 1
    assert f"gives {len(found.ids)} samples of 32 tokens, fewer than the 500 asked for" in found.notes[0]


def test_the_default_length_is_the_context_at_most_2048(tokenizer: object) -> None:
    assert load_tokens("demo", tokenizer, CONFIG, what="held-out").ids.shape[1] == CONTEXT
    long = PretrainedConfig()
    long.max_position_embeddings = 32768
    assert default_length(long) == DEFAULT_LENGTH == 2048
    older = PretrainedConfig()
    older.n_positions = 512
    assert default_length(older) == 512
    assert default_length(PretrainedConfig()) == 2048


def test_a_tokenizer_is_loaded_for_text_only_when_it_is_needed(tokenizer: object) -> None:
    calls = []
    ids = load_tokens("demo", lambda: calls.append(1) or tokenizer, CONFIG, what="held-out", length=32).ids
    assert calls == [1]
    assert torch.equal(ids, load_tokens("demo", tokenizer, CONFIG, what="held-out", length=32).ids)


def test_calibration_and_held_out_choose_the_demo_text(tokenizer: object) -> None:
    first, second = (
        load_tokens("demo", tokenizer, CONFIG, what=what, length=32) for what in ("calibration", "held-out")
    )
    assert first.fingerprint() != second.fingerprint()
    assert first.source == second.source == "demo"


# --- BOS -----------------------------------------------------------------------------------------------------------


def test_every_row_begins_with_the_bos_that_the_tokenizer_puts_before_a_text(tmp_path: Path) -> None:
    adding = AutoTokenizer.from_pretrained(DEMO)
    bos = adding.bos_token_id
    adding._tokenizer.post_processor = TemplateProcessing(
        single=f"{adding.bos_token} $A", special_tokens=[(adding.bos_token, bos)]
    )
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": story}) for story in STORIES), encoding="utf-8")
    rows = [adding(story, add_special_tokens=False)["input_ids"] for story in STORIES]
    joined = adding("\n\n".join(STORIES), add_special_tokens=False)["input_ids"]
    expected = {
        None: [token for row in rows for token in [bos, *row]],
        "row": [token for row in rows for token in [bos, *row]],
        "window": [bos, *joined[:9], bos, *joined[9:18]],
        "none": joined,
    }
    fingerprints = set()
    for place, ids in expected.items():
        for what in ("calibration", "held-out"):
            found = load_tokens(str(path), adding, CONFIG, what=what, length=10, bos=place)
            assert found.ids.flatten().tolist()[:20] == ids[:20], place
        assert found.described()["bos"] == place or place is None
        fingerprints.add(found.fingerprint())
    assert len(fingerprints) == 3
    plain = AutoTokenizer.from_pretrained(DEMO)  # has a BOS, and puts it before nothing
    assert load_tokens(str(path), plain, CONFIG, what="held-out", length=10).ids.flatten().tolist()[:20] == joined[:20]
    asked = load_tokens(str(path), plain, CONFIG, what="held-out", length=10, bos="row")
    assert asked.ids.flatten().tolist()[:20] == expected["row"][:20]


# --- token ids -----------------------------------------------------------------------------------------------------


@every("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_pt_and_tensor_give_their_rows_as_int64(tmp_path: Path, dtype: torch.dtype) -> None:
    ids = torch.randint(200, (5, 9), generator=torch.Generator().manual_seed(0))
    path = tmp_path / "ids.pt"
    torch.save(ids.to(dtype), path)
    from_file = load_tokens(str(path), never, CONFIG, what="calibration")
    from_tensor = load_tokens(ids.to(dtype), never, CONFIG, what="calibration")
    for found in (from_file, from_tensor):
        assert found.ids.dtype == torch.int64
        assert torch.equal(found.ids, ids)
        assert found.notes == ()
    assert from_file.source == str(path)
    assert from_file.fingerprint() == from_tensor.fingerprint()


def test_windows_that_overlap_are_read(tmp_path: Path) -> None:
    ids = torch.randint(200, (4096,), generator=torch.Generator().manual_seed(0)).unfold(0, 64, 32)
    torch.save(ids, tmp_path / "ids.pt")
    assert torch.equal(load_tokens(str(tmp_path / "ids.pt"), never, CONFIG, what="calibration").ids, ids)


@every("dtype", [np.int64, np.int32, np.uint16, np.uint32, np.uint8])
def test_npy_gives_its_rows_as_int64(tmp_path: Path, dtype: type) -> None:
    ids = np.random.default_rng(0).integers(0, 200, (5, 9))
    np.save(tmp_path / "ids.npy", ids.astype(dtype))
    found = load_tokens(str(tmp_path / "ids.npy"), never, CONFIG, what="calibration").ids
    assert found.dtype == torch.int64
    assert found.tolist() == ids.tolist()


def test_samples_are_the_first_rows_of_token_ids() -> None:
    ids = torch.arange(60).view(6, 10)
    assert torch.equal(load_tokens(ids, never, CONFIG, what="calibration", samples=4).ids, ids[:4])
    short = load_tokens(ids, never, CONFIG, what="calibration", samples=7)
    assert torch.equal(short.ids, ids)
    assert "gives 6 samples of 10 tokens, fewer than the 7 asked for" in short.notes[0]


def test_the_last_id_of_the_vocabulary_and_the_whole_context_are_allowed() -> None:
    ids = torch.full((2, CONTEXT), VOCABULARY - 1)
    assert torch.equal(load_tokens(ids, never, CONFIG, what="calibration", length=CONTEXT).ids, ids)
    with pytest.raises(InputError, match=f"from {VOCABULARY} to {VOCABULARY}; the vocabulary is 0 to {VOCABULARY - 1}"):
        load_tokens(ids + 1, never, CONFIG, what="calibration")
    with pytest.raises(InputError, match=f"windows of {CONTEXT + 1} tokens; the model reads at most {CONTEXT}"):
        load_tokens(torch.zeros(1, CONTEXT + 1, dtype=torch.int64), never, CONFIG, what="calibration")


def test_unsigned_64_bit_ids_beyond_int64_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.full((2, 3), 2**64 - 1, dtype=np.uint64))
    with pytest.raises(InputError, match="the vocabulary is 0 to 2047"):
        load_tokens(str(tmp_path / "ids.npy"), never, CONFIG, what="calibration")


def test_a_pickle_that_runs_code_is_not_run(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, (f"open({str(tmp_path / 'boom')!r}, 'w')",)

    torch.save(Bomb(), tmp_path / "ids.pt")
    with pytest.raises(InputError, match="damaged or holds no tensor"):
        load_tokens(str(tmp_path / "ids.pt"), never, CONFIG, what="calibration")
    assert not (tmp_path / "boom").exists()


# --- micro-batches -------------------------------------------------------------------------------------------------


def test_batches_hold_every_row_once_in_order_with_a_short_last_one() -> None:
    ids = torch.arange(50).view(5, 10)
    batches = batches_of(ids, 2)
    assert [len(b["input_ids"]) for b in batches] == [2, 2, 1]
    assert torch.equal(torch.cat([b["input_ids"] for b in batches]), ids)


def test_ready_made_batches_stay_as_they_are() -> None:
    given = [{"input_ids": torch.ones(1, 3), "attention_mask": torch.ones(1, 3)}]
    assert batches_of(given, 8) == given
    with pytest.raises(InputError, match="holds no batch"):
        batches_of([], 8)
    with pytest.raises(InputError, match="a calibration batch is Tensor; give token ids"):
        batches_of([torch.ones(1, 3)], 8)
    with pytest.raises(InputError, match="use_cache; leave it out"):
        batches_of([{"input_ids": torch.ones(1, 3), "use_cache": True}], 8)
    with pytest.raises(InputError, match="a calibration batch is dict"):
        batches_of([{}], 8)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"input_ids": 0.5}, "input_ids of a calibration batch is float"),
        ({"input_ids": torch.tensor(1)}, r"input_ids of a calibration batch is a tensor of shape \[\]"),
        ({"attention_mask": True}, "attention_mask of a calibration batch is bool"),
        ({"position_ids": torch.ones(0, 3)}, r"position_ids of a calibration batch is a tensor of shape \[0, 3\]"),
        ({"attention_mask": torch.ones(2, 3)}, "attention_mask of a calibration batch has 2 rows and input_ids 1"),
    ],
)
def test_inputs_of_tokens_are_tensors_of_as_many_rows(wrong: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        batches_of([{"input_ids": torch.ones(1, 3), "attention_mask": torch.ones(1, 3), **wrong}], 8)


# --- real data beside the project ----------------------------------------------------------------------------------


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the texts beside the project")
def test_published_files_are_read_whole(tokenizer: object) -> None:
    stories = SHARED / "text" / "tinystories" / "heldout_eval.jsonl"
    with stories.open(encoding="utf-8") as file:
        documents = [json.loads(line)["text"] for line in file]
    assert read_documents(str(stories), "held-out").text().count("\n\n") >= len(documents) - 1
    tokens = load_tokens(str(SHARED / "tokens" / "babyllama-105.eval.pt"), never, None, what="held-out")
    assert tokens.ids.shape == (500, 256)
