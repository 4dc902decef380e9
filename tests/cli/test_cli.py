"""The command line as a person meets it: what is printed where, what is left on disk. What it refuses: `bad_input`.

Work that fails: exit code 1, one line after the progress, finished blocks kept. Most commands run inside this process
(`commands.command`).
"""

import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import PLAIN_GPTQ, Desk, Outcome, command, configured, half, in_this_process, last_line
from places import SHARED
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint

import compress
from compress.base.errors import InputError
from compress.checkpoint.read import source
from compress.checkpoint.write.directory import Directory
from compress.cli import progress
from compress.data import text as data
from compress.evaluation.cost import size as sizes
from compress.evaluation.evaluation_file import read_evaluation
from compress.evaluation.report.verdict import verdict
from compress.evaluation.report.wording import with_error
from compress.jobs import verify as verification
from compress.kernels.notes import note_once

FAST = [word for key, value in PLAIN_GPTQ.items() for word in ("--set", f"{key}={value}")]
COMMANDS = (
    "quantize",
    "prune",
    "evaluate",
    "report",
    "inspect",
    "generate",
    "verify",
    "methods",
    "recipes",
    "demo",
    "bench",
)


# --- what exists is not lost ---------------------------------------------------------------------------------------


def tree(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def weights(directory: Path) -> dict[str, bytes]:
    """The files of a result that hold no time and no command line."""
    return {name: data for name, data in tree(directory).items() if name != "compress.json"}


def test_an_output_that_exists_is_kept_without_overwrite_and_replaced_with_it(desk: Desk) -> None:
    assert desk.rtn(desk.model).code == 0
    before = tree(desk.output)
    outcome = desk.rtn(desk.model, "--scheme", "w3a16")
    assert outcome.code == 2
    assert "output exists" in last_line(outcome)
    assert "--overwrite" in last_line(outcome)
    assert tree(desk.output) == before
    assert desk.rtn(desk.model, "--scheme", "w3a16", "--overwrite").code == 0
    rows = {row["name"]: row["scheme"] for row in command("inspect", desk.output, "--json", "-").json()["layers"]}
    assert rows["model.layers.0.mlp.up_proj"].startswith("w3a16")
    assert [*rows][:3] == ["lm_head.weight", "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"]
    assert sorted(p.name for p in desk.here.iterdir()) == ["output"]


@pytest.mark.parametrize("kind", ["directory", "file", "model"])
def test_an_output_of_somebody_else_is_never_overwritten(desk: Desk, kind: str) -> None:
    if kind == "file":
        desk.output.write_text("mine")
    elif kind == "directory":
        desk.output.mkdir()
        (desk.output / "thesis.tex").write_text("mine")
    else:
        shutil.copytree(desk.model, desk.output)
    before = desk.output.read_bytes() if kind == "file" else tree(desk.output)
    outcome = desk.rtn(desk.model, "--overwrite")
    assert outcome.code == 2
    assert "not a checkpoint of this tool" in last_line(outcome)
    assert (desk.output.read_bytes() if kind == "file" else tree(desk.output)) == before


def test_a_directory_in_the_way_of_a_working_directory_is_kept(desk: Desk) -> None:
    assert desk.rtn(desk.model).code == 0
    before = tree(desk.output)
    for name, content in {"thesis.tex": "mine", "progress.json": '{"identity": "", "blocks": {}}'}.items():
        other = desk.here / "output.partial"
        other.mkdir()
        (other / name).write_text(content)
        outcome = desk.rtn(desk.model, "--scheme", "w3a16", "--overwrite")
        assert outcome.code == 2
        assert "output.partial" in last_line(outcome)
        assert "move" in last_line(outcome)
        assert tree(other) == {name: content.encode()}
        assert tree(desk.output) == before
        shutil.rmtree(other)


def test_overwriting_takes_nothing_but_what_a_run_wrote(desk: Desk) -> None:
    """A former result that a person kept beside the output, and a file of a person's inside it."""
    assert desk.rtn(desk.model).code == 0
    kept = Path(shutil.copytree(desk.output, desk.here / "output.replaced"))
    before = tree(kept)
    assert desk.rtn(desk.model, "--scheme", "w3a16", "--overwrite").code == 0
    assert tree(kept) == before
    (desk.output / "thesis.tex").write_text("mine")
    before = tree(desk.output)
    outcome = desk.rtn(desk.model, "--overwrite")
    assert outcome.code == 2
    assert "holds thesis.tex, which no run wrote; move it" in last_line(outcome)
    assert tree(desk.output) == before
    shutil.rmtree(desk.output)
    desk.output.mkdir()
    (desk.output / "compress.json").write_text('{"layers": []}')
    outcome = desk.rtn(desk.model, "--overwrite")
    assert "not a checkpoint of this tool" in last_line(outcome)
    assert (desk.output / "compress.json").exists()


# --- work that fails -----------------------------------------------------------------------------------------------


def damaged(desk: Desk, tensor: str, value: float, **other: Callable[[Path], None]) -> Path:
    def edit(path: Path) -> None:
        tensors = load_file(path)
        tensors[tensor] = tensors[tensor].float()
        tensors[tensor][0] = value
        save_file(tensors, path, metadata={"format": "pt"})

    return desk.copy(model__safetensors=edit, **other)


def test_finite_weights_for_which_the_dtype_has_no_room_are_no_damage(desk: Desk) -> None:
    model = damaged(desk, "model.layers.1.mlp.up_proj.weight", 1e7, config__json=configured(dtype="float16"))
    outcome = desk.rtn(model)
    assert (outcome.code, desk.output.exists()) == (2, False)
    assert "its files are finite, in float32, and the dtype float16 of config.json has no room" in outcome.err
    assert "damaged" not in outcome.err


@pytest.mark.parametrize(
    ("name", "value"),
    [("layers.1.mlp.up_proj", "nan"), ("embed_tokens", "nan"), ("norm", "inf"), ("layers.0.input_layernorm", "-inf")],
)
def test_a_weight_that_is_not_a_number_is_refused_wherever_it_lies(desk: Desk, name: str, value: str) -> None:
    model = damaged(desk, f"model.{name}.weight", float(value))
    outcome = desk.rtn(model)
    assert outcome.code == 2
    assert outcome.err.startswith(f"compress: model.{name}.weight has non-finite weights"), outcome.err
    assert not desk.output.exists()


def test_activations_that_are_not_numbers_stop_the_run_at_their_layer(desk: Desk) -> None:
    model = desk.copy(config__json=configured(dtype="float32"))
    tensors = {name: tensor.float() for name, tensor in load_file(model / "model.safetensors").items()}
    tensors["model.layers.0.input_layernorm.weight"].fill_(3e38)  # finite, and what it multiplies is not any more
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    outcome = desk.gptq(desk.ids(torch.zeros(2, 9, dtype=torch.int64)), *FAST, model=model)
    assert outcome.code == 1
    assert "the input of model.layers.0.self_attn.q_proj has non-finite values" in last_line(outcome)
    assert not desk.output.exists()
    # Nothing was finished: nothing is in the way of the next try.
    assert desk.gptq(desk.tokens, *FAST).code == 0


@pytest.mark.parametrize("role", ["model", "reference"])
def test_logits_that_are_not_numbers_are_no_figures(desk: Desk, role: str) -> None:
    other = damaged(desk, "model.norm.weight", float("nan"))
    model, reference = (other, desk.model) if role == "model" else (desk.model, other)
    outcome = command("evaluate", model, "--reference", reference, "--text", desk.tokens)
    assert outcome.code == 1
    assert f"the {role} gives logits that are not finite" in last_line(outcome)


def test_a_full_memory_is_one_line_that_says_what_takes_less(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compress, "quantize", lambda *_, **__: torch.empty(1 << 55))
    outcome = desk.rtn(desk.model)
    assert outcome.code == 1
    assert "out of memory" in last_line(outcome)
    assert "--spill FOLDER" in last_line(outcome)


def test_a_defect_is_one_line_and_its_traceback_is_there_on_request(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the roof\nis on fire")

    monkeypatch.setattr(compress, "quantize", broken)
    outcome = desk.rtn(desk.model)
    assert outcome.code == 1
    assert "unexpected RuntimeError: the roof is on fire (set COMPRESS_TRACEBACK=1" in last_line(outcome)
    monkeypatch.setenv("COMPRESS_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="the roof"):
        desk.rtn(desk.model)


def test_an_interrupt_is_one_line_that_says_how_to_go_on_where_there_is_something(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def stopped_after(blocks: int) -> Callable[..., None]:
        return lambda _, done, total, what: stopped() if what and done == blocks else None

    partial = desk.output.with_name("output.partial")
    for blocks, kept in ((1, "1 finished block is"), (2, "2 finished blocks are")):
        with monkeypatch.context() as patch:
            patch.setattr(progress.Lines, "step", stopped_after(blocks))
            outcome = desk.rtn(desk.model)
        assert outcome.code == 130
        assert last_line(outcome) == f"compress: stopped; {kept} kept in {partial}: run again with --resume"
        shutil.rmtree(partial)
    with monkeypatch.context() as patch:
        patch.setattr(progress.Lines, "step", stopped)
        outcome = desk.rtn(desk.model)
    assert (outcome.code, last_line(outcome)) == (130, "compress: stopped")
    assert not partial.exists()
    with monkeypatch.context() as patch:
        patch.setattr(verification, "in_fresh_process", stopped)
        outcome = desk.rtn(desk.model, "--verify")
    assert outcome.code == 130
    assert last_line(outcome) == f"compress: stopped; 2 finished blocks are kept in {partial}: run again with --resume"
    assert not desk.output.exists()  # it has its name when it is verified
    assert desk.rtn(desk.model, "--resume").code == 0
    monkeypatch.setattr(source, "weight_files", stopped)
    for words in (["evaluate", desk.model, "--text", "demo"], ["inspect", desk.model], ["bench", desk.model]):
        assert command(*words) == Outcome(130, "", "compress: stopped\n")


def test_a_verification_that_cannot_start_says_so_and_how_to_go_on(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = desk.file("python", "")
    monkeypatch.setattr(sys, "executable", str(interpreter))
    monkeypatch.setattr("compress.base.fresh_process.subprocess", subprocess)
    outcome = desk.rtn(desk.model, "--verify")
    assert outcome.code == 1
    partial = desk.output.with_name("output.partial")
    assert last_line(outcome) == (
        f"compress: {desk.output} cannot be verified, so it stays {partial / 'model'}: '{interpreter}' does not start "
        "as a process of its own (Permission denied); make it one that this user may run, or run again with --resume "
        "--no-verify"
    )
    assert not desk.output.exists()
    assert desk.rtn(desk.model, "--resume", "--no-verify").code == 0
    assert desk.output.is_dir()


@pytest.mark.parametrize(
    ("number", "says"), [(signal.SIGTERM, ""), (signal.SIGHUP, ", as of a terminal that was closed")]
)
def test_a_signal_is_one_line_that_says_how_to_go_on_and_ends_with_its_code(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, says: str
) -> None:
    def terminated(_: object, done: int, total: int, what: str) -> None:
        if done == 1:
            os.kill(os.getpid(), number)

    before, partial = signal.signal(number, signal.SIG_DFL), desk.output.with_name("output.partial")
    monkeypatch.setattr(progress.Lines, "step", terminated)
    outcome = desk.rtn(desk.model)
    assert outcome.code == 128 + number
    kept = f"1 finished block is kept in {partial}: run again with --resume"
    assert last_line(outcome) == f"compress: stopped by {number.name}{says}; {kept}"
    train = ["--train", "steps=2", "--calibration", desk.tokens, "--group-size", 32]
    outcome = command("qat", desk.model, *train, "--output", desk.here / "trained")
    assert outcome.code == 128 + number
    assert last_line(outcome).startswith(f"compress: stopped by {number.name}")
    assert signal.signal(number, before) is signal.SIG_DFL


class Deaf:
    """Raises what a signal raises where Python loses it: while an object is removed."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)
        time.sleep(0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_arrives_while_an_object_is_removed_is_not_lost(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def lost(_: object, done: int, total: int, what: str) -> None:
        if done == 1:
            Deaf(number)
            time.sleep(5)  # the signal ends it

    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    before = signal.signal(number, usual)
    monkeypatch.setattr(progress.Lines, "step", lost)
    outcome = desk.rtn(desk.model)
    signal.signal(number, before)
    assert outcome.code == 128 + number, outcome


@pytest.mark.full
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&- <&-"])
def test_closed_streams_are_no_error_and_get_no_words_of_others(desk: Desk, closed: str) -> None:
    words = f"'{sys.executable}' -m compress quantize '{desk.model}' --method rtn --group-size 32 --no-verify"
    done = subprocess.run(["bash", "-c", f"{words} --output '{desk.output}' {closed}"], capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert compress.verify(desk.output)
    asked = f"'{sys.executable}' -m compress methods --json - >&-"
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True)
    assert done.returncode == 2
    assert "'-' is standard output, which is closed; give a file" in done.stderr


def test_a_reader_that_goes_away_is_no_error() -> None:
    """As `compress methods | head`: quiet, and the exit code of a program that SIGPIPE ends."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "compress", "methods"], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@contextmanager
def files_of_at_most(size: int) -> Iterable[None]:
    """A full disk, as far as one file can tell: writing beyond `size` bytes fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# The first block takes 2 bits a weight, the second 8: a limit between the two stops the run in the second.
TWO_SIZES = """
passes:
- gptq: {scheme: w2a16, group_size: 32, drift: 0.0, clip: false, refit: 0, sweeps: 0}
  only: ["model.layers.0.*"]
- gptq: {scheme: w8a16, group_size: 32, drift: 0.0, clip: false, refit: 0, sweeps: 0}
  only: ["model.layers.1.*"]
"""
BETWEEN = 24_000


def test_a_full_disk_keeps_the_finished_blocks_and_resume_ends_in_the_same_files(desk: Desk) -> None:
    recipe = desk.file("recipe.yaml", TWO_SIZES)
    words = ["quantize", desk.model, "--recipe", recipe, "--calibration", desk.tokens]
    words = [*map(str, words), "--output", str(desk.output)]
    with files_of_at_most(BETWEEN):
        done = command(*words)
    assert done.code == 1, done.err
    line = last_line(done)
    assert "cannot write" in line
    assert "block-00001.safetensors" in line
    assert "--resume" in line
    assert not desk.output.exists()
    partial = desk.here / "output.partial"
    assert list(json.loads((partial / "progress.json").read_text())["blocks"]) == ["model.layers.0"]

    resumed = command(*words, "--resume")
    assert resumed.code == 0, resumed
    words[-1] = str(desk.here / "uninterrupted")
    assert command(*words).code == 0
    assert weights(desk.output) == weights(desk.here / "uninterrupted")
    assert not partial.exists()


def test_a_full_disk_at_the_end_keeps_the_blocks(desk: Desk) -> None:
    with files_of_at_most(100_000):  # blocks are small; embedding and head together are not
        outcome = desk.rtn(desk.model)
    assert outcome.code == 1
    assert "cannot write rest-00000.safetensors" in last_line(outcome)
    assert not desk.output.exists()
    resumed = desk.rtn(desk.model, "--resume")
    assert resumed.code == 0
    assert desk.rtn(desk.model, "--output", desk.here / "again").code == 0
    assert weights(desk.output) == weights(desk.here / "again")


@pytest.mark.first
@pytest.mark.parametrize("full_at", [1, 2])
def test_a_full_disk_while_training_writes_a_checkpoint_keeps_the_one_before(
    desk: Desk, full_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full at the first checkpoint, when nothing is kept, or at the second."""
    words = ["qat", desk.model, "--group-size", 32, "--calibration", desk.tokens, "--output", desk.output]
    words += [word for key, value in {"steps": 3, "save_every": 1}.items() for word in ("--train", f"{key}={value}")]
    saved, save = [], checkpoint.save

    def saving(*given: Any, **options: Any) -> Any:
        saved.append(options)
        with files_of_at_most(3000 if len(saved) == full_at else resource.RLIM_INFINITY):
            return save(*given, **options)

    monkeypatch.setattr(checkpoint, "save", saving)
    monkeypatch.setattr("compress.base.fresh_process.subprocess", SimpleNamespace(run=in_this_process))
    outcome = command(*words, "--quiet")
    partial = desk.output.with_name("output.partial")
    line = f"compress: cannot write the checkpoint of training {partial}/training/0/step-{full_at}: File too large"
    kept = f"; what was trained so far is kept in {partial}: make room and run again with --resume" * (full_at - 1)
    assert (outcome.code, outcome.err) == (1, f"{line}{kept}\n")
    assert [path.name for path in partial.glob("training/0/step-*")] == ["step-1"] * (full_at - 1)
    assert partial.exists() == (full_at > 1)
    if full_at > 1:
        resumed = command(*words, "--resume", "--json", "-", "--quiet")
        assert resumed.code == 0, resumed
        assert resumed.json()["training"][0]["resumed"] == 1


def test_a_full_disk_promises_nothing_that_is_not_there_and_leaves_no_half_of_a_file(desk: Desk) -> None:
    with files_of_at_most(2000):  # the first block does not fit
        outcome = desk.rtn(desk.model)
    assert outcome.code == 1
    assert "cannot write block-00000.safetensors" in last_line(outcome)
    assert "kept" not in last_line(outcome)
    assert not desk.output.with_name("output.partial").exists()
    figures = desk.file("figures.json", before := '{"layers": [], "size": {}}')
    link = desk.here / "link.json"
    link.symlink_to(figures)
    for target in (figures, link):
        with files_of_at_most(100):
            outcome = command("inspect", desk.model, "--json", target, "--quiet")
        assert (outcome.code, outcome.err) == (1, f"compress: cannot write {target}: File too large\n")
        assert figures.read_text() == before
        assert sorted(path.name for path in desk.here.iterdir()) == ["figures.json", "link.json"]


@pytest.mark.full
def test_a_full_disk_is_said_of_an_export_whose_library_counts_numbers(desk: Desk) -> None:
    pytest.importorskip("gguf")
    assert desk.rtn(desk.model).code == 0
    with files_of_at_most(200_000):
        outcome = command("export", desk.output, "--to", "gguf", "--output", desk.here / "file")
    assert outcome.code == 1
    assert last_line(outcome).endswith(": the disk is full, or takes no larger file")


def test_what_a_run_leaves_that_is_killed_once_its_output_has_its_name_goes_with_resume(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = desk.output.with_name("output.partial")
    with monkeypatch.context() as patch:
        patch.setattr(Directory, "_recover", lambda _: None)
        patch.setattr(Directory, "release", lambda place: place._lock.close())
        assert desk.rtn(desk.model).code == 0
    assert (partial / "progress.json").exists()
    resumed = desk.rtn(desk.model, "--resume")
    assert resumed.code == 0
    assert "is complete: nothing of it is left to do" in resumed.err
    assert not partial.exists()


@pytest.fixture
def stopped(desk: Desk) -> Desk:
    """A run that has finished both blocks and nothing else."""
    with files_of_at_most(100_000):
        assert desk.rtn(desk.model).code == 1
    return desk


def test_an_unfinished_run_is_neither_dropped_nor_mixed_with_another(stopped: Desk) -> None:
    partial = stopped.here / "output.partial"
    before = tree(partial)
    outcome = stopped.rtn(stopped.model)
    assert outcome.code == 2
    assert "unfinished run; go on with --resume or drop it with --overwrite" in last_line(outcome)
    outcome = stopped.rtn(stopped.model, "--resume", "--scheme", "w3a16")
    assert outcome.code == 2
    assert "of another run (model, recipe, calibration data or version differ)" in last_line(outcome)
    assert tree(partial) == before
    assert stopped.rtn(stopped.model, "--scheme", "w3a16", "--overwrite").code == 0
    assert not partial.exists()


@pytest.mark.parametrize("place", ["blocks/mine.txt", "model/thesis.tex", "training/0/step-3/mine", "blocks/mine/a"])
def test_a_file_of_somebody_else_in_an_unfinished_run_stays(stopped: Desk, place: str) -> None:
    partial = stopped.output.with_name("output.partial")
    mine = partial / place
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")
    for more in (["--overwrite"], ["--resume"]):
        outcome = stopped.rtn(stopped.model, *more)
        assert outcome.code == 2
        assert f"{partial} is in the way: it holds {place.partition('/a')[0]}, which no run left" in outcome.err
    assert mine.read_text() == "mine"


def test_a_file_that_is_put_into_a_running_run_stays(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, taken = desk.output.with_name("output.partial") / "blocks" / "mine.txt", Directory.take_name
    monkeypatch.setattr(
        Directory, "take_name", lambda self, overwrite: (mine.write_text("mine"), taken(self, overwrite))
    )
    assert desk.rtn(desk.model).code == 0
    assert mine.read_text() == "mine"
    assert [path for path in mine.parents[1].rglob("*") if path.is_file()] == [mine]


def test_a_damaged_block_of_an_unfinished_run_is_refused(stopped: Desk) -> None:
    half(stopped.here / "output.partial" / "blocks" / "block-00000.safetensors")
    outcome = stopped.rtn(stopped.model, "--resume")
    assert outcome.code == 2
    assert "block-00000.safetensors of the unfinished run cannot be read" in last_line(outcome)
    assert "--overwrite" in last_line(outcome)


def test_resume_with_nothing_to_go_on_with_says_so(desk: Desk) -> None:
    outcome = desk.rtn(desk.model, "--resume")
    assert outcome.code == 0
    assert "note: " in outcome.err
    assert "no finished block of an earlier run for output: started from the beginning" in outcome.err
    assert any("no finished block" in note for note in json.loads((desk.output / "compress.json").read_text())["notes"])


# --- what is printed where -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_help_mentions_every_option(name: str) -> None:
    from compress.cli.main import cli

    outcome = command(name, "--help")
    assert outcome.code == 0
    assert outcome.err == ""
    assert cli.commands[name].help.splitlines()[0][:40] in " ".join(outcome.out.split())
    for parameter in cli.commands[name].params:
        context = [None] if signature(parameter.make_metavar).parameters else []  # click 8.2 asks for one
        is_option = parameter.param_type_name == "option"
        for word in parameter.opts if is_option else [parameter.make_metavar(*context)]:
            assert word in outcome.out


def test_the_help_of_prune_names_every_method_that_makes_a_mask() -> None:
    from compress.passes.protocol.recipe import PASSES, pass_class

    masks = [name for name in PASSES if pass_class(name).writes == "mask"]
    said = " ".join(command("prune", "--help").out.split())
    assert f"{', '.join(masks[:-1])} or {masks[-1]}: see `compress methods`" in said


def test_help_of_the_whole_names_every_command_with_its_sentence() -> None:
    outcome = command("--help")
    assert outcome.code == 0
    for name in COMMANDS:
        line = next(li for li in outcome.out.splitlines() if re.match(rf"  {name}\s", li))
        assert not line.endswith("..."), line


def test_version_is_that_of_the_package() -> None:
    assert command("--version").out == f"compress, version {compress.__version__}\n"


def test_methods_lists_every_method_in_a_line() -> None:
    from compress.passes.protocol.recipe import PASSES

    lines = command("methods").out.splitlines()
    assert [line.split()[0] for line in lines] == list(PASSES)


def test_methods_gptq_shows_source_and_an_option_a_line_with_its_default_and_what_it_may_be() -> None:
    from compress.passes.protocol.recipe import options_of

    about, _, table = command("methods", "gptq").out.partition("\noption ")
    assert "arXiv 2210.17323" in about
    lines = [line.split(maxsplit=2) for line in table.splitlines()[1:] if not line.startswith(" ")]
    assert [(name, default) for name, default, _ in lines] == [
        (key, str(field.default).lower()) for key, field in options_of(compress.GPTQ).items()
    ]
    assert {name: words for name, _, words in lines}["act_order"].startswith("none, static, group: ")
    assert max(map(len, table.splitlines())) <= 110


def test_methods_shows_the_card_of_a_pass_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bases may be named in any way, and its defaults need no literals."""
    (tmp_path / "pulling.py").write_text(
        "from dataclasses import dataclass, field\nfrom typing import ClassVar\nimport compress\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Pulled(compress.RTN):\n"
        '    """Pull weights towards zero, then round them."""\n\n    name: ClassVar[str] = "pulled"\n\n'
        '    pull: float = 1 / 4\n    """0 to 1: share by which weights shrink."""\n\n'
        "    parts: tuple[str, ...] = field(default_factory=lambda: ('all',))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    outcome = command("methods", "pulling:Pulled")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("Pull weights towards zero, then round them.\n\noption ")
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in outcome.out.splitlines()[3:] if line[0] != " "}
    assert lines["pull"] == ["0.25", "0 to 1: share by which weights shrink"]
    assert lines["parts"] == ["('all',)"]
    assert lines["grid"][1].startswith("signed-scale, symmetric")


@pytest.mark.full
def test_nothing_in_the_working_directory_is_imported_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for a recipe, which may be anybody's, nor in place of a library."""
    (tmp_path / "r.yaml").write_text("passes:\n - 'beside:X': {}\n")
    for name in ("beside", "click", "yaml", "torch"):
        (tmp_path / f"{name}.py").write_text("import pathlib\npathlib.Path('RUN').touch()\nimport compress as X\n")
    words = [sys.executable, "-m", "compress"]
    asked = {"recipe": ["plan", "demo", "--recipe", "r.yaml"], "method": ["methods", "beside:X"]}
    said = {}
    for name, more in asked.items():
        done = subprocess.run([*words, *more], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2, done.stderr
        said[name] = done.stderr.splitlines()[-1]
    assert not (tmp_path / "RUN").exists()
    assert "step 1: 'beside:X' is code of a module, which a recipe does not import" in said["recipe"]
    assert "No module named 'beside'" in said["method"]
    monkeypatch.syspath_prepend(tmp_path)  # as PYTHONPATH does
    monkeypatch.chdir(tmp_path)
    assert "is code of a module" in last_line(command("plan", "demo", "--recipe", "r.yaml"))
    assert not (tmp_path / "RUN").exists()
    assert "is no subclass of compress.Pass" in last_line(
        command("plan", "demo", "--recipe", "r.yaml", "--plugin", "beside")
    )
    assert (tmp_path / "RUN").exists()


def test_recipes_lists_every_built_in_recipe_and_prints_one_as_it_is() -> None:
    from compress.passes.protocol.recipe import BUILT_IN

    lines = command("recipes").out.splitlines()
    assert [line.split()[0] for line in lines] == list(BUILT_IN)
    assert all(30 < len(line) < 140 for line in lines)
    for name, path in BUILT_IN.items():
        assert command("recipes", name).out == path.read_text(encoding="utf-8")


def test_a_built_in_recipe_runs_by_its_name_and_with_another_group_size(desk: Desk) -> None:
    words = ["quantize", desk.model, "--recipe", "w4a16-mixed", "--calibration", desk.tokens]
    words += ["--samples", 2]
    named = command(*words, "--output", desk.here / "named")
    assert named.code == 0, named
    other = command(*words, "--group-size", 16, "--output", desk.here / "other")
    assert other.code == 0, other
    assert other.err.startswith("note: --group-size 16 instead of what recipe 'w4a16-mixed' gives gptq\n")
    for output, size in (("named", 32), ("other", 16)):  # 32: the largest that divides 64 and 96
        record = json.loads((desk.here / output / "compress.json").read_text())
        found = {"attn" in layer["name"]: layer["group_size"] for layer in record["layers"]}
        assert found == {True: None, False: size}
    refused = desk.recipe("passes: [rtn: {group_size: -1}]", "--group-size", 16)
    assert refused.code == 2
    assert "no pass of the recipe has groups, so group size 16 has no say" in refused.err.splitlines()[-1]


def test_a_method_without_statistics_takes_calibration_data_and_says_that_it_reads_none(desk: Desk) -> None:
    more = ["--samples", 3, "--length", 9, "--batch-size", 2]
    for method, given in (("rtn", ["--calibration", "no/such.txt", *more]), ("rtn", [])):
        outcome = desk.rtn(desk.model, "--method", method, *given, "--output", desk.here / f"{len(given)}")
        assert outcome.code == 0, outcome
        assert outcome.err.startswith("note: no pass uses calibration data: what is given stays unread\n") == bool(
            given
        )
    assert weights(desk.here / "8") == weights(desk.here / "0")


def test_json_on_standard_output_is_all_there_is(desk: Desk, llama_w4: Path) -> None:
    for arguments in (
        ["evaluate", llama_w4, "--reference", desk.model, "--text", desk.tokens, "--no-keep"],
        ["inspect", llama_w4],
        ["quantize", desk.model, "--method", "rtn", "--group-size", 32, "--output", desk.output],
    ):
        outcome = command(*arguments, "--json", "-")
        assert outcome.code == 0
        assert isinstance(json.loads(outcome.out), dict)  # fails for a word before or after


def test_json_in_a_file_leaves_the_table_on_standard_output(desk: Desk) -> None:
    target = desk.here / "figures.json"
    outcome = command("evaluate", desk.model, "--text", desk.tokens, "--json", target)
    assert outcome.code == 0
    assert "perplexity" in outcome.out
    assert read_evaluation(target).tokens == 6 * 15


def test_evaluate_says_what_its_figures_are_of(desk: Desk, llama_w4: Path) -> None:
    file = desk.here / "f"
    words = ("--reference", desk.model, "--text", desk.tokens, "--no-keep", "--json", file)
    table = command("evaluate", llama_w4, *words)
    found = read_evaluation(file)
    record = json.loads((llama_w4 / "compress.json").read_text())
    assert (found.model.name, found.reference.name) == (llama_w4.name, desk.model.name)  # not this machine's folders
    assert found.recipe == record["identity"]["recipe"]
    (text,) = found.texts
    ids = torch.load(desk.tokens, weights_only=True)
    assert (text.name, text.sha256) == (desk.tokens.name, hashlib.sha256(ids.numpy().tobytes()).hexdigest())
    facts = found.provenance
    # Quoted by people who have other folders.
    assert facts["command"].startswith(f"compress evaluate {llama_w4.name} --reference {desk.model.name} --text ")
    assert (facts["versions"]["compress"], facts["versions"]["torch"]) == (compress.__version__, version("torch"))
    # A directory that is no checkout has no commit; a machine without a GPU no CUDA.
    assert all(value is not None for name, value in facts.items() if name not in ("commit", "modified", "cuda"))
    assert found.bytes < found.reference_size.bytes
    assert table.out.startswith(f"{verdict(found)}\n")
    assert with_error(text.figures["kl_mean"]) in table.out
    command("evaluate", desk.model, "--text", desk.tokens, "--json", file)
    plain = read_evaluation(file)
    assert plain.recipe is plain.reference is plain.log_perplexity_ratio is None


def test_quiet_prints_nothing_on_success(desk: Desk, llama_w4: Path) -> None:
    for arguments in (
        ["quantize", desk.model, "--method", "rtn", "--group-size", 32, "--output", desk.output],
        ["evaluate", llama_w4, "--text", desk.tokens, "--no-keep"],
        ["inspect", llama_w4],
    ):
        assert command(*arguments, "--quiet") == Outcome(0, "", "")


def test_progress_is_plain_lines_on_standard_error(desk: Desk) -> None:
    outcome = desk.gptq(desk.tokens, *FAST)
    lines = outcome.err.splitlines()
    assert lines[0] == "plan: 14 layers in w4a16 g32 symmetric; unchanged: 1 embedding, 1 output head"
    assert re.fullmatch(
        r"plan: 632.62 KiB -> [\d.]+ KiB, [\d.]+ [KM]iB of disk \(.* free\), about .* of memory", lines[1]
    )
    assert lines[2] == "quantize: 0/2"
    assert re.fullmatch(r"quantize: 1/2 model\.layers\.0, [\d,.]+ tokens/s, \d+ s left", lines[3])
    # A fresh process verifies what was written.
    assert re.fullmatch(r"quantize: 2/2 model\.layers\.1, [\d,.]+ tokens/s, \d+ s left", lines[4])
    assert lines[5:] == ["verify: the output, in a fresh process"]
    assert "\x1b" not in outcome.err + outcome.out
    assert "quantize: " not in outcome.out


def test_quantize_says_what_it_did(desk: Desk) -> None:
    outcome = desk.gptq(desk.tokens, *FAST, "--ignore", "*.down_proj")
    assert "12 layers compressed" in outcome.out
    assert "1 embedding, 2 ignored by '*.down_proj', 1 output head" in outcome.out
    assert "against" in outcome.out  # the loss of plain rounding
    assert "verified in a fresh process: 12 layers bit for bit" in outcome.out
    assert "not verified: run `compress verify`" in desk.rtn(desk.model, "--no-verify", "--overwrite").out


def test_fewer_samples_than_asked_for_are_said_before_the_work(desk: Desk) -> None:
    outcome = desk.gptq(desk.tokens, *FAST, "--samples", 9)
    assert outcome.code == 0
    assert "6 samples of 16 tokens, fewer than the 9 asked for" in outcome.err.splitlines()[0]
    record = json.loads((desk.output / "compress.json").read_text())
    assert any("fewer than the 9 asked for" in note for note in record["notes"])
    assert record["calibration"]["samples"] == 6


def test_weights_that_the_model_does_not_use_are_said(desk: Desk) -> None:
    outcome = desk.rtn(desk.copy(config__json=configured(num_hidden_layers=1)))
    assert outcome.code == 0
    assert "note: kept dense: layer behind those that the configuration counts, 9 tensors, " in outcome.err
    assert "like model.layers.1.input_layernorm.weight" in outcome.err


def test_settings_are_read_as_people_write_them(desk: Desk) -> None:
    words = ["--set", "damp=1e-2", "--set", "act-order=static", "--set", "clip=False", "--set", "drift=0"]
    assert desk.gptq(desk.tokens, *words, "--set", "refit=0", "--set", "sweeps=0").code == 0
    step = json.loads((desk.output / "compress.json").read_text())["identity"]["recipe"]["passes"][0]["gptq"]
    assert (step["damp"], step["act_order"], step["clip"], step["drift"]) == (0.01, "static", False, 0.0)


# --- the other commands --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["llama", "llama_w4"])
def test_generate_prints_text_that_starts_with_the_prompt(request: pytest.FixtureRequest, which: str) -> None:
    model = request.getfixturevalue(which)
    command("generate", model, "--prompt", "Once upon a time", "--tokens", 5)  # compiles kernels, and says so
    outcome = command("generate", model, "--prompt", "Once upon a time", "--tokens", 5)
    assert outcome.code == 0
    assert outcome.out.startswith("Once upon a time")
    assert len(outcome.out.strip()) > len("Once upon a time")
    assert outcome.err == ""
    again = command("generate", model, "--prompt", "Once upon a time", "--tokens", 5)
    assert again == outcome


def test_generate_says_the_same_compressed_and_dequantized(tmp_path: Path) -> None:
    compress.quantize("demo", compress.RTN(scheme="w4a16"), output=tmp_path / "out", verify=False)
    words = ["--prompt", "def read(path):", "--tokens", 24]
    compressed = command("generate", tmp_path / "out", *words)
    dense = command("generate", tmp_path / "out", *words, "--dequantize")
    assert compressed.code == 0, compressed.err
    assert compressed.out == dense.out
    rounded = command("generate", tmp_path / "out", *words, "--int8-activations")
    assert rounded.code == 0
    assert rounded.out.startswith("def read(path):")
    both = command("generate", tmp_path / "out", *words, "--dequantize", "--int8-activations")
    assert both.code == 2
    assert "do not apply" in both.err


def test_inspect_says_which_kernel_each_layer_gets(
    llama_w4: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = command("inspect", llama_w4, "--kernels", "--json", "-", "--device", "cpu")
    assert outcome.code == 0, outcome.err
    found = outcome.json()
    assert found["device"] == "cpu"
    assert len(found["layers"]) == 12
    for layer in found["layers"]:
        assert set(layer["kernels"]) == {"1", "8", "64", "512"}
        assert all(kernel.startswith(("cpu", "torch")) for kernel in layer["kernels"].values())
    assert {"the choice among products", "rounding column by column"} <= {each["about"] for each in found["libraries"]}
    for library in found["libraries"]:
        assert (library["instructions"] is None) is bool(library["why_not"])
    monkeypatch.setattr("compress.kernels.cpu.build.why_not", lambda name="gemm": ("no C++ compiler",))
    without = command("inspect", llama_w4, "--kernels", "--device", "cpu")
    assert "torch" in without.out
    assert "12 of 12 layers cannot be batch-invariant: model.layers.0." in without.out
    assert "the choice among products: no C++ compiler\n" in without.out
    assert "no C++" in without.out
    dense = command("inspect", llama, "--kernels")
    assert dense.code == 2
    assert "is not compressed" in dense.err
    alone = command("inspect", llama, "--device", "cpu")
    assert alone.code == 2
    assert "--kernels" in alone.err


def test_notes_of_the_kernels_are_shown_unless_quiet(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def noting(given: source.Source) -> list[sizes.TensorSize]:
        note_once("no compiled kernels")
        return real(given)

    real = sizes.tensor_sizes
    monkeypatch.setattr(sizes, "tensor_sizes", noting)
    for flags, shown in (((), True), (("--quiet",), False)):
        note_once.cache_clear()
        outcome = command("inspect", llama, *flags)
        assert (outcome.err == "note: no compiled kernels\n") is shown, outcome.err


def test_long_texts_are_announced_before_they_are_tokenized_unless_quiet(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = desk.file("long.txt", "Once upon a time. " * 120)
    for long, flags, shown in ((2000, (), True), (2000, ("--quiet",), False), (3000, (), False)):
        monkeypatch.setattr(data, "LONG", long)
        outcome = desk.gptq(text, "--length", 1_000_000, *flags)
        assert outcome.code == 2
        assert (f"note: tokenizing {text}: 0 million characters\n" in outcome.err) is shown, outcome.err


def test_generate_samples_by_its_seed(llama: Path) -> None:
    def sample(seed: int) -> str:
        words = ["--prompt", "Once", "--tokens", 12, "--temperature", 1, "--seed", seed]
        return command("generate", llama, *words).out

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_inspect_of_a_dense_checkpoint_lists_every_tensor(llama: Path) -> None:
    found = command("inspect", llama, "--json", "-").json()
    rows = {row["name"]: row for row in found["layers"]}
    assert set(rows) == set(load_file(llama / "model.safetensors"))
    assert rows["model.layers.0.mlp.down_proj.weight"] == {
        "name": "model.layers.0.mlp.down_proj.weight",
        "shape": [64, 96],
        "scheme": "f16",
        "bits": 16.0,
        "bytes": 64 * 96 * 2,
        "remark": "",
    }
    assert found["size"]["compressed_weights"] == 0
    assert "not compressed" in command("inspect", llama).out


def test_inspect_of_a_compressed_checkpoint_says_why_layers_were_left_alone(llama_w4: Path) -> None:
    found = command("inspect", llama_w4, "--json", "-").json()
    rows = {row["name"]: row for row in found["layers"]}
    packed = rows["model.layers.0.self_attn.q_proj"]
    assert packed["scheme"] == "w4a16 g32 symmetric"
    assert packed["bytes"] == 64 * 64 // 2 + 64 * 2 * 2 + 16  # codes, scales, shape
    assert packed["remark"].startswith("rtn")
    assert rows["model.layers.1.mlp.down_proj.weight"]["remark"] == "ignored by '*.down_proj'"
    assert rows["lm_head.weight"]["remark"] == "output head"
    assert rows["model.embed_tokens.weight"]["remark"] == "embedding"
    table = command("inspect", llama_w4).out
    assert "ignored by '*.down_proj'" in table
    assert "…" not in table  # nothing is cut where nobody can widen the window


# --- through a real process ----------------------------------------------------------------------------------------


def process(*arguments: object, cwd: Path) -> Outcome:
    """As installed, where nothing is imported from the current directory."""
    words = [sys.executable, "-P", "-m", "compress", *map(str, arguments)]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_the_installed_command_verifies_what_it_wrote_in_a_fresh_process(desk: Desk) -> None:
    """What lies where a person happens to be is not run by the verification, and the record does not say where."""
    pytest.importorskip("compressed_tensors", reason="transformers reads packed weights with it")
    words = ["--method", "rtn", "--group-size", 32, "--output", desk.output, "--json", "-"]
    desk.file("tokenize.py", "raise SystemExit('run')")
    outcome = process("quantize", desk.model, *words, cwd=desk.here)
    assert outcome.code == 0, outcome
    record = json.loads(outcome.out)
    assert record["verification"]["layers"] == 14
    assert record["verification"]["transformers"] == "compared"
    assert record["verification"]["logits_max_difference"] == 0.0
    written = (desk.output / "compress.json").read_text()
    assert json.loads(written)["verification"] == record["verification"]
    assert str(desk.here) not in written
    lines = outcome.err.splitlines()
    assert all(line.startswith(("plan: ", "quantize: ", "verify: ")) for line in lines), outcome.err


def test_several_processes_without_fsdp_are_refused(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    outcome = desk.rtn(desk.model)
    assert outcome.code == 2
    assert "several processes were started; add --fsdp" in last_line(outcome)
    assert not desk.output.exists()


@pytest.mark.slow  # by default, `run/test_real_models.py` holds the method to it, in Python
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the trained models beside the project")
def test_a_trained_model_loses_less_by_gptq_than_by_rounding(tmp_path: Path) -> None:
    model, tokens = SHARED / "models" / "babyllama-105", SHARED / "tokens"
    kl = {}
    for method in ("rtn", "gptq"):
        words = ["--calibration", tokens / "babyllama-105.calib.pt", "--samples", 16, *FAST] if method == "gptq" else []
        output = tmp_path / method
        words += ["--method", method, "--scheme", "w3a16", "--group-size", 32, "--output", output]
        assert command("quantize", model, *words).code == 0
        words = ["--reference", model, "--text", tokens / "babyllama-105.eval.pt", "--samples", 8, "--json", "-"]
        kl[method] = command("evaluate", output, *words).json()["texts"][0]["figures"]["kl_mean"]["value"]
    assert kl["gptq"] < 0.7 * kl["rtn"]


@pytest.mark.slow
def test_the_demo_compares_rounding_with_gptq(tmp_path: Path) -> None:
    outcome = command("demo", "--output", tmp_path)
    assert outcome.code == 0
    assert "RTN w3a16 g128" in outcome.out
    assert "GPTQ w3a16 g128" in outcome.out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["demo-w3a16-gptq", "demo-w3a16-rtn"]
    assert "exists" in last_line(command("demo", "--output", tmp_path))
    assert command("demo", "--output", tmp_path, "--overwrite", "--quiet").out == ""


def test_a_demo_that_is_stopped_names_no_option_that_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(_: object, done: int, total: int, what: str = "", **__: object) -> None:
        if what and done == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(progress.Lines, "step", stopped)
    assert last_line(command("demo")) == "compress: stopped"
    assert last_line(command("demo", "--output", tmp_path)) == "compress: stopped; run again with --overwrite"


@pytest.mark.parametrize(
    "cli",
    ["import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n", "def main():\n    raise KeyboardInterrupt\n"],
    ids=["importing", "before any command"],
)
def test_an_interrupt_before_the_command_is_one_line(tmp_path: Path, cli: str) -> None:
    package = tmp_path / "compress"
    package.mkdir()
    shutil.copy(Path(compress.__file__).with_name("__main__.py"), package)
    (package / "__init__.py").touch()
    (package / "cli").mkdir()
    (package / "cli" / "main.py").write_text(cli)
    words = [sys.executable, "-m", "compress", "--help"]
    # Whoever started these tests in the background has them ignore interrupts, and with them what they start.
    listening = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    done = subprocess.run(
        words, cwd=tmp_path, env={}, capture_output=True, text=True, check=False, preexec_fn=listening
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "compress: stopped\n")


def test_recovery_comes_behind_the_passes_of_layers() -> None:
    from compress.cli.commands.quantize import with_recovery

    passes = (compress.GPTQ(), compress.Embeddings())
    gptq, train, embeddings = with_recovery(passes, "1.5h")
    assert (gptq, embeddings) == passes
    assert (train.minutes, train.rows) == (90, 8)
    assert with_recovery(passes, None) == passes
    with pytest.raises(InputError, match="add such a method, or drop it"):
        with_recovery((compress.KVCache(),), "1.5h")


def test_an_effort_is_passes_and_says_which() -> None:
    from compress.cli.commands.quantize import passes_with_effort

    (plain,), notes = passes_with_effort("gptq", {"scheme": "w3a16"}, "default")
    assert (plain.clip, plain.refit, notes) == (True, 2, [])
    (fast,), notes = passes_with_effort("gptq", {"scheme": "w3a16", "sweeps": 1}, "fast")
    assert (fast.scheme, fast.clip, fast.refit, fast.sweeps) == ("w3a16", False, 0, 1)
    assert notes == ["--effort fast: gptq with clip=False, refit=0"]
    (fast,), _ = passes_with_effort("spqr", {}, "fast")
    assert (fast.search, fast.refit, fast.sweeps) == (False, 0, 0)
    for method, scheme, name in (
        ("gptq", "w3a16", "gptq"),
        ("gptq", "q3_k", "k-quants"),
        ("spqr", "w3a16", "spqr"),
        ("trellis", "w2a16", "trellis"),
    ):
        (best,), notes = passes_with_effort(method, {"scheme": scheme}, "best")
        assert (best.name, best.objective, notes) == (name, "loss", [f"--effort best: {method} with objective=loss"])


def test_embeddings_have_scales_as_the_method_has() -> None:
    from compress.cli.commands.quantize import passes_asked

    (rtn, embeddings), _ = passes_asked("rtn", None, None, None, None, {"scales": "float16"}, "w8a16", None)
    assert (rtn.scales, embeddings.scales) == ("float16", "float16")
