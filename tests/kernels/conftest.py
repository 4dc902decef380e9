"""The compiled CPU products that tests run on: of this processor, and in an emulator of ARM."""

import logging
from functools import partial

import pytest
import torch
from emulated import TARGETS, Emulated, attention, products_for

from compress.kernels.cpu import build as cpu
from compress.kernels.cpu import direct
from compress.kernels.notes import note_once


@pytest.fixture
def fresh(monkeypatch):
    """Forgets loaded libraries, during the test and after it."""
    cpu._loaded.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    cpu._loaded.cache_clear()


@pytest.fixture(scope="module", params=["native", pytest.param("avx2", marks=pytest.mark.full), *TARGETS])
def compiled(request):
    """Why there are no compiled kernels, or the library to test: for this processor, for one without AVX-512, and for
    ARM."""
    with products_for(request.param) as library:
        yield library


@pytest.fixture
def notes(caplog):
    """Collects the notes of the kernels, beginning with none said."""
    note_once.cache_clear()
    caplog.set_level(logging.INFO, "compress.kernels")
    yield lambda: [record.getMessage() for record in caplog.records]
    note_once.cache_clear()


@pytest.fixture
def library(compiled, monkeypatch):
    """Runs the operators on the library under test, on outputs that are NaN before."""
    monkeypatch.setattr(cpu, "library", lambda name="gemm": compiled)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape: torch.full(shape, torch.nan, dtype=self.dtype))
    return compiled


@pytest.fixture
def looped(compiled):
    """The operators of C++, on the loops under test; of those in an emulator, attention alone, which Python calls."""
    if direct.why_not():
        pytest.skip("; ".join(direct.why_not()))
    if isinstance(compiled, Emulated):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(direct, "attention", partial(attention, compiled))
            yield compiled
        return
    operators = cpu.library("operators")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cpu, "library", lambda name="gemm": compiled if name == "gemm" else operators)
        direct.use(compiled)
        yield compiled
    direct.use(cpu.library())
