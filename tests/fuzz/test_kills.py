"""Every command that writes, killed at random moments, run twice at once, and on a disk that is full: nothing that
existed is lost, and what is there is whole.

Kill I of a command is decided by the command, I and COMPRESS_FUZZ_SEED alone (default 0), but for the speed of the
machine. COMPRESS_FUZZ_KILLS: how many kills of all commands together (default 100).
"""

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import VOCABULARY, command, make_llama, save
from places import ROOT

import compress

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    # Children are made of this process, which has imported all that takes seconds; none of them uses its threads.
    pytest.mark.filterwarnings("ignore"),
]

SEED = int(os.environ.get("COMPRESS_FUZZ_SEED", "0"))
KILLS = int(os.environ.get("COMPRESS_FUZZ_KILLS", "100"))
KINDS = (".safetensors", ".gguf")
FIT = ["--group-size", 32, "--batch-size", 2]
STEPS = ["--steps", 4, "--batch-size", 2]


@dataclass(frozen=True)
class Command:
    """A command that writes. words: with names of the desk in braces. made: the path of its output. again: options that
    go on after a kill. beside: folders that it fills for later runs, which go once the output is complete."""

    words: Sequence[object]
    made: str = "out"
    again: Sequence[str] = ("--resume",)
    beside: Sequence[str] = ()


def writing(name: str, *more: object, model: str = "{model}") -> list[object]:
    return [name, model, *more, "--output", "{out}"]


GPTQ = ROOT / "recipes" / "sweeps" / "w3-gptq.yaml"
COMMANDS = {
    "quantize": Command(writing("quantize", "--calibration", "{tokens}", *FIT)),
    "quantize, a recipe": Command(writing("quantize", "--recipe", "{recipe}", "--calibration", "{tokens}", *FIT)),
    "sweep": Command(
        writing("sweep", GPTQ, "--text", "{tokens}", "--calibration", "{tokens}", *FIT), "out/sweep.json", (), ("out",)
    ),
    "quantize for llama.cpp": Command(
        writing("quantize", "--for", "llama.cpp", "--method", "rtn"), "out", ("--overwrite",), ("out.checkpoint",)
    ),
    "prune": Command(
        writing("prune", "--method", "sparsegpt", "--pattern", "2:4", "--calibration", "{tokens}", "--batch-size", 2)
    ),
    "qat": Command(writing("qat", "--group-size", 32, "--calibration", "{tokens}", *STEPS)),
    "distill": Command(writing("distill", "--student-layers", 1, "--training", "{tokens}", *STEPS)),
    **{
        f"export to {to}": Command(writing("export", "--to", to, model="{small}"), again=("--overwrite",))
        for to in ("dense", "gguf", "gptq", "awq", "mlx")
    },
    "export to modelopt": Command(writing("export", "--to", "modelopt", model="{floats}"), again=("--overwrite",)),
    "evaluate": Command(
        ["evaluate", "{small}", "--reference", "{model}", "--text", "{tokens}"], "small/evaluation.json", ()
    ),
    "report, a card": Command(["report", "{small}", "--card"], "small/README.md", ()),
    "report, a page": Command(["report", "{small}", "--output", "{out}.html"], "out.html", ()),
    "cache-logits": Command(
        ["cache-logits", "{model}", "--calibration", "{tokens}", "--output", "{out}.safetensors"],
        "out.safetensors",
        ("--overwrite",),
    ),
}
RECIPE = "passes:\n- awq: {rounding: none, group_size: 32}\n- gptq: {group_size: 32}\n- embeddings: {}\n"


@dataclass(frozen=True)
class Desk:
    """Good inputs in a folder, beside which commands write."""

    here: Path

    def words(self, given: Sequence[object]) -> list[str]:
        things = ("model", "small", "floats", "out", "tokens.pt", "recipe.yaml")
        names = {name: str(self.here / name) for name in things}
        known = {name.partition(".")[0]: path for name, path in names.items()}
        return [str(word).format(**known) for word in given]

    def kept(self) -> dict[str, str]:
        """SHA-256 of every input: both models, but for what commands add to the small one, the tokens, the recipe."""
        late = {"compress.json", "README.md", "evaluation.json", "evaluation.html", "evaluation.md"}
        paths = [
            *self.here.glob("model/*"),
            *self.here.glob("small/*"),
            *self.here.glob("floats/*"),
            *self.here.glob("*.pt"),
            *self.here.glob("*.yaml"),
        ]
        whole = [path for path in paths if not (path.parent.name == "small" and path.name in late)]
        return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in whole if not p.name.startswith(".")}


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    save(make_llama(num_hidden_layers=3).half(), tmp_path / "model")
    compress.quantize(tmp_path / "model", compress.RTN(group_size=32), output=tmp_path / "small", verify=False)
    compress.quantize(tmp_path / "model", compress.RTN(scheme="fp8"), output=tmp_path / "floats", verify=False)
    ids = torch.randint(VOCABULARY, (8, 32), generator=torch.Generator().manual_seed(1))
    torch.save(ids, tmp_path / "tokens.pt")
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    return Desk(tmp_path)


