"""Thousands of damaged inputs: each ends well or with one line that says why; no traceback, hang, or success that did
nothing.

Case I of a kind is decided by the kind, I and COMPRESS_FUZZ_SEED alone (default 0). COMPRESS_FUZZ_CASES: how many cases
of all kinds together (default 5,000).
"""

import json
import math
import os
import random
import re
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import click
import mutations
import numpy
import pytest
import torch
import yaml
from commands import Outcome, command
from evaluations import whole
from places import ROOT
from safetensors import safe_open

from compress.checkpoint.read.source import DEMO
from compress.cli.main import cli
from compress.passes.protocol.recipe import PASSES, options_of, pass_class

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.filterwarnings("ignore"),
]

SEED = int(os.environ.get("COMPRESS_FUZZ_SEED", "0"))
CASES = int(os.environ.get("COMPRESS_FUZZ_CASES", "5000"))
SECONDS = 90  # a case that takes longer stands still
GROWTH = 2**30  # bytes of memory that no case may take: its inputs are below a megabyte
LITTLE = ["--samples", 2, "--length", 16, "--batch-size", 2]


@dataclass(frozen=True)
class Things:
    """Good inputs, and a folder for the bad ones of one case."""

    model: Path
    small: Path
    tokens: Path
    here: Path

    @property
    def output(self) -> Path:
        return self.here / "output"

    def model_with(
        self, change: mutations.Change, name: str, chance: random.Random, source: Path | None = None
    ) -> Path:
        """A copy of a model, in which one file is changed."""
        copied = Path(shutil.copytree(source or self.model, self.here / "model"))
        change(copied / name, chance)
        return copied

    def rounded(self, model: object, *more: object) -> list[object]:
        return ["quantize", model, "--method", "rtn", "--group-size", 32, "--output", self.output, "--no-verify", *more]


Made = Sequence[object]
Maker = Callable[[Things, random.Random], Made]


def readers(model: Path, things: Things, chance: random.Random) -> Made:
    """A command that reads a model."""
    return chance.choice(
        (
            things.rounded(model),
            ["plan", model, "--method", "rtn", "--group-size", 32],
            ["evaluate", model, "--text", things.tokens, "--samples", 2],
            ["generate", model, "--prompt", "import", "--tokens", 2],
            ["inspect", model],
        )
    )


def configurations(things: Things, chance: random.Random) -> Made:
    name = chance.choice(("config.json",) * 4 + ("generation_config.json", "tokenizer_config.json", "tokenizer.json"))
    return readers(things.model_with(mutations.in_json, name, chance), things, chance)


def weights(things: Things, chance: random.Random) -> Made:
    return readers(things.model_with(mutations.in_safetensors, "model.safetensors", chance), things, chance)


def records(things: Things, chance: random.Random) -> Made:
    """A checkpoint of ours whose record, configuration or header is damaged."""
    name = chance.choice(("compress.json", "compress.json", "config.json", "model.safetensors"))
    change = mutations.in_safetensors if name == "model.safetensors" else mutations.in_json
    out = things.model_with(change, name, chance, things.small)
    return chance.choice(
        (
            ["verify", out],
            ["inspect", out],
            ["report", out],
            ["generate", out, "--prompt", "import", "--tokens", 2],
            ["evaluate", out, "--text", things.tokens, "--samples", 2],
            ["export", out, "--to", chance.choice(("dense", "gptq", "gguf", "awq")), "--output", things.output],
        )
    )


