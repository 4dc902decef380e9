"""What an installation holds, and which way imports point."""

import ast
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path

import pytest

from compress.kernels.cpu import SOURCES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "compress"
LINKED = {"kernels", "evaluation", "recipes"}


# --- the wheel -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The files of a wheel that is built from a copy of the sources (a build leaves folders behind)."""
    for needed, least in (("setuptools", 77), ("pip", 0)):
        try:
            found = metadata.version(needed)
        except metadata.PackageNotFoundError:
            pytest.skip(f"building a wheel needs {needed}")
        if int(found.split(".")[0]) < least:
            pytest.skip(f"building a wheel needs {needed} >= {least}; this is {found}")
    copy, target = tmp_path_factory.mktemp("source") / "project", tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "out", "*.partial")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=unwanted)
    words = ["-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir"]
    done = subprocess.run([sys.executable, *words, target, copy], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = target.glob("*.whl")
    with zipfile.ZipFile(built) as file:
        return file.namelist()


def test_a_wheel_holds_compress_and_its_metadata_and_nothing_else_at_the_top(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"compress"}
    assert len(tops) == 2


def test_a_wheel_holds_every_module_and_data_file_of_the_package(wheel: list[str]) -> None:
    sources = {f"compress/{path.relative_to(PACKAGE)}" for path in modules()}
    sources |= {f"compress/demo/{path.name}" for path in (PACKAGE / "demo").iterdir() if path.is_file()}
    assert sources - set(wheel) == set()
    for name in (
        "demo/model.safetensors",
        "demo/tokenizer.json",
        "demo/calibration.txt",
        "demo/heldout.txt",
        "kernels/tuned.json",
    ):
        assert f"compress/{name}" in wheel
    for folder in LINKED:
        assert any(name.startswith(f"compress/{folder}/") and name.endswith(".py") for name in wheel)
    assert {f"compress/kernels/{source.name}" for source in SOURCES} <= set(wheel)


def test_a_wheel_holds_no_tests(wheel: list[str]) -> None:
    assert [name for name in wheel if "test" in Path(name).name or "/tests/" in name] == []


def test_linked_folders_are_relative_links_to_folders_without_init() -> None:
    for folder in LINKED:
        assert (PACKAGE / folder).readlink() == Path("..") / folder
        assert not (ROOT / folder / "__init__.py").exists()
    assert not (ROOT / "tests" / "__init__.py").exists()


# --- which way imports point ---------------------------------------------------------------------------------------


def modules() -> list[Path]:
    """Every source file of the package, through its links."""
    found = [p for p in PACKAGE.rglob("*.py") if "__pycache__" not in p.parts]
    for folder in LINKED:  # rglob follows no links
        inside = [p for p in (ROOT / folder).rglob("*.py") if "__pycache__" not in p.parts]
        found = [p for p in found if folder not in p.relative_to(PACKAGE).parts]
        found += [PACKAGE / folder / p.relative_to(ROOT / folder) for p in inside]
    return sorted(found)


def name_of(path: Path) -> str:
    parts = ("compress", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


NAMES = {name_of(path) for path in modules()}


def imports_of(text: str) -> Iterator[str]:
    """Full names that a source imports anywhere in it; `from a import b` is a.b where that is a module, a otherwise."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in NAMES else str(node.module)


GRAPH = {name_of(path): set(imports_of(path.read_text(encoding="utf-8"))) for path in modules()}

# Lowest first. A module imports from its own layer and those before it, never from one after it.
LAYERS = (
    ("compress.errors", "compress.version", "compress.progress", "compress.comm", "compress.page"),
    ("compress.kernels.*",),
    (
        "compress.grid",
        "compress.stats",
        "compress.histogram",
        "compress.clipping",
        "compress.entropy",
        "compress.observers",
        "compress.calibrators",
        "compress.sweep",
        "compress.polish",
        "compress.device",
        "compress.architecture",
        "compress.convolution",
    ),
    ("compress.scheme", "compress.fold"),
    ("compress.integer", "compress.cache"),
    ("compress.passes*",),
    ("compress.forward", "compress.residency"),
    ("compress.excerpt", "compress.producers", "compress.probe"),
    ("compress.graph",),
    ("compress.rescale", "compress.collect", "compress.caching", "compress.batchnorm", "compress.versions"),
    ("compress.plan", "compress.record"),
    ("compress.export",),
    ("compress.pipeline",),
    ("compress.checkpoint", "compress.recipe"),
    ("compress.writer", "compress.nn", "compress.fused", "compress.embedding"),
    ("compress.source", "compress.data"),
    ("compress.lowbit",),
    ("compress.loading",),
    ("compress.api", "compress.verify", "compress.evaluation.*", "compress.bench*"),
    ("compress",),
    ("compress.show",),
    ("compress.cli", "compress.recipes.*"),
    ("compress.__main__",),
)


def layer_of(name: str) -> int:
    found = [i for i, patterns in enumerate(LAYERS) if any(fnmatchcase(name, p) for p in patterns)]
    assert len(found) == 1, f"{name} belongs to {len(found)} layers; give it one in LAYERS"
    return found[0]


def inside(name: str) -> set[str]:
    return {target for target in GRAPH[name] if target.split(".")[0] == "compress"}


def test_the_sources_are_found() -> None:
    assert {"compress", "compress.cli", "compress.kernels.pack", "compress.evaluation.quality"} <= NAMES
    assert "compress.grid" in inside("compress.passes.gptq")


@pytest.mark.parametrize("name", sorted(NAMES))
def test_imports_point_one_way(name: str) -> None:
    upward = sorted(target for target in inside(name) if layer_of(target) > layer_of(name))
    assert not upward, f"{name} imports {upward}, which come after it"


def test_no_two_modules_import_each_other() -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for target in sorted(inside(name) & NAMES):
                visit(target, (*path, name))
            done.add(name)

    for name in sorted(NAMES):
        visit(name, ())


def test_only_main_imports_the_command_line() -> None:
    assert {name for name in NAMES if "compress.cli" in GRAPH[name]} == {"compress.__main__"}


def test_passes_know_neither_pipeline_nor_files() -> None:
    forbidden = {"pipeline", "checkpoint", "residency", "forward", "source", "data", "recipe", "api", "cli", "progress"}
    for name in NAMES:
        if name.startswith("compress.passes"):
            assert not {t for t in inside(name) if t.split(".")[1:2] and t.split(".")[1] in forbidden | {""}}, name
            assert "compress" not in GRAPH[name]  # nor the public API, which imports them


def test_kernels_import_nothing_of_compress_but_kernels_and_errors() -> None:
    for name in NAMES:
        if name.startswith("compress.kernels"):
            assert {t for t in inside(name) if not t.startswith(("compress.kernels", "compress.errors"))} == set(), name


def test_evaluation_and_pipeline_do_not_know_each_other() -> None:
    for name in NAMES - {"compress", "compress.cli", "compress.show"}:
        if not name.startswith(("compress.evaluation", "compress.recipes")):
            assert not {t for t in GRAPH[name] if t.startswith("compress.evaluation")}, name
    for name in NAMES:
        if name.startswith("compress.evaluation"):
            assert "compress.pipeline" not in GRAPH[name]


def test_nothing_imports_the_linked_folders_by_their_bare_names() -> None:
    for name in NAMES:
        assert not {t for t in GRAPH[name] if t.split(".")[0] in LINKED}, name
    for path in sorted((ROOT / "tests").rglob("*.py")):
        assert not {t for t in imports_of(path.read_text(encoding="utf-8")) if t.split(".")[0] in LINKED}, path


def test_nothing_is_imported_with_a_star() -> None:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert all(alias.name != "*" for alias in node.names), path


def test_importing_the_package_starts_no_slow_library() -> None:
    """pyarrow, datasets, pandas and compressed_tensors are for those who need them."""
    program = "import sys, compress.cli; print(*[m for m in {slow} if m in sys.modules])"
    slow = ("datasets", "pyarrow", "pandas", "compressed_tensors", "triton")
    done = subprocess.run(
        [sys.executable, "-c", program.replace("{slow}", repr(slow))],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert done.stdout.split() == []
