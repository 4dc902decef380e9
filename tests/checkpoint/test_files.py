"""Files that appear whole, weight files that are put together byte by byte, names without folders, and the caches."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import compress
from compress.base.errors import CheckpointError
from compress.checkpoint import scratch
from compress.checkpoint.files import WHOLE, checksum, write_named, write_whole
from compress.checkpoint.portable_names import command, portable
from compress.checkpoint.write import shards
from compress.checkpoint.write.directory import own_files, stranger_in
from compress.checkpoint.write.late_files import put_beside
from compress.kernels import cache_folder
from compress.kernels.notes import note_once
from compress.kernels.private_folders import candidates
from compress.kernels.tuning import table

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool, torch.float64)


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    """Neither one with the name of a scratch file nor one with the name of the file itself."""
    victim, page = tmp_path / "victim", tmp_path / "q.html"
    victim.write_text("years of work")
    for planted in ("q.html", "q.html.partial", "q.html.writing", ".q.html"):
        (tmp_path / planted).symlink_to(victim)
    write_named(page, "a heading")
    assert victim.read_text() == "years of work"
    assert not page.is_symlink()
    assert "a heading" in page.read_text()


def test_a_file_that_cannot_be_written_whole_stays_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    write_whole(path, "old")
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


class Killed(BaseException):
    """A process ends here: nothing is cleaned up behind it."""


@contextmanager
def killed_at(point: int) -> Iterator[None]:
    """Kills the process before (an odd point) or behind a call that changes the disk."""
    calls = 0

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*given: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if point == 2 * calls - 1:
                raise Killed
            result = call(*given, **options)
            if point == 2 * calls:
                raise Killed
            return result

        return asked

    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        patch.setattr(scratch.Scratch, "drop", lambda self: self.file.close())
        for module, name in ((os, "open"), (os, "fsync"), (Path, "replace")):
            patch.setattr(module, name, dying(getattr(module, name)))
        yield


def test_what_a_killed_process_leaves_beside_a_checkpoint_is_known_as_ours(
    llama_w4: Path, copy_of: Callable[[Path], Path]
) -> None:
    output, points = copy_of(llama_w4), 0
    for points in range(1, 100):
        done = False
        with killed_at(points):
            put_beside(output, {"evaluation.json": str(points), "evaluation.md": "#"})
            done = True
        assert stranger_in(output) is None, points
        if done:
            break
    assert points > 2 * 3 * 2
    assert {path.name for path in output.iterdir()} == {"compress.json", *own_files(output)}, "it cleans up"
    for stranger in (".compress.json.mine", ".mine.0123456789abcdef"):
        (output / stranger).write_text("mine")
        put_beside(output, {"evaluation.md": "##"})
        assert stranger_in(output) == output / stranger
        (output / stranger).unlink()


def test_a_scratch_file_of_a_live_process_stays(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    alive = scratch.Scratch(path)
    (tmp_path / ".record.json.0123456789abcdef").write_text("half")
    (tmp_path / ".record.json.0123456789abcdee").symlink_to(path)
    write_whole(path, "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [".record.json.0123456789abcdee", alive.place.name, "record.json"]
    )
    alive.file.write(b"newer")
    alive.become()
    assert path.read_text() == "newer"


def test_a_user_without_a_home_directory_has_a_private_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a container's, who is in no list of users; a folder that somebody else may have made is not trusted."""

    def unknown(_: int) -> None:
        raise KeyError

    for name in ("HOME", "XDG_CACHE_HOME", "COMPRESS_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    usual = tmp_path / f"compress-{os.geteuid()}"
    for trusted in (True, False):
        cache_folder._temporary.cache_clear()
        note_once.cache_clear()
        caplog.clear()
        found = cache_folder.cache_directory()
        assert (found == usual) == trusted
        assert found.parent == tmp_path
        assert found.stat().st_mode & 0o777 == 0o700
        assert f"no home directory: caches are in {found}" in caplog.text
        usual.chmod(0o777)
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path / "own"))
    assert cache_folder.cache_directory() == tmp_path / "own"
    cache_folder._temporary.cache_clear()


@settings(max_examples=40, deadline=None)
@given(
    kinds=st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), min_size=1, max_size=9),
    limit=st.sampled_from([1, 64, 10_000]),
)
def test_weight_files_hold_the_bytes_of_the_blocks(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[torch.dtype, list[int]]], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    tensors = {f"layer.{i}": torch.randint(0, 2, shape).to(dtype) for i, (dtype, shape) in enumerate(kinds)}
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, inside in halves.items():
        save_file({name: tensors[name] for name in inside}, folder / file)
    pieces = [piece for file in halves for piece in shards.pieces_of(folder / file)]
    sums = {name: checksum(tensor) for name, tensor in tensors.items()}
    inside = {p.name: p.file.read_bytes()[p.begin : p.begin + p.length] for p in pieces}
    assert {name: hashlib.sha256(held).hexdigest() for name, held in inside.items()} == sums
    plan = shards.plan_shards(sorted(pieces, key=lambda p: p.name), WHOLE, limit)
    assert [piece.name for inside in plan.values() for piece in inside] == names
    for file, inside in plan.items():
        assert len(inside) == 1 or sum(piece.length for piece in inside) <= limit
        shards.write_shard(folder / file, inside, sums)
        found = load_file(folder / file)
        assert set(found) == {piece.name for piece in inside}
        for name, tensor in found.items():
            assert tensor.dtype == tensors[name].dtype
            assert checksum(tensor) == sums[name]
        assert all((piece.begin % piece.width) == 0 for piece in shards.pieces_of(folder / file) if piece.width)


def test_what_is_no_whole_weight_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4)}, path)
    whole = path.read_bytes()
    header = b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,99]}}'
    damaged = [b"", whole[:4], whole[:-1], whole + b"x", b"\xff" * 40, len(header).to_bytes(8, "little") + header]
    for content in (*damaged, (2).to_bytes(8, "little") + b"[]", (4).to_bytes(8, "little") + b'"ab"'):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="is damaged or incomplete"):
            shards.pieces_of(path)


def test_absolute_names_lose_their_folders() -> None:
    assert [portable(name) for name in ("models/llama", "owner/name", "/home/me/llama")] == [
        "models/llama",
        "owner/name",
        "llama",
    ]
    words = [
        sys.executable,
        "quantize",
        "/home/me/a model",
        "--output=/data/out",
        "--set=data=/data/x",
        "--ignore",
        "*.up",
    ]
    assert command(words) is None  # another program's arguments are its own business
    for program in ("/usr/bin/compress", str(Path(compress.__file__).with_name("__main__.py"))):
        line = "compress quantize 'a model' --output=out --set=data=x --ignore '*.up'"
        assert command([program, *words[1:]]) == line


def test_one_variable_moves_all_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert next(candidates("kernels")) == tmp_path / "kernels"
    assert table.user_table() == tmp_path / "tuned.json"