def recipes(things: Things, chance: random.Random) -> Made:
    """A recipe of ours with other options, steps, names or text."""
    found = sorted([*ROOT.glob("recipes/*.yaml"), *ROOT.glob("recipes/sweeps/*.yaml")])
    given = chance.choice(found).read_text(encoding="utf-8")
    path, parsed = things.here / "recipe.yaml", yaml.safe_load(given)
    how = chance.random()
    if how < 1 / 6:
        path.write_bytes(mutations.text(given, chance).encode("utf-8", "surrogatepass"))
    else:
        for _ in range(chance.randint(1, mutations.MANY)):
            if how < 2 / 6:
                parsed = mutations.changed(parsed, chance)
            elif isinstance(parsed, dict):
                change_step(parsed["passes"], chance)
        path.write_bytes(yaml.safe_dump(parsed, allow_unicode=True).encode("utf-8", "surrogatepass"))
    size = ["--group-size", 32] if chance.random() < 1 / 2 else []
    if chance.random() < 1 / 2:
        return ["plan", things.model, "--recipe", path, *size]
    data = ["--calibration", things.tokens]
    data += ["--training", things.tokens] if "train" in path.read_text(encoding="utf-8", errors="replace") else []
    return ["quantize", things.model, "--recipe", path, *data, *size, "--output", things.output, "--no-verify"]


def change_step(passes: list[dict[str, Any]], chance: random.Random) -> None:
    """Set an option of a step that its pass has, or add, remove or repeat a step."""
    step = chance.choice(passes)
    name = next(iter(step))
    how = chance.randrange(8)
    if how == 0:
        passes.insert(chance.randrange(len(passes) + 1), {chance.choice(sorted(PASSES)): {}})
    elif how == 1:
        passes.append(json.loads(json.dumps(chance.choice(passes))))
    elif isinstance(step[name], dict) and name in PASSES:
        options = options_of(pass_class(name))
        option = chance.choice(sorted(options))
        step[name][option] = (
            likely(options[option].default, chance) if chance.random() < 0.7 else mutations.value(chance)
        )


def likely(default: object, chance: random.Random) -> object:
    """A value of the type of an option's default, often out of range."""
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return chance.choice((-1, 0, 1, 2, 3, 8, 32, 48, 10**6))
    if isinstance(default, float):
        return chance.choice((-0.1, 0.0, 1e-9, 0.05, 0.5, 0.999, 1.0, 3.0, 100.0, 1e9))
    return chance.choice(POOL)


def texts(things: Things, chance: random.Random) -> Made:
    """Damaged texts, rows and tokens."""
    kind = chance.choice(("txt", "jsonl", "jsonl", "pt", "npy", "batches", "parquet"))
    path = things.here / f"given.{'pt' if kind == 'batches' else kind}"
    if kind == "txt":
        path.write_bytes(mutations.data((DEMO / "heldout.txt").read_bytes()[:2000], chance))
    elif kind == "jsonl":
        row: Any = chance.choice(
            (
                {"text": "import this " * 20},
                {"messages": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]},
            )
        )
        rows = [json.dumps(mutations.changed(row, chance) if chance.random() < 1 / 3 else row) for _ in range(4)]
        text = mutations.text("\n".join(rows), chance) if chance.random() < 1 / 4 else "\n".join(rows)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    elif kind in ("pt", "batches"):
        torch.save(odd_tensors(chance) if kind == "pt" else odd_batches(chance), path)
        if chance.random() < 1 / 4:
            mutations.in_bytes(path, chance)
    elif kind == "npy":
        numpy.save(path, odd_tensors(chance).numpy())
        if chance.random() < 1 / 3:
            mutations.in_bytes(path, chance)
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pytest.importorskip("pyarrow").table(
            {chance.choice(("text", "words")): chance.choice((["a b"] * 9, [1] * 9, [None] * 9))}
        )
        parquet.write_table(table, path)
        if chance.random() < 1 / 2:
            mutations.in_bytes(path, chance)
    static = [
        "--method",
        "rtn",
        "--scheme",
        "w8a8",
        "--activations",
        "static",
        "--output",
        things.output,
        "--no-verify",
    ]
    few = LITTLE if kind not in ("pt", "npy", "batches") else []
    return chance.choice(
        (
            ["quantize", things.model, *static, "--calibration", path, *few],
            ["evaluate", things.model, "--text", path, *few[:4]],
        )
    )


