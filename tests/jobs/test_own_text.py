"""Calibration on what the model writes by itself."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import make_llama, save
from transformers import AutoTokenizer

import compress
from compress.base.errors import InputError
from compress.checkpoint.read.source import DEMO, find_source
from compress.inference.continued import continue_rows
from compress.jobs import own_text
from compress.jobs.model_source import find_model


def test_samples_are_drawn_from_the_models_own_distribution() -> None:
    model: Any = make_llama(vocab_size=8).eval()
    with torch.no_grad():
        wanted = model(torch.tensor([[3, 1]])).logits[0, -1].softmax(-1)
    drawn = torch.tensor(continue_rows(model, [[3, 1]] * 2000, 1, temperature=1.0, ends=False))
    seen = torch.bincount(drawn.flatten(), minlength=8) / 2000
    assert (seen - wanted).abs().max() < 0.056  # five standard errors of a share of one half


def test_rows_do_not_depend_on_those_beside_them_and_end_where_the_text_does() -> None:
    model: Any = make_llama(seed=2).eval()
    alone = continue_rows(model, [[5, 6, 7]], 20)
    beside = continue_rows(model, [[5, 6, 7], [9] * 11], 20)
    assert beside[0] == alone[0]
    model.generation_config.eos_token_id = alone[0][4]
    ended = continue_rows(model, [[5, 6, 7]], 20)[0]
    assert ended == alone[0][: alone[0].index(alone[0][4]) + 1]
    assert continue_rows(model, [[5, 6, 7]], 20, ends=False) == alone
    assert model.generation_config.eos_token_id == alone[0][4]  # as it was


def test_a_run_is_calibrated_on_it_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path / "cache"))
    source = save(make_llama(bos_token_id=1), tmp_path / "model")
    asked = {"passes": compress.GPTQ(scheme="w4a16", group_size=16), "calibration": "self", "samples": 4, "length": 24}
    compress.quantize(source, output=tmp_path / "a", verify=False, **asked)
    (kept,) = (tmp_path / "cache" / "own-text").iterdir()
    ids = np.load(kept)
    assert ids.shape == (4, 24)
    assert (ids[:, 0] == 1).all()
    assert len(np.unique(ids, axis=0)) == 4
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-9])  # damaged: made anew, the same
    own_text.own_tokens(find_model(source, None, False), 4, 24, None)
    assert kept.read_bytes() == whole
    monkeypatch.setattr(own_text, "continue_rows", None)  # what is kept is read
    compress.quantize(source, output=tmp_path / "b", verify=False, **asked)
    records = [json.loads((tmp_path / name / "compress.json").read_text())["calibration"] for name in ("a", "b")]
    assert records[0] == records[1]
    assert records[0]["source"] == "self"


def test_a_chat_model_begins_where_the_user_speaks(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}> {{ m.content }}</s>{% endfor %}"
    source = save(make_llama(vocab_size=len(tokenizer)), tmp_path / "chat")
    tokenizer.save_pretrained(source)
    found = find_model(source, None, False)
    assert found.source == find_source(str(source))
    rows = own_text.own_tokens(found, 2, 40, None).ids
    begun = tokenizer("<user> ", add_special_tokens=False)["input_ids"]
    assert [row[: len(begun)] for row in rows.tolist()] == [begun, begun]


@pytest.mark.parametrize(
    ("asked", "said"),
    [({"bos": "row"}, "leave it out"), ({"length": 9999}, "reads at most"), ({"samples": 0}, "allowed: 1 or more")],
)
def test_what_does_not_apply_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        compress.quantize("demo", compress.GPTQ(), calibration="self", **asked)
