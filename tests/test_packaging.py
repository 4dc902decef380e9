"""What an installation holds, and which way imports point."""

import ast
import inspect
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import import_module, metadata
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import compress
from compress.cli.cards import card_of, summary_of
from compress.cli.main import cli, quantize
from compress.kernels.cpu import libraries
from compress.passes.protocol.recipe import BUILT_IN, PASSES, options_of, pass_class
from compress.solvers.statistics.calibrators import OPTIONS as CALIBRATORS
from compress.weights.number_formats import BY_NAME

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
    sources = {f"compress/{path.relative_to(PACKAGE)}" for path in modules() if "studies" not in path.parts}
    sources |= {f"compress/demo/{path.name}" for path in (PACKAGE / "demo").iterdir() if path.is_file()}
    assert sources - set(wheel) == set()
    for name in (
        "demo/model.safetensors",
        "demo/tokenizer.json",
        "demo/calibration.txt",
        "demo/heldout.txt",
        "kernels/tuning/tuned.json",
        "evaluation/report/page.html",
        "evaluation/report/page.css",
        "evaluation/schemas/evaluation.json",
    ):
        assert f"compress/{name}" in wheel
    for folder in LINKED:
        assert any(name.startswith(f"compress/{folder}/") and name.endswith(".py") for name in wheel)
    assert {
        f"compress/kernels/cpu/{source.name}" for name in libraries.LIBRARIES for source in libraries.sources(name)
    } <= set(wheel)
    assert {f"compress/recipes/{name}.yaml" for name in BUILT_IN} <= set(wheel)


def test_a_wheel_holds_neither_tests_nor_studies(wheel: list[str]) -> None:
    assert [name for name in wheel if "test" in Path(name).name or "/tests/" in name or "/studies/" in name] == []


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


# Lowest first; which modules are in a folder, and what else there is, the tree says.
STOREYS = (
    ("kernels",),
    ("base",),
    ("weights",),
    ("model",),
    ("solvers", "train"),
    ("checkpoint",),
    ("passes", "inference"),
    ("engine", "evaluation"),
    ("jobs",),
    ("search",),
    ("cli",),
)
MOST_FILES = 20  # side by side in a folder


@cache
def graph() -> dict[str, set[str]]:
    """{module: what it imports}. Not read where these tests are only collected."""
    return {name_of(path): set(imports_of(path.read_text(encoding="utf-8"))) for path in modules()}


def inside(name: str) -> set[str]:
    return {target for target in graph()[name] if target.split(".")[0] == "compress"}


def test_the_sources_are_found() -> None:
    assert {
        "compress",
        "compress.cli.main",
        "compress.kernels.layouts.words",
        "compress.evaluation.quality.predictor",
    } <= NAMES
    assert "compress.weights.grid" in inside("compress.passes.gptq")


def arrows() -> dict[str, dict[str, set[str]]]:
    """{folder: {part of it: the parts of it that this imports}}; a folder in it is one part with all that it holds."""
    found: dict[str, dict[str, set[str]]] = {}
    for name in NAMES - {"compress"}:
        for target in inside(name) - {"compress"}:
            words, others = name.split("."), target.split(".")
            same = next((n for n, (a, b) in enumerate(zip(words, others, strict=False)) if a != b), None)
            if same is not None:  # None: a folder and its own `__init__`
                of_folder = found.setdefault(".".join(words[:same]), {})
                of_folder.setdefault(words[same], set()).add(others[same])
                of_folder.setdefault(others[same], set())
    return found


def test_imports_inside_of_every_folder_point_one_way() -> None:
    """The order is derived from the tree: a file or folder comes after all that it imports."""
    for folder, left in arrows().items():
        order: list[str] = []
        while free := sorted(part for part, targets in left.items() if not targets & left.keys()):
            order += free
            left = {part: targets for part, targets in left.items() if part not in free}
        assert not left, f"imports between these of {folder} run in a circle: {left}"
        if folder == "compress":
            for lower, higher in pairwise(STOREYS):
                assert max(map(order.index, lower)) < min(map(order.index, higher)), f"{higher}, {lower}: {order}"


