"""Which tokens are predicted, and from which, against the loop of Hugging Face's documentation and by hand."""

import json
import math
from pathlib import Path

import pytest
import torch
from commands import CONTEXT, VOCABULARY, make_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

import compress
from compress.base.errors import InputError
from compress.checkpoint.read.pretrained import load_tokenizer
from compress.checkpoint.read.source import find_source
from compress.evaluation.quality.windows import overlapping_windows, row_windows


@given(st.integers(2, 60), st.integers(2, 20), st.integers(1, 20), st.integers(1, 4), st.integers(0, 60))
@settings(max_examples=200, deadline=None)
def test_every_token_but_the_first_is_predicted_once_from_all_that_its_window_has(
    tokens: int, length: int, stride: int, rows: int, skipped: int
) -> None:
    stride = min(stride, length)
    windows = overlapping_windows(torch.arange(tokens), length, stride, skipped=skipped)
    predicted = []
    for batch in windows.batches(rows):
        assert batch.first == len(predicted)
        assert len(batch.ids_BL) <= rows
        predicted += batch.targets.tolist()
        assert batch.stretch_P.tolist() == [token // length for token in batch.targets.tolist()]
        assert batch.ids_BL.shape[1] <= length
        # In order, and nothing but the end of the text cuts a window short.
        assert batch.ids_BL.shape[1] == length or int(batch.ids_BL[-1, -1]) == tokens - 1
    # Where windows do not overlap, the first token of each has nothing before it.
    lost = set() if stride < length else set(range(0, tokens, length))
    assert predicted == sorted(set(range(tokens)) - lost - {0, skipped})
    assert windows.predicted == len(predicted)


def hugging_face(model: torch.nn.Module, ids: torch.Tensor, length: int, stride: int) -> float:
    """Perplexity by the loop of https://huggingface.co/docs/transformers/perplexity, each token weighing the same."""
    total, count, before = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + length, len(ids))
        targets = ids[None, begin:end].clone()
        targets[:, : -(end - before)] = -100
        with torch.no_grad():
            loss = model(ids[None, begin:end], labels=targets).loss
        valid = int((targets[:, 1:] != -100).sum())
        total, count, before = total + float(loss) * valid, count + valid, end
        if end == len(ids):
            break
    return math.exp(total / count)


def test_strided_perplexity_is_hugging_faces(llama: Path, text_file: Path) -> None:
    model = compress.load(llama, torch.float32)
    ids = load_tokenizer(find_source(str(llama)))(text_file.read_text(encoding="utf-8"), return_tensors="pt")[
        "input_ids"
    ][0][:1000]
    (text_file.parent / "part.txt").write_text(
        load_tokenizer(find_source(str(llama))).decode(ids[:1000], skip_special_tokens=False)
    )
    found = compress.evaluate(llama, text=str(text_file.parent / "part.txt"), length=48, stride=20)
    (text,) = found.texts
    assert found.perplexity == pytest.approx(hugging_face(model, ids, 48, 20), rel=1e-6)
    assert (text.tokens, text.length, text.stride) == (len(ids) - 1, 48, 20)
    assert text.protocol.startswith("windows of 48 tokens, one every 20; of each, the tokens that no earlier window")
    plain = compress.evaluate(llama, text=str(text_file.parent / "part.txt"), length=48)
    assert plain.texts[0].protocol.startswith(
        "non-overlapping windows of 48 tokens; every token after a window's first"
    )
    assert plain.perplexity != found.perplexity


def test_some_of_overlapping_windows(llama: Path, text_file: Path) -> None:
    few = compress.evaluate(llama, text=str(text_file), length=32, stride=8, samples=5)
    assert few.texts[0].windows == 5
    assert 31 + 3 * 8 < few.tokens <= 31 + 4 * 8  # the last window of a text may have fewer new ones


# --- what a text may be --------------------------------------------------------------------------------------------