def odd_tensors(chance: random.Random) -> torch.Tensor:
    """Tokens, most of them not as they should be."""
    shape = chance.choice(((4, 16), (4, 16), (16,), (0, 16), (4, 0), (4, 1), (1, 4, 16), (2, 90), ()))
    dtype = chance.choice((torch.int64, torch.int64, torch.int32, torch.int16, torch.uint8, torch.float32, torch.bool))
    low, high = chance.choice(((0, 100), (0, 2), (-5, 100), (0, 100_000)))
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(chance.randrange(2**31))).to(dtype)


def odd_batches(chance: random.Random) -> Any:
    """Batches of a model's inputs, most of them not as they should be."""
    good = {"input_ids": torch.randint(0, 100, (2, 16)), "attention_mask": torch.ones(2, 16, dtype=torch.long)}
    batch: dict[Any, Any] = dict(good)
    batch[chance.choice(("input_ids", "attention_mask", "position_ids", "other", 3))] = chance.choice(
        (odd_tensors(chance), mutations.value(chance))
    )
    return chance.choice(([batch], [good, batch], batch, [[batch]], (batch,), [tuple(good.values()), batch]))


def evaluations(things: Things, chance: random.Random) -> Made:
    """A damaged file of results."""
    path = things.here / "result.json"
    path.write_text(json.dumps(whole_evaluation()), encoding="utf-8")
    mutations.in_json(path, chance)
    form = chance.choice((".html", ".md", ".json", ".svg"))
    return ["report", path, "--output", things.here / f"report{form}"]


def whole_evaluation() -> Any:
    return json.loads(json.dumps(asdict(whole())))


WORK = (
    "quantize",
    "plan",
    "prune",
    "evaluate",
    "inspect",
    "generate",
    "export",
    "report",
    "verify",
    "fit",
    "sweep",
    "methods",
)


def options(things: Things, chance: random.Random) -> Made:
    """A command with random options: names that it has, and values that it may not expect."""
    name = chance.choice(WORK)
    subject: dict[str, list[object]] = {
        **{each: [things.model] for each in ("quantize", "plan", "prune", "fit")},
        **{each: [things.small] for each in ("evaluate", "inspect", "generate", "export", "verify", "report")},
        "sweep": [things.model, ROOT / "recipes" / "sweeps" / "w4-rtn.yaml"],
    }
    words: list[object] = [name, *subject.get(name, [])]
    taken = {"output", "calibration", "text", "quiet", "help", "plugin", "trust_remote_code", "fsdp", "device"}
    known = [p for p in cli.commands[name].params if isinstance(p, click.Option) and p.name not in taken]
    for option in chance.sample(known, min(len(known), chance.randint(1, 3))):
        words.append(chance.choice([*option.opts, *option.secondary_opts]))
        if not option.is_flag:
            words.append(fitting(option, chance, things))
    has = {p.name for p in cli.commands[name].params}
    words += ["--output", things.output] if "output" in has else []
    words += ["--calibration", things.tokens] if "calibration" in has and chance.random() < 0.8 else []
    words += ["--text", things.tokens] if "text" in has else []
    return words


POOL = (
    *("gptq", "rtn", "awq", "smoothquant", "spqr", "sparsegpt", "wanda", "magnitude", "w4a16", "w3a16", "w8a8", "fp8"),
    *(
        "nvfp4",
        "mxfp4a16",
        "int8",
        "fp8:head",
        "asymmetric",
        "static",
        "kl",
        "mse",
        "2:4",
        "0.5",
        "32",
        "-1",
        "1",
        "64",
    ),
    *(
        "heads:0.5",
        "channels:0.25",
        "*.down_proj",
        "*",
        "bits=3",
        "damp=0.05",
        "clip=false",
        "sweeps=x",
        "3.5bpw",
        "float16",
    ),
    *("llama.cpp", "vllm", "dense", "gguf", "kl>0.1", "perplexity<100", "loss", "1MB", "cpu"),
)


