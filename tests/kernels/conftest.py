"""The compiled CPU products that tests run on."""

import pytest
import torch

from compress.kernels.cpu import build as cpu
from compress.kernels.cpu import direct


@pytest.fixture
def fresh(monkeypatch):
    """Forgets loaded libraries, during the test and after it."""
    cpu._loaded.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    cpu._loaded.cache_clear()


@pytest.fixture(scope="module", params=["native", "avx2"])
def compiled(request):
    """Why there are no compiled kernels, or the library to test: for this processor, and for one without AVX-512."""
    if cpu.why_not():
        pytest.skip("; ".join(cpu.why_not()))
    if request.param == "native":
        return cpu.library()
    library, reasons = cpu.load_from_a_place("gemm", cpu.flags_for("avx2"))
    assert library is not None, reasons
    return library


@pytest.fixture
def library(compiled, monkeypatch):
    """Runs the operators on the library under test, on outputs that are NaN before."""
    monkeypatch.setattr(cpu, "library", lambda name="gemm": compiled)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape: torch.full(shape, torch.nan, dtype=self.dtype))
    return compiled


@pytest.fixture
def looped(compiled):
    """The operators of C++, on the loops under test."""
    if direct.why_not():
        pytest.skip("; ".join(direct.why_not()))
    operators = cpu.library("operators")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cpu, "library", lambda name="gemm": compiled if name == "gemm" else operators)
        direct.use(compiled)
        yield
    direct.use(cpu.library())