def begun(words: Sequence[str], most: int | None = None) -> tuple[int, int]:
    """A child of this process that runs a command: (its number, a file to read its outcome from). most: bytes that a
    file of it may have."""
    reads, writes = os.pipe()
    child = os.fork()
    if child:
        os.close(writes)
        return child, reads
    try:
        if most is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        found = command(*words)
        os.write(writes, json.dumps([found.code, found.err[-2000:]]).encode())
    finally:
        os._exit(0)


def ended(child: int, reads: int) -> tuple[int, str]:
    """Exit code of a command and its standard error; (-9, "") of one that was killed."""
    with os.fdopen(reads, "rb") as file:
        told = file.read()
    os.waitpid(child, 0)
    return tuple(json.loads(told)) if told else (-signal.SIGKILL, "")


def result(path: Path) -> dict[str, Any] | None:
    """The part of an output that is compared: weights and configuration of a directory, the logits of a file; of a
    document that it is there; None where there is nothing."""
    if path.is_dir():
        parts = [p for p in sorted(path.iterdir()) if p.suffix in KINDS or p.name == "config.json"]
        return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in parts}
    if path.suffix == ".safetensors" and path.exists():
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}
    return {"there": True} if path.exists() else None


def whole(path: Path) -> bool:
    """True for an output that is complete: a directory verifies, and a document ends as it must."""
    if path.is_dir():
        return command("verify", path, "--quiet").code == 0
    if path.suffix == ".json":
        return isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
    return path.stat().st_size > 0 and (path.suffix != ".html" or path.read_text("utf-8").rstrip().endswith("</html>"))


def drop(desk: Desk, folders: Sequence[str]) -> None:
    for name in folders:
        shutil.rmtree(desk.here / name, ignore_errors=True)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_loses_nothing_and_goes_on(name: str, desk: Desk) -> None:
    told, chance = COMMANDS[name], random.Random(f"{SEED} {name}")
    made = desk.here / told.made
    before = time.monotonic()
    code, err = ended(*begun(desk.words(told.words)))
    length = time.monotonic() - before
    assert code == 0, err
    expected, inputs = result(made), desk.kept()
    if made.is_dir():
        made.rename(desk.here / "first")
    elif told.again:
        made.unlink()
    ends: Counter[str] = Counter()
    for _ in range(-(-KILLS // len(COMMANDS))):
        if made.exists() or not sum(ends.values()):
            drop(desk, told.beside)
        more = told.again if made.exists() or ends["unfinished"] else ()
        child, reads = begun(desk.words([*told.words, *more, *(["--overwrite"] if "--resume" in more else [])]))
        time.sleep(chance.random() * length)
        os.kill(child, signal.SIGKILL)
        code, err = ended(child, reads)
        assert code in (0, -signal.SIGKILL), err
        assert desk.kept() == inputs
        if made.exists():
            assert whole(made)
        if made.parent.name == "small":
            assert whole(made.parent)
        if made.is_dir():
            assert result(made) == expected
        ends["complete" if made.exists() else "unfinished"] += 1
    more = ["--overwrite"] if told.again else []
    code, err = ended(*begun(desk.words([*told.words, *(told.again if "--resume" in told.again else ()), *more])))
    assert code == 0, err
    assert whole(made)
    assert result(made) == expected
    assert desk.kept() == inputs
    assert not list(desk.here.glob("*.partial"))
    print(f"{name}: kills within {length:.1f} s: {dict(ends)}")


@pytest.mark.parametrize("name", ["quantize", "qat", "export to dense", "cache-logits"])
def test_of_two_runs_at_once_one_gives_way(name: str, desk: Desk) -> None:
    told = COMMANDS[name]
    words = desk.words(told.words)
    both = [begun(words), begun(words)]
    ends = [ended(*each) for each in both]
    assert 0 in [code for code, _ in ends], ends
    assert all(code == 0 or (code in (1, 2) and err.splitlines()[-1].startswith("compress: ")) for code, err in ends), (
        ends
    )
    assert whole(desk.here / told.made)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_one_line_and_loses_nothing(name: str, desk: Desk) -> None:
    """Files may have so many bytes and no more, as on a disk that is full."""
    told, chance = COMMANDS[name], random.Random(f"{SEED} {name}")
    made, inputs = desk.here / told.made, desk.kept()
    for most in (0, chance.randint(1, 5000), chance.randint(5000, 200_000)):
        code, err = ended(*begun(desk.words([*told.words, *(["--overwrite"] if told.again else [])]), most))
        assert code in (0, 1, 2), (code, err)
        if code:
            assert err.splitlines()[-1].startswith("compress: "), err
            assert "unexpected" not in err, err
        assert desk.kept() == inputs
        assert not made.exists() or whole(made)
