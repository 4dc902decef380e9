"""Commands and snippets of the documents, and what their placeholders stand for in a test.

A command is a line of a fenced block, or code in the first column of a table, that begins with `compress`, `torchrun`,
`make` or `pip`, or with variables of the environment before these; of a file of CI, a step. A snippet is a fenced block
of Python or YAML.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    *(
        "README.md",
        "CONTRIBUTING.md",
        "SKILL.md",
        "docs/start.md",
        "docs/ci.md",
        "docs/ci/github.yml",
        "docs/ci/gitlab.yml",
        "docs/commands.md",
        "docs/guides.md",
        "docs/memory.md",
        "docs/python.md",
        "docs/ranks.md",
        "compress/passes/README.md",
        "compress/train/README.md",
    ),
    *("compress/inference/README.md", "evaluation/README.md", "kernels/README.md", "recipes/README.md"),
)
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:compress|torchrun|make|pip) ")
# Placeholders, and what a test puts there. A directory called OUT is what an earlier command has written.
PLACEHOLDERS = {
    "MODEL": "demo",
    "TEACHER": "demo",
    "TEXT": "text.pt",
    "GPUS": "1",
    "OUT...": "OUT",
    "recipes/sweeps/*.yaml": "recipes/sweeps/w8-rtn.yaml recipes/sweeps/w4-rtn.yaml",
}
# What `...` leaves to the reader.
ELIDED = {
    "quantize": "--calibration TEXT --output OUT",
    "plan": "--method gptq",
    "prune": "--calibration TEXT --output OUT",
    "evaluate": "--reference MODEL --text TEXT",
    "sweep": "--calibration TEXT --text TEXT --output DIR",
}
# What FILE and NAME are, by the word before them.
NAMED = {
    "--json": "figures.json",
    "--html": "page.html",
    "--svg": "curve.svg",
    "--recipe": "recipe.yaml",
    "methods": "gptq",
    "recipes": "w4a16-gptq",
}


@dataclass(frozen=True)
class Snippet:
    """Code of a document. language: `command`, `python` or `yaml`."""

    document: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}: {self.text.splitlines()[0]}"

    @property
    def words(self) -> list[str]:
        """The words of a command as it is run, without its environment: placeholders are replaced, and what is in
        brackets is given."""
        text = self.text.partition("  #")[0].replace("[", " ").replace("]", " ")
        said = re.sub(r"^(?:[A-Z_]+=\S+ )*", "", text)
        task = said.partition("compress ")[2].partition(" ")[0]
        result: list[str] = []
        for word in shlex.split(re.sub(r"(?<=\s)\.\.\.(?=\s|$)", lambda _: ELIDED[task], said)):
            before = result[-1] if result else ""
            if word in ("FILE", "NAME"):
                word = NAMED[before]
            result += PLACEHOLDERS[word].split(" ") if word in PLACEHOLDERS else [word]
        return result


def snippets() -> list[Snippet]:
    """All commands and snippets of the documents, in their order."""
    return [snippet for document in DOCUMENTS for snippet in _of(document)]


def _of(document: str) -> list[Snippet]:
    found: list[Snippet] = []
    fence, block, begun = None, [], 0
    for number, line in enumerate((ROOT / document).read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            if fence is None:
                fence, block, begun = line[3:].strip(), [], number
                continue
            if fence:
                found.append(Snippet(document, begun, fence, "\n".join(block) + "\n"))
            fence = None
        elif fence is not None:
            block.append(line)
            if not fence and COMMAND.match(line):
                found.append(Snippet(document, number, "command", line))
        elif document.endswith(".yml") and (step := re.match(r"\s+- (?:run: )?(compress .*)", line)):
            found.append(Snippet(document, number, "command", step[1]))
        elif line.startswith("| `"):
            first = line.split(" | ")[0]
            found += [
                Snippet(document, number, "command", c) for c in re.findall(r"`([^`]+)`", first) if COMMAND.match(c)
            ]
    return found