def test_the_root_holds_no_modules_and_no_folder_holds_many() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}
    sources = [*modules(), *(ROOT / "tests").rglob("*.py")]
    beside = Counter(path.parent for path in sources if path.name != "__init__.py")
    assert {str(folder): count for folder, count in beside.items() if count > MOST_FILES} == {}


def test_no_two_classes_share_a_name() -> None:
    found: dict[str, list[str]] = {}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(name_of(path))
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def test_a_folder_says_what_it_is_for_in_one_sentence() -> None:
    for folder in sorted({path.parent for path in modules()} - {PACKAGE}):
        if folder.relative_to(PACKAGE).parts[0] not in LINKED | {"demo"}:
            (only,) = ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body
            assert isinstance(only, ast.Expr), f"{folder.name}/__init__.py holds more than a sentence"


def test_what_is_declared_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    # transformers imports compressed-tensors for what we write; `dev` is what the tests need.
    # `docs`, `notebooks` and `release` have what the targets of `make` of these names run.
    assert set(extras) == {"hf", "eval", "gguf", "images", "onnx", "all", "docs", "notebooks", "release", "dev"}
    assert extras["all"] == ["compress-models[eval,gguf,hf,images,onnx]"]
    lines = [*project["dependencies"], *extras["eval"], *extras["gguf"], *extras["images"], *extras["onnx"]]
    declared = {re.split(r"[><=;\s]", line)[0].replace("-", "_") for line in lines}
    imported = {target.split(".")[0] for targets in graph().values() for target in targets}
    assert {{"pyyaml": "yaml", "pillow": "PIL"}.get(name, name) for name in declared} <= imported


def test_documents_that_install_a_wheel_name_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    for path in (ROOT / "docs" / "start.md", *(ROOT / "docs" / "docker").iterdir()):
        wheels = set(re.findall(r"compress_models-\S+\.whl", path.read_text(encoding="utf-8")))
        assert wheels == {f"compress_models-{version}-py3-none-any.whl"}, path


