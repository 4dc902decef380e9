"""Uploads to a server that stands in for the hub: whole, checked, with a card, and never over another's model."""

import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from commands import command, last_line
from hub import TOKEN, Hub, serving

import compress
from compress.base.errors import InputError
from compress.evaluation.push import push

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the hub's client about its own client
REPO = "me/model-w4"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as running:
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running


def front_of(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_an_output_goes_whole_with_a_card_of_its_run(hub: Hub, llama_w4: Path) -> None:
    outcome = command("push", llama_w4, REPO, "--base-model", "them/model", "--private", "--json", "-")
    assert outcome.code == 0, outcome
    held = hub.repositories[REPO]
    names = {*json.loads((llama_w4 / "compress.json").read_text())["files"], "compress.json"}
    assert {name: held[name] for name in names} == {name: (llama_w4 / name).read_bytes() for name in names}
    assert set(held) == {*names, "README.md", ".gitattributes"}
    assert hub.commits == 1
    assert hub.private == {REPO}
    card = held["README.md"].decode()
    assert front_of(card)["base_model"] == "them/model"
    assert {"compress", "rtn", "w4a16"} <= set(front_of(card)["tags"])
    assert f'compress.load("{REPO}")' in card
    told = outcome.json()
    assert (told["repo"], told["files"]["model.safetensors"]) == (REPO, len(held["model.safetensors"]))
    assert told["url"] == f"{hub.url}/{REPO}/commit/{1:040x}"


def test_a_dry_run_shows_all_and_asks_the_hub_nothing(hub: Hub, llama_w4: Path) -> None:
    outcome = command("push", llama_w4, REPO, "--dry-run")
    assert outcome.code == 0, outcome
    assert hub.asked == []
    for said in ("model.safetensors", "compress.json", "library_name: transformers", "nothing was uploaded"):
        assert said in outcome.out


def test_a_model_that_is_there_is_replaced_only_when_asked(hub: Hub, llama_w4: Path) -> None:
    others = {"model-00001-of-00002.safetensors": b"theirs", "LICENSE": b"kept", "README.md": b"old"}
    hub.repositories[REPO] = dict(others)
    assert "already holds model-00001-of-00002.safetensors" in last_line(command("push", llama_w4, REPO))
    assert hub.repositories[REPO] == others
    assert command("push", llama_w4, REPO, "--overwrite").code == 0
    held = hub.repositories[REPO]
    assert "model-00001-of-00002.safetensors" not in held
    assert held["LICENSE"] == b"kept"
    assert held["model.safetensors"] == (llama_w4 / "model.safetensors").read_bytes()


def test_files_of_a_person_stay_and_their_card_goes(hub: Hub, llama_w4: Path, copy_of) -> None:
    out = copy_of(llama_w4)
    (out / "README.md").write_text("mine\n")
    (out / "notes.md").write_text("private\n")
    made = push(out, REPO)
    assert hub.repositories[REPO]["README.md"] == b"mine\n"
    assert "notes.md" not in hub.repositories[REPO]
    assert made.left == ["notes.md"]
    with pytest.raises(InputError, match=r"README\.md is yours"):
        push(out, REPO, base_model="them/model", overwrite=True)


def test_an_export_goes_with_a_short_card(hub: Hub, llama_w4: Path, tmp_path: Path) -> None:
    compress.export(llama_w4, tmp_path / "dense", "dense")
    made = push(tmp_path / "dense", REPO, base_model="them/model")
    assert front_of(made.card)["tags"] == ["compress", "dense"]
    assert hub.repositories[REPO]["config.json"] == (tmp_path / "dense" / "config.json").read_bytes()


def test_wrong_tokens_and_a_server_that_is_gone_are_one_line(
    hub: Hub, llama_w4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    outcome = command("push", llama_w4, REPO)
    assert outcome.code == 1
    assert "hf auth login" in last_line(outcome)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    outcome = command("push", llama_w4, REPO)
    assert outcome.code == 1
    assert "the hub shows none of it" in last_line(outcome)
    assert hub.repositories == {}
