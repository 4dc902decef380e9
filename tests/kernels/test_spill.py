"""Large tensors in files: what a run makes of a model does not change, and a folder that cannot serve is refused."""

import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from models import tokens

import compress
from compress.base.errors import CompressError, InputError
from compress.kernels import spill
from compress.kernels.cpu import build

GPTQ = compress.GPTQ(group_size=16)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on a disk, where there is one; every tensor is spilled."""
    if reasons := build.why_not("spill"):
        pytest.skip(f"the allocator cannot be compiled: {'; '.join(reasons)}")
    monkeypatch.setattr(spill, "LEAST_BYTES", 1)
    try:
        with spill.spilling(tmp_path):
            pass
    except InputError as error:
        pytest.skip(str(error))
    place = tmp_path / "spill"
    place.mkdir()
    return place


def test_a_run_that_spills_writes_the_same_bytes(llama, folder, tmp_path):
    for name, where in (("plain", None), ("spilled", folder)):
        compress.quantize(llama, GPTQ, calibration=tokens(), output=tmp_path / name, spill=where, verify=False)
    plain, spilled = (tmp_path / name / "model.safetensors" for name in ("plain", "spilled"))
    assert plain.read_bytes() == spilled.read_bytes()
    notes = json.loads((tmp_path / "spilled/compress.json").read_text(encoding="utf-8"))["notes"]
    assert any(f"lay in files of {folder}" in note for note in notes)
    assert list(folder.iterdir()) == [], "the files have no names"
    assert spill.current() is None


def test_tensors_outlive_their_spill_and_are_reused_inside_it(folder):
    with spill.spilling(folder):
        here = spill.current()
        assert here is not None
        before = here.peak_bytes
        kept = torch.arange(1000.0)
        for _ in range(5):
            torch.zeros(1 << 20)
        grown = here.peak_bytes - before
        resized = torch.ones(10)
        resized.resize_(5000).fill_(3)
    assert (4 << 20) <= grown < (8 << 20), "one at a time"
    assert torch.equal(kept, torch.arange(1000.0))
    assert resized.sum() == 15000


def test_a_full_disk_is_one_line_and_leaves_torch_as_it_was(folder):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(CompressError, match="cannot spill 4194304 bytes"), spill.spilling(folder):
            torch.empty(1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert torch.ones(1 << 20).sum() == 1 << 20


def test_a_folder_that_cannot_serve_is_refused_before_work(llama, folder, tmp_path):
    with pytest.raises(InputError, match="No such file or directory; give an existing folder"):
        compress.quantize(llama, GPTQ, calibration=tokens(), output=tmp_path / "out", spill=folder / "missing")
    assert not (tmp_path / "out.partial").exists()


def test_without_a_compiler_it_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "why_not", lambda name: ("no C++ compiler",))
    with pytest.raises(InputError, match="needs the compiled allocator: no C"), spill.spilling(tmp_path):
        pass
