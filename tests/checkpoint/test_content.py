"""Weights that change, anywhere in them, are another model: for kept results, for a resumed run, and while it runs."""

import os
import shutil
from pathlib import Path

import pytest
from commands import StopAfterOne, make_llama, save
from torch import nn

import compress
from compress.base.collectives import Comm
from compress.base.errors import CompressError, InputError
from compress.base.progress import Silent
from compress.checkpoint.read import content
from compress.checkpoint.read.pretrained import model_fingerprint
from compress.checkpoint.read.source import find_source
from compress.checkpoint.write.shards import pieces_of
from compress.jobs.teachers import fingerprints

RTN = compress.RTN(group_size=32)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(make_llama(), tmp_path / "model")


def change(folder: Path, tensor: str = "lm_head.weight", at: int = 5001) -> None:
    """Flip a bit in place, outside of any sample that a sixty-fourth of the file would be known by."""
    path = folder / "model.safetensors"
    begin = next(piece.begin for piece in pieces_of(path) if piece.name == tensor)
    size = path.stat().st_size
    at += begin
    at += 4096 if any(size * i // 64 <= at < size * i // 64 + 4096 for i in range(64)) else 0
    with path.open("r+b") as file:
        file.seek(at)
        (found,) = file.read(1)
        file.seek(at)
        file.write(bytes([found ^ 1]))


def test_every_value_counts(model: Path) -> None:
    before = find_source(str(model)).fingerprint()
    taught = compress.Train(teacher=str(model))
    known = fingerprints([taught], False, Comm())
    assert known == {str(model): before}
    change(model)
    assert find_source(str(model)).fingerprint() != before
    assert fingerprints([taught], False, Comm()) != known  # of a sweep, and of a run that resumes
    network = nn.Sequential(nn.Linear(200, 200), nn.BatchNorm1d(200))
    found = {model_fingerprint(network)}
    for tensor in (network[0].weight, network[1].running_mean):
        tensor.data.view(-1)[101] += 1
        found.add(model_fingerprint(network))
    assert len(found) == 3


def test_code_of_a_models_own_counts_where_it_runs(model: Path) -> None:
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace("{", '{"auto_map": {"AutoConfig": "own.Config"},', 1))
    (model / "own.py").write_text("a = 1\n")
    before = [find_source(str(model), trusted).fingerprint() for trusted in (False, True)]
    (model / "own.py").write_text("a = 2\n")
    after = [find_source(str(model), trusted).fingerprint() for trusted in (False, True)]
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_run_is_not_resumed_on_other_weights(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(model, RTN, output=out, verify=False, reporter=StopAfterOne())
    change(model)
    with pytest.raises(InputError, match="of another run"):
        compress.quantize(model, RTN, output=out, verify=False, resume=True)


class Meanwhile(Silent):
    """Does something once the first block is finished."""

    def __init__(self, work: object) -> None:
        self.work = work

    def step(self, done: int, total: int, what: str) -> None:
        if done == 1 and callable(self.work):
            self.work, work = None, self.work
            work()


def test_weights_that_change_in_place_while_a_run_reads_them_stop_it(model: Path, tmp_path: Path) -> None:
    out, former = tmp_path / "out", shutil.copytree(model, tmp_path / "former")
    with pytest.raises(CompressError, match=r"model\.safetensors was changed while the run was reading it"):
        compress.quantize(model, RTN, output=out, verify=False, reporter=Meanwhile(lambda: change(model)))
    assert not out.exists()
    (model / "model.safetensors").write_bytes((former / "model.safetensors").read_bytes())
    compress.quantize(model, RTN, output=out, verify=False, resume=True)
    compress.quantize(former, RTN, output=tmp_path / "whole", verify=False)
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_a_file_that_only_looks_changed_or_is_replaced_stops_nothing(model: Path, tmp_path: Path) -> None:
    path = model / "model.safetensors"

    def replaced() -> None:
        change(Path(shutil.copytree(model, tmp_path / "other")))
        (tmp_path / "other" / path.name).replace(path)

    compress.quantize(model, RTN, output=tmp_path / "first", verify=False, reporter=Meanwhile(path.touch))
    compress.quantize(model, RTN, output=tmp_path / "second", verify=False, reporter=Meanwhile(replaced))
    written = [(tmp_path / name / path.name).read_bytes() for name in ("first", "second")]
    assert written[0] == written[1]


def test_hashes_of_large_files_are_kept_while_the_file_stays_as_it_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path / "cache"))
    hashed, computed = [], content._hash
    monkeypatch.setattr(content, "_hash", lambda path, size: (hashed.append(path), computed(path, size))[1])
    path = model / "model.safetensors"
    found = [content.content_of(path) for _ in range(2)]
    assert len(hashed) == 2, "a small file, changed a moment ago, is always read"
    monkeypatch.setattr(content, "KEPT_FROM", 0)
    monkeypatch.setattr(content, "SETTLED_NS", 0)
    found += [content.content_of(path) for _ in range(2)]
    assert len(hashed) == 3
    assert len(set(found)) == 1
    times = path.stat()
    change(model)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # a tool that hides when it wrote
    assert content.content_of(path) != found[0]
    assert len(hashed) == 4


def test_another_name_of_a_file_changes_no_content(model: Path, tmp_path: Path) -> None:
    """As a backup by hard links gives it: the last of a file's times alone changes."""
    source = find_source(str(model))
    os.link(model / "model.safetensors", tmp_path / "backup")
    assert source.fingerprint() == find_source(str(model)).fingerprint()


def test_a_hash_that_another_user_may_have_written_is_computed_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "weights"
    path.write_bytes(b"weights")
    stamp = content.stamp_of(path)
    content._store_hash(path, stamp, "a lie")
    assert content._stored_hash(path, stamp) == "a lie"
    content._place(path).chmod(0o666)
    assert content._stored_hash(path, stamp) is None