def fitting(option: click.Option, chance: random.Random, things: Things) -> object:
    """A value of the kind of an option, or none of it. Zero bytes can't be in arguments."""
    if chance.random() < 1 / 2:
        return chance.choice(POOL)
    if chance.random() < 1 / 4:
        return things.here / "file"
    return str(mutations.value(chance)).replace("\0", "").encode("utf-8", "replace").decode()


KINDS: dict[str, tuple[Maker, float]] = {
    "configurations": (configurations, 0.18),
    "weights": (weights, 0.14),
    "records": (records, 0.18),
    "recipes": (recipes, 0.17),
    "texts": (texts, 0.12),
    "evaluations": (evaluations, 0.09),
    "options": (options, 0.12),
}
DEFECT = re.compile(r"Traceback|unexpected \w*(Error|Exception|Exit)\b")


@contextmanager
def hurried() -> Iterator[None]:
    """Ends a case that stands still."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def complaint(words: Made, outcome: Outcome, things: Things) -> str | None:
    """The fault in the end of a case; None if there is none."""
    if DEFECT.search(outcome.err):
        return "a defect"
    if "not done after" in outcome.err:
        return "a hang"
    if outcome.code not in (0, 1, 2, 3):
        return f"exit code {outcome.code}"
    lines = outcome.err.splitlines()
    if outcome.code in (1, 2) and not (lines and lines[-1].startswith(("compress: ", "Error: "))):
        return "no reason"
    if outcome.code == 2 and things.output.exists():
        return "refused, and yet written"
    if outcome.code == 0 and words[0] in ("quantize", "prune") and not (things.output / "compress.json").is_file():
        return "done, and nothing written"
    if outcome.code == 0 and words[0] == "verify" and damaged(Path(str(words[1])), things.small):
        return "verified, and damaged"
    return None


def damaged(out: Path, whole: Path) -> bool:
    """True where the tensors of a checkpoint are not those of another."""
    if out == whole:
        return False
    with (
        safe_open(whole / "model.safetensors", "pt") as good,
        safe_open(out / "model.safetensors", "pt") as other,
    ):
        if set(good.keys()) != set(other.keys()):
            return True
        return not all(same(good.get_tensor(name), other.get_tensor(name)) for name in good.keys())  # noqa: SIM118


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a.view(torch.uint8) == b.view(torch.uint8)).all())


@pytest.fixture
def things(llama: Path, llama_w4: Path, token_file: Path, tmp_path: Path) -> Things:
    return Things(llama, llama_w4, token_file, tmp_path / "case")


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_inputs_end_well_or_with_one_line(kind: str, things: Things, monkeypatch: pytest.MonkeyPatch) -> None:
    make, share = KINDS[kind]
    monkeypatch.chdir(things.here.parent)
    ends: Counter[int] = Counter()
    wrong: list[str] = []
    for number in range(math.ceil(CASES * share)):
        chance = random.Random(f"{SEED} {kind} {number}")
        shutil.rmtree(things.here, ignore_errors=True)
        things.here.mkdir()
        words = make(things, chance)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            with hurried():
                outcome = command(*words)
        except BaseException as error:  # noqa: BLE001 - that is a finding
            outcome = Outcome(-1, "", repr(error))
        ends[outcome.code] += 1
        found = complaint(words, outcome, things)
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > GROWTH // 1024:
            found = "too much memory"
        if found is not None:
            wrong.append(f"{found}: case {number}: {' '.join(map(str, words))}\n  {outcome.code} {outcome.err[-400:]}")
    print(f"{kind}: {sum(ends.values())} cases, seed {SEED}: exit codes {dict(sorted(ends.items()))}")
    assert not wrong, f"{len(wrong)} of {sum(ends.values())}:\n" + "\n".join(wrong[:40])