def test_make_demo_installs_no_tools_of_developers(tmp_path: Path) -> None:
    """Where the environment of the tests is, it takes that one, as CI does."""

    def said() -> str:
        words = ["make", "--dry-run", "--no-print-directory", "--directory", ROOT, "demo", f"VENV={tmp_path}"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    assert "pip install" in said()
    assert "[dev]" not in said()
    (tmp_path / ".installed").touch()
    assert said() == f"{tmp_path}/bin/compress demo\n"


def test_the_lowest_versions_that_are_declared_are_those_that_are_tried() -> None:
    """`make test-oldest` installs constraints-oldest.txt: at least one line for each range, equal to its lower end."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8").splitlines()
    tried = {(one := Requirement(line)).name.lower(): one.specifier for line in lines if not line.startswith("#")}
    missing = []
    for line in (*project["dependencies"], *extras["hf"], *extras["gguf"], *extras["images"], *extras["dev"]):
        wanted = Requirement(line)
        least = [each.version for each in wanted.specifier if each.operator == ">="]
        if least and wanted.name not in {"build", "mypy", "ruff"} | {"compress-models"}:  # no test imports these
            pinned = [each.version for each in tried.get(wanted.name.lower(), ())]
            if [Version(each) for each in pinned] != [Version(each) for each in least]:
                missing.append(f"{line}: {pinned}")
    assert missing == []


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
    assert {name for name in NAMES if "compress.cli.main" in graph()[name]} == {"compress.__main__"}


def test_passes_know_neither_pipeline_nor_files() -> None:
    forbidden = {"engine", "checkpoint", "inference", "data", "jobs", "search", "cli"}
    for name in NAMES:
        if name.startswith("compress.passes"):
            assert not {t for t in inside(name) if t.split(".")[1:2] and t.split(".")[1] in forbidden | {""}}, name
            assert "compress" not in graph()[name]  # nor the public API, which imports them


def test_kernels_import_nothing_of_compress_but_kernels() -> None:
    for name in NAMES:
        if name.startswith("compress.kernels"):
            assert {t for t in inside(name) if not t.startswith("compress.kernels")} == set(), name


def test_evaluation_and_pipeline_do_not_know_each_other() -> None:
    for name in NAMES - {"compress"}:
        if not name.startswith(("compress.evaluation", "compress.search", "compress.recipes", "compress.cli")):
            assert not {t for t in graph()[name] if t.startswith("compress.evaluation")}, name
    for name in NAMES:
        if name.startswith("compress.evaluation"):
            assert not {t for t in graph()[name] if t.startswith("compress.engine.")}, name


def test_nothing_imports_the_linked_folders_by_their_bare_names() -> None:
    for name in NAMES:
        assert not {t for t in graph()[name] if t.split(".")[0] in LINKED}, name
    for path in sorted((ROOT / "tests").rglob("*.py")):
        assert not {t for t in imports_of(path.read_text(encoding="utf-8")) if t.split(".")[0] in LINKED}, path


def test_nothing_is_imported_with_a_star() -> None:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert all(alias.name != "*" for alias in node.names), path


# Answered at once: what needs no model imports nothing that takes seconds.
AT_ONCE = (
    (0, "--help"),
    (0, "--version"),
    (0, "quantize --help"),
    (0, "methods"),
    (0, "methods gptq"),
    (0, "methods gptq --json -"),
    (0, "recipes --json -"),
    (2, "methods gtpq"),
    (2, "quantize demo"),
    (2, "quantize demo --output out --method gtpq"),
    (2, "quantize demo --output out --set damp"),
    (2, "quantize demo --output out --recipe no.yaml"),
    (2, "quantize demo --output out --fsdp"),
    (2, "inspect demo --device cpu"),
    (2, "export demo --to gguff --output out"),
    (2, "report a --diff"),
    (2, "bench"),
    (2, "demo --overwrite"),
)
HEAVY = {"torch", "transformers", "huggingface_hub", "datasets", "pyarrow", "pandas", "compressed_tensors", "triton"}
PROGRAM = """
import contextlib, io, json, sys
import compress
from compress.cli.main import main

found = {"import": [0, sorted(HEAVY & {*sys.modules})]}
for words in json.loads(sys.argv[1]):
    sys.argv = ["compress", *words.split()]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            main()
        except SystemExit as left:
            code = left.code or 0
    found[words] = [code, sorted(HEAVY & {*sys.modules})]
[getattr(compress, name) for name in compress.__all__]
found["everything"] = [0, sorted(HEAVY & {*sys.modules})]
print(json.dumps(found))
"""


@pytest.mark.full
def test_what_needs_no_model_starts_no_slow_library() -> None:
    """Whole names, too, leave to those who need them what reads tables, foreign checkpoints and GPUs."""
    done = subprocess.run(
        [sys.executable, "-c", f"HEAVY = {HEAVY}\n{PROGRAM}", json.dumps([words for _, words in AT_ONCE])],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    _, everything = found.pop("everything")
    # transformers may import triton, by way of torch's compiler; we do not.
    assert {*everything} - {"triton"} == {"huggingface_hub", "torch", "transformers"}
    assert found == {"import": [0, []], **{words: [code, []] for code, words in AT_ONCE}}


# --- how long what is ------------------------------------------------------------------------------------------------

LONGEST_FUNCTION, LONGEST_CLASS = 60, 200  # lines from `def` or `class` to the end


def test_functions_and_classes_are_short() -> None:
    """Kernels aside, whose body is one loop."""
    long = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                kernel = path.is_relative_to(PACKAGE / "kernels")
                if lines > (LONGEST_CLASS if isinstance(node, ast.ClassDef) else LONGEST_FUNCTION) and not kernel:
                    long.append(f"{path.relative_to(PACKAGE)}: {node.name} has {lines} lines")
    assert not long, "\n".join(long)


# --- the public names ----------------------------------------------------------------------------------------------


def test_a_public_name_is_what_it_says_whatever_has_been_imported() -> None:
    """Importing a module puts it into its package: none may take the place of a public name."""
    for name in sorted(NAMES - {"compress.__main__"}):
        if not name.startswith("compress.recipes"):  # scripts
            import_module(name)
    assert set(compress._HOMES) < set(compress.__all__) <= set(dir(compress))
    for name, home in compress._HOMES.items():
        assert getattr(compress, name) is getattr(import_module(home), name), name
        assert not isinstance(getattr(compress, name), ModuleType), name
    with pytest.raises(AttributeError, match="module 'compress' has no attribute 'quantise'"):
        _ = compress.quantise


def test_type_checkers_see_the_same_public_names() -> None:
    found = {}
    for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.If):
            found = {alias.name: line.module for line in node.body for alias in line.names}
            break
    assert found == compress._HOMES


def test_the_card_of_a_method_is_what_its_file_says() -> None:
    for name in PASSES:
        kind, card = pass_class(name), card_of(name)
        about = (inspect.getmodule(kind).__doc__ or "").strip()
        assert (card.about, summary_of(name)) == (about, about.splitlines()[0])
        assert [(o.name, o.default) for o in card.options] == [(key, f.default) for key, f in options_of(kind).items()]
        types = get_type_hints(kind)
        for option in card.options:
            # A docstring below each field, or below the one whose default it replaces.
            assert len(option.meaning.split()) > 3, f"{name}: {option.name} does not say what it means"
            if types[option.name] is bool:
                assert option.allowed == "true, false"
            elif get_origin(types[option.name]) is Literal:
                assert option.allowed == ", ".join(map(str, get_args(types[option.name])))
            else:
                assert 0 < len(option.allowed) < 160, f"{name}: {option.name} does not say what it may be"


def test_cards_and_the_command_line_name_all_schemes_and_calibrators() -> None:
    """Both are words, because neither may wait for torch."""
    options = {option.name: option.allowed for option in card_of("gptq").options}
    assert (options["scheme"], options["calibrator"]) == (BY_NAME, ", ".join(CALIBRATORS))
    for parameter in quantize.params:
        if parameter.name == "scheme":
            assert set(re.findall(r"w\da\d+|fp8", parameter.help)) >= set(re.findall(r"w\da\d+|fp8", BY_NAME))
        elif parameter.name == "calibrator":
            assert all(name in parameter.help for name in CALIBRATORS)


def guides() -> list[Path]:
    """The Markdown files of the project, but those of tests and results."""
    folders = (
        "",
        "docs",
        "docs/figures",
        "recipes",
        "evaluation",
        "kernels",
        *(f"compress/{path.name}" for path in PACKAGE.iterdir()),
    )
    return [path for folder in folders for path in (PACKAGE.parent / folder).glob("*.md")]


def test_links_of_the_guides_lead_somewhere() -> None:
    assert len(guides()) > 6
    for guide in guides():
        for link in re.findall(r"\]\((?!http)([^)\s]+)\)", guide.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = guide.parent / path if path else guide
            assert target.exists(), (guide, link)
            if anchor:
                heads = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
                slugs = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
                assert anchor in slugs, (guide, link)


def test_the_table_of_commands_is_that_of_help() -> None:
    """docs/commands.md has a row for every command, and no other."""
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    named = {
        name for row in rows for name in re.findall(r"`(?:torchrun \S+ \d -m )?compress ([a-z-]+)", row.split(" | ")[0])
    }
    assert named == {*cli.commands} - {"demo", "cache-logits"}
    assert "make demo" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_files_and_functions_that_the_guides_name_are_there() -> None:
    named = 0
    for guide in guides():
        text = guide.read_text(encoding="utf-8")
        for path, name in re.findall(r"`(\w[\w./]*/[\w./]+\.(?:py|yaml))`(?:\s\(`(?:\w+\.)?(\w+)`)?", text):
            places = [folder / path for folder in (ROOT, PACKAGE, guide.parent)]
            source = next((place for place in places if place.exists()), None)
            assert source is not None, (guide, path)
            if name:
                named += 1
                assert re.search(rf"^ *(?:def|class) {name}\b", source.read_text("utf-8"), re.MULTILINE), (path, name)
    assert named > 10
