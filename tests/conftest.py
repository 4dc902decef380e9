"""Fixtures that many tests share."""

import gc
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Read when these libraries are imported: no test asks a server for anything, and none waits for one.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # in the processes that tests start, too
# Tests of loops are not to measure what is faster here, nor to compute by it; `kernels/cpu/test_dense.py` does.
os.environ["COMPRESS_CPU_DENSE_FROM"] = "never"

import pytest
import torch
from commands import VOCABULARY, Desk, in_this_process, make_llama, save
from emulated import TARGETS, emulated
from places import SHARED

import compress
from compress.checkpoint.read.source import DEMO
from compress.inference.load.quantizer import transformers_alone


@pytest.hookimpl(tryfirst=True)  # before pytest looks at markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `first` leave all of their cases but the first to the full run."""
    seen: set[str] = set()
    for item in items:
        function = item.nodeid.partition("[")[0]
        if item.get_closest_marker("first") and function in seen:
            item.add_marker(pytest.mark.full)
        seen.add(function)


@pytest.fixture(scope="session", autouse=True)
def _quiet_libraries() -> Iterator[None]:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # tiny matrices: threads cost more than they bring
    gc.freeze()  # what the libraries hold is no garbage before the end: no collection looks at it
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _own_references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept of references goes away again, and is not among a person's files."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compress.evaluation.quality.reference_states.cache_directory", lambda: folder)
        sensitivities = "compress.checkpoint.sensitivity.cache_directory"
        patch.setattr(sensitivities, lambda: Path(os.environ.get("COMPRESS_CACHE_DIR", folder)))
        yield


@pytest.fixture(scope="session", autouse=True)
def _verified_in_this_process() -> Iterator[None]:
    """Outputs are verified as always, but by this process: a fresh one takes seconds to import all again. The command
    in a process of its own (`cli/test_cli.py`) starts one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compress.base.fresh_process.subprocess", SimpleNamespace(run=in_this_process))
        yield


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tiny Llama, float16 in one file. Not to be changed: copy it (`copy_of`)."""
    return save(make_llama().half(), tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def llama_w4(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama at w4a16 g32 by RTN, all layers but the MLPs' down projections. Not to be changed."""
    output = tmp_path_factory.mktemp("models") / "llama-w4"
    compress.quantize(
        llama, compress.RTN(scheme="w4a16", group_size=32), ignore=["*.down_proj"], output=output, verify=False
    )
    return output


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """Copies a checkpoint into the test's own directory."""

    def copy(source: Path, name: str = "copy") -> Path:
        return Path(shutil.copytree(source, tmp_path / name))

    return copy


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A thousand words of the demo's held-out text."""
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    words = (DEMO / "heldout.txt").read_text(encoding="utf-8").split(" ")
    path.write_text(" ".join(words[:1000]), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token ids [6, 16], int64."""
    path = tmp_path_factory.mktemp("tokens") / "tokens.pt"
    torch.save(torch.randint(VOCABULARY, (6, 16), generator=torch.Generator().manual_seed(1)), path)
    return path


@pytest.fixture
def registered() -> Iterator[None]:
    """`compress.register()`, for one test."""
    with transformers_alone():
        compress.register()
        yield


@pytest.fixture
def desk(llama: Path, token_file: Path, tmp_path: Path) -> Desk:
    return Desk(llama, token_file, tmp_path)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real models and text; skips the test where it is missing."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the real models and texts of {SHARED}, which are not here")
    return SHARED


def loops_of(name: str) -> Any:
    """A fixture: the loops of a library on this machine, or in an emulator of ARM."""

    @pytest.fixture(params=["native", *TARGETS])
    def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        if request.param == "native":
            yield
            return
        from compress.kernels.cpu import build

        with emulated(request.param, name) as library:
            monkeypatch.setattr(build, "library", lambda name: library)
            monkeypatch.setattr(build, "why_not", lambda name: ())
            yield

    return loops


trellis_loops = loops_of("trellis")
trellis_products_loops = loops_of("trellis_products")
state_loops = loops_of("states")
