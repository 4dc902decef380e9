"""A ledger of the Triton kernels that have run on a GPU since their source last changed, and of the results.

    python recipes/studies/gpu/ledger.py                          prints the state of every kernel
    python recipes/studies/gpu/ledger.py --take correct.jsonl     adds a run of the GPU tests, and rewrites the table of
                                                                  kernels/README.md

kernels/results/gpu-ledger.json holds the last run of each kernel on each card:

    {"format": 1, "runs": {card: {kernel: {"source", "date", "commit", "versions", "passed", "failed": {test: message},
     "evidence"}}}}

A kernel is a `@triton.jit` function that Python launches, named `file.function`. `source` is a hash of the parsed
function, of the function that launches it, and of all functions and constants of compress.kernels that the kernel
reads, directly or not. Comments, docstrings and layout are not part of it.
"""

import argparse
import ast
import hashlib
import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
LEDGER = ROOT / "kernels" / "results" / "gpu-ledger.json"
README = ROOT / "kernels" / "README.md"
OURS = "compress.kernels"
FORMAT = 1
BEGIN, END = "<!-- gpu-ledger: written by recipes/studies/gpu/ledger.py -->", "<!-- /gpu-ledger -->"

Ledger = dict[str, dict[str, dict[str, Any]]]


class KernelModule:
    """A parsed file of compress.kernels."""

    def __init__(self, path: Path) -> None:
        self.path, self.tree = path, ast.parse(path.read_text(encoding="utf-8"))

    @cached_property
    def defined(self) -> dict[str, ast.stmt]:
        """{name: the statement that defines it} of module level, below `if` and `try` too."""
        found: dict[str, ast.stmt] = {}
        for node in _statements(self.tree.body):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {
                    name.id: node for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
                }
        return found

    @cached_property
    def imported(self) -> dict[str, tuple[str, str]]:
        """{local name: (module, name there)} of imports from compress.kernels."""
        imports = (node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom))
        return {
            alias.asname or alias.name: (node.module, alias.name)
            for node in imports
            if node.module is not None and node.module.startswith(f"{OURS}.")
            for alias in node.names
        }

    @cached_property
    def jitted(self) -> set[str]:
        """Names of the functions that Triton compiles."""
        functions = (node for node in self.defined.values() if isinstance(node, ast.FunctionDef))
        return {node.name for node in functions if any("triton.jit" in ast.unparse(d) for d in node.decorator_list)}

    @cached_property
    def launches(self) -> dict[str, list[ast.stmt]]:
        """{kernel: functions that launch it, `kernel[grid](...)`}."""
        found: dict[str, list[ast.stmt]] = {}
        for node in self.defined.values():
            called = (call.func for call in ast.walk(node) if isinstance(call, ast.Call))
            targets = (f.value for f in called if isinstance(f, ast.Subscript))
            for name in {t.id for t in targets if isinstance(t, ast.Name)} & self.jitted:
                found.setdefault(name, []).append(node)
        return found


class KernelSources:
    """The files of compress.kernels below a folder, parsed when they are first asked for."""

    def __init__(self, folder: Path = ROOT / "kernels") -> None:
        self.folder = folder
        self.modules: dict[str, KernelModule] = {}

    def module(self, name: str) -> KernelModule:
        """The module compress.kernels.x.y."""
        if name not in self.modules:
            path = self.folder.joinpath(*name.removeprefix(f"{OURS}.").split(".")).with_suffix(".py")
            self.modules[name] = KernelModule(path)
        return self.modules[name]

    def reads(self, module: str, name: str, seen: dict[tuple[str, str], ast.stmt]) -> None:
        """Add to `seen` the definition of a name and everything of compress.kernels that it reads."""
        here = self.module(module)
        if name in here.imported:
            self.reads(*here.imported[name], seen)
        elif name in here.defined and (module, name) not in seen:
            seen[module, name] = here.defined[name]
            for used in sorted({node.id for node in ast.walk(here.defined[name]) if isinstance(node, ast.Name)}):
                self.reads(module, used, seen)

    def triton_modules(self) -> list[str]:
        """Names of the modules that may have kernels."""
        folder = self.folder / "triton"
        paths = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py"))
        return sorted(f"{OURS}.triton.{'.'.join(path.parts)}" for path in paths)

    def hashes(self) -> dict[str, str]:
        """{kernel: hash of its source}."""
        found = {}
        for name in self.triton_modules():
            for kernel, launchers in sorted(self.module(name).launches.items()):
                seen: dict[tuple[str, str], ast.stmt] = {}
                self.reads(name, kernel, seen)
                parts = [_canonical(node) for _, node in sorted(seen.items(), key=lambda item: item[0])]
                parts += [_canonical(node) for node in launchers]
                found[f"{name.rpartition('.')[2]}.{kernel}"] = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
        return found

    def unreached(self) -> set[str]:
        """Compiled functions that no launched kernel calls."""
        seen: dict[tuple[str, str], ast.stmt] = {}
        for name in self.triton_modules():
            for kernel in self.module(name).launches:
                self.reads(name, kernel, seen)
        all_of_them = {(name, function) for name in self.triton_modules() for function in self.module(name).jitted}
        return {f"{name.rpartition('.')[2]}.{function}" for name, function in all_of_them - seen.keys()}


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _canonical(node: Any) -> Any:
    """A syntax tree as nested tuples, alike for every Python: without empty fields, positions and docstrings."""
    if isinstance(node, list):
        return tuple(map(_canonical, node))
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    kept = ((name, _canonical(value)) for name, value in fields.items() if value not in (None, []))
    return (type(node).__name__, *kept)