def test_a_document_shorter_than_a_window(llama: Path, tmp_path: Path) -> None:
    """Together they fill windows; alone one is refused with what to do, or read as it is by overlapping windows."""
    short = tmp_path / "short.jsonl"
    short.write_text(json.dumps({"text": "import os\n"}) + "\n")
    with pytest.raises(InputError, match=r"has \d tokens; at least one window of 64 is needed: give more text or a sh"):
        compress.evaluate(llama, text=str(short))
    alone = compress.evaluate(llama, text=str(short), stride=CONTEXT // 2)
    ids = load_tokenizer(find_source(str(llama)))("import os\n")["input_ids"]
    assert (alone.texts[0].windows, alone.tokens) == (1, len(ids) - 1)
    short.write_text((json.dumps({"text": "import os\n"}) + "\n") * 200)
    assert compress.evaluate(llama, text=str(short)).texts[0].windows >= 1


def test_empty_lines_and_empty_documents_are_no_text(llama: Path, tmp_path: Path) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    documents = [json.dumps({"text": f"def f{i}(x):\n\n\n    return x + {i}\n"}) for i in range(20)]
    one.write_text("\n".join(documents))
    other.write_text("\n\n" + "\n\n \n".join([*documents[:7], json.dumps({"text": " \n"}), *documents[7:]]) + "\n\n")
    found = [compress.evaluate(llama, text=str(path), length=32).texts[0] for path in (one, other)]
    assert found[0].sha256 == found[1].sha256
    assert found[0].figures == found[1].figures
    # Those inside of a document stay: they are what the model predicts.
    (tmp_path / "flat.jsonl").write_text("\n".join(documents).replace("\\n\\n\\n", "\\n"))
    assert compress.evaluate(llama, text=str(tmp_path / "flat.jsonl"), length=32).texts[0].sha256 != found[0].sha256


def test_special_tokens_and_a_beginning_of_text(llama: Path, copy_of, tmp_path: Path) -> None:
    """What the tokenizer puts before a text is there once, read as context and not predicted; a tokenizer without one
    puts nothing."""
    tokenizer = load_tokenizer(find_source(str(llama)))
    special = tokenizer.all_special_tokens[0]
    text = f"import os{special}import re\n" * 30
    (tmp_path / "text.txt").write_text(text)
    bare = tokenizer(text)["input_ids"]
    assert bare.count(tokenizer.convert_tokens_to_ids(special)) == 30  # one token each, not its letters
    assert bare[0] != tokenizer.convert_tokens_to_ids(special)  # no BOS
    found = compress.evaluate(llama, text=str(tmp_path / "text.txt"), length=16, stride=8)
    assert found.tokens == len(bare) - 1
    with_bos = copy_of(llama)
    description = json.loads((with_bos / "tokenizer.json").read_text(encoding="utf-8"))
    first = tokenizer.convert_tokens_to_ids(special)
    description["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": special, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {special: {"id": special, "ids": [first], "tokens": [special]}},
    }
    (with_bos / "tokenizer.json").write_text(json.dumps(description))
    assert PreTrainedTokenizerFast.from_pretrained(with_bos)("import")["input_ids"][0] == first
    begun = compress.evaluate(with_bos, text=str(tmp_path / "text.txt"), length=16, stride=8)
    model, ids = compress.load(llama, torch.float32), torch.tensor([first, *bare])
    assert begun.tokens == len(bare)
    assert begun.perplexity == pytest.approx(hugging_face(model, ids, 16, 8), rel=1e-6)
    rows = ["import os\n", "def f(x):\n    return x\n"] * 20
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    ids = torch.tensor([token for row in rows for token in [first, *tokenizer(row)["input_ids"]]])
    ids = ids[: len(ids) // 16 * 16].view(-1, 16)
    with torch.no_grad():
        surprisal = cross_entropy(model(input_ids=ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    predicted = ids[:, 1:] != first
    of_rows = compress.evaluate(with_bos, text=str(tmp_path / "rows.jsonl"), length=16)
    assert of_rows.tokens == int(predicted.sum()) < predicted.numel()
    assert of_rows.perplexity == pytest.approx(math.exp(surprisal[predicted].mean()), rel=1e-6)
    assert of_rows.texts[0].protocol.endswith("; BOS before a row is not predicted")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stride": 0}, "stride 0; allowed: 1 to 64, the length of a window"),
        ({"stride": 40, "length": 32}, "stride 40; allowed: 1 to 32, the length of a window"),
        ({"stride": 4, "text": torch.zeros(2, 8, dtype=torch.int64)}, "has its windows already, to which stride 4"),
        ({"text": []}, "text is an empty list; give one text or more"),
        (
            {"noise_floor": True},
            "the noise floor is the reference's against itself on a text; give a reference and a text",
        ),
        ({"stride": 4, "length": 512}, "has windows of 512 tokens; the model reads at most 64"),
    ],
)
def test_windows_that_cannot_be_are_refused_in_one_line(
    llama: Path, text_file: Path, options: dict[str, object], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        compress.evaluate(llama, **{"text": str(text_file), **options})


def test_several_texts_each_have_their_figures(llama: Path, llama_w4: Path, text_file: Path) -> None:
    ids = torch.randint(VOCABULARY, (3, 32), generator=torch.Generator().manual_seed(3))
    options = {"reference": llama, "length": None}
    both = compress.evaluate(llama_w4, text=[str(text_file), ids], calibration=ids.flip(0)[:2], samples=3, **options)
    assert [text.role for text in both.texts] == ["held-out", "held-out", "calibration"]
    assert [text.windows for text in both.texts] == [3, 3, 2]
    for i, text in enumerate((str(text_file), ids, ids.flip(0)[:2])):
        alone = compress.evaluate(llama_w4, text=text, samples=3, **options).texts[0]
        assert both.texts[i].figures == alone.figures
    first, last = both.texts[0].figures["kl_mean"], both.texts[2].figures["kl_mean"]
    assert both.gap["kl_mean"].value == first.value - last.value
    assert both.gap["kl_mean"].error == pytest.approx(math.hypot(first.error, last.error))
    assert compress.evaluate(make_llama(), text=ids).gap == {}


def test_rows_are_windows_that_share_nothing() -> None:
    windows = row_windows(torch.arange(12).view(3, 4))
    (batch,) = windows.batches(8)
    assert batch.targets.tolist() == [1, 2, 3, 5, 6, 7, 9, 10, 11]
    assert batch.stretch_P.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