def read_ledger(path: Path = LEDGER) -> Ledger:
    """{card: {kernel: its last run}}."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert stored["format"] == FORMAT
    runs: Ledger = stored["runs"]
    return runs


def write_ledger(runs: Ledger, path: Path = LEDGER) -> None:
    path.write_text(json.dumps({"format": FORMAT, "runs": runs}, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def state(run: Mapping[str, Any] | None, source: str) -> str:
    """The state of one kernel on one card, in a few words."""
    if run is None:
        return "not run"
    day = run["date"][:10]
    if run["failed"]:
        wrong = f"wrong in {len(run['failed'])} cases on {day}"
        return wrong if run["source"] == source else f"not run since it was changed ({wrong} before)"
    cases = "" if run["passed"] is None else f" in {run['passed']} cases"
    right = f"right{cases} on {day}"
    return right if run["source"] == source else f"not run since it was changed ({right} before)"


def stale(runs: Mapping[str, Mapping[str, Any]], sources: Mapping[str, str]) -> set[str]:
    """Kernels that have not run right on a card as they are now."""
    return {kernel for kernel, source in sources.items() if not state(runs.get(kernel), source).startswith("right")}


def table(runs: Ledger, sources: Mapping[str, str]) -> str:
    """The state of every kernel on every card, as Markdown."""
    cards = sorted(runs)
    lines = ["| kernel | " + " | ".join(cards) + " |", "|---|" + "---|" * len(cards)]
    for kernel, source in sorted(sources.items()):
        states = [state(runs[card].get(kernel), source) for card in cards]
        lines.append(f"| `{kernel}` | " + " | ".join(states) + " |")
    return "\n".join(lines)


def in_readme(text: str, made: str) -> str:
    """The document with its table replaced."""
    assert BEGIN in text
    return re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: f"{BEGIN}\n{made}\n{END}", text, flags=re.DOTALL)


def runs_of(lines: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], dict[str, dict[str, Any]]]:
    """(The origin of a run of the tests, {kernel: passed, failed, source} of it), from the lines that `launches`
    writes."""
    first, *tests = lines
    found: dict[str, dict[str, Any]] = {}
    for test in tests:
        for kernel in test["kernels"]:
            run = found.setdefault(kernel, {"passed": 0, "failed": {}, "source": first["sources"].get(kernel)})
            if test["outcome"] == "passed":
                run["passed"] += 1
            elif test["outcome"] == "failed" and kernel in (test["about"] or test["kernels"]):
                run["failed"][test["test"]] = test["message"]
    return first, {kernel: run for kernel, run in found.items() if run["passed"] or run["failed"]}


def take(runs: Ledger, lines: Iterable[Mapping[str, Any]], commit: str | None) -> Ledger:
    """The ledger with a run of the tests added."""
    origin, found = runs_of(lines)
    about = {"date": origin["date"], "commit": commit, "versions": origin["versions"], "evidence": "pytest -m gpu"}
    return runs | {origin["device"]: runs.get(origin["device"], {}) | {k: run | about for k, run in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", type=Path, metavar="FILE", help="what a run of the GPU tests wrote")
    asked = parser.parse_args()
    runs, sources = read_ledger(), KernelSources().hashes()
    if asked.take is not None:
        lines = [json.loads(line) for line in asked.take.read_text(encoding="utf-8").splitlines()]
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        # The machine that ran may have had these files without their commit: their hashes say whether it is this one.
        same = lines[0]["sources"] == sources
        runs = take(runs, lines, head.stdout.strip() if same else None)
        write_ledger(runs)
    README.write_text(in_readme(README.read_text(encoding="utf-8"), table(runs, sources)), encoding="utf-8")
    print(table(runs, sources))


if __name__ == "__main__":
    main()
