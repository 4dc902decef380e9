"""Print docs/models.md, the table of architectures, from the stored run of `architectures.py`.

    python recipes/studies/models/model_table.py > docs/models.md

Reasons of a run are put in words for its user by `WORDS`, so a reason that is new has to get some.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "results" / "architectures.json"
TASKS = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "seq2seq": "Encoder-decoders",
    "embedding": "Encoders of texts",
    "vision": "Classifiers of images",
    "audio": "Classifiers of sounds",
    "speech": "Speech to text",
}
METHODS = {"w4a16 gptq": "4 bits", "w8a8 rtn": "w8a8"}
HEAD = """# Models

## The share that is stored smaller

Linear layers inside the blocks are stored smaller, in any architecture. The table shows their share of all parameters,
for the default configuration of each model in transformers, and no option but `--method`:

| model | stored smaller | stays as it is |
|---|---|---|
| Llama (also Mistral, Qwen, Gemma, Phi) | 96% | embedding 1.9%, output head 1.9% |
| Qwen3 | 90% | embedding 5.2%, output head 5.2% |
| OPT | 68% | embedding 32% |
| BERT | 78% | embedding 22% |
| T5 | 73% | embedding 27% |
| ViT | 99% | convolutions 0.7% |
| ConvNeXt | 93% | convolutions 6.7% |
| GPT-2 | 68% | embedding 32% |
| ResNet | 0% | convolutions 100% |
| Mixtral | 99% |  |
| Qwen3-MoE | 96% | embedding 2.0%, output head 2.0% |

- {summary}.
- `--embeddings w8a16` includes the embedding and the head.
- Convolutions are fake-quantized: their file size stays the same. [Export to
  ONNX](../compress/inference/README.md#other-readers) to store them in int8. In a model that also has linear layers,
  convolutions need `--convolutions`.
- GPT-2's Conv1D layers run quantized in `compress.load` alone; `compress export --to dense` writes weights for others.
- Experts of a mixture are quantized like other linear layers, each calibrated on the tokens routed to it. Routers and
  gates stay dense. For a model in memory, call `compress.split_experts(model)` first.

## Every architecture

Made by a test, from [results/architectures.json](../recipes/results/architectures.json): a small random model of each
class that transformers has for a task goes through 4-bit GPTQ (w4a16) and, by plain rounding, 8-bit weights and inputs
(w8a8). No other option is given. The output is verified as every one is, loaded, and computed on its codes and on their
values ({made}).

- *works*: all weights of layers are in codes. *partly*: at least half of them. *little*: less than half.
- Percent: the share of the weights of layers, at the sizes of the default configuration, without embeddings, output
  heads and routers, which stay as they are by default. Behind a reason: the share that it keeps dense.
- *run by*: what has computed the result here: `compress.load`, and transformers alone. Other engines:
  [engines](engines.md).
"""
SUPPORTED = ("works", "partly")
VERDICTS = (*SUPPORTED, "little", "refused", "wrong", "fails", "not tried")
LEAST = 0.001  # of the weights: a reason for less is not told
TOLD = 2  # reasons, the largest first
# Words for a user, by how a stored reason begins.
WORDS = {
    "outside the blocks": "dense layers outside the blocks (`--one-block` takes them in)",
    "convolution;": "convolutions stay dense",
    "convolution:": "convolutions stay dense",
    "a convolution, which no checkpoint": "no checkpoint format holds codes of convolutions (ONNX graphs do)",
    "never called during calibration": "layers that its text does not reach; show data that does, or `--method rtn`",
    "called several times": "layers that run several times in a forward pass; `--method rtn` rounds them",
    "shares its weight": "a weight that two modules share",
    "fused experts": "experts in a form that transformers does not mark",
    "its MultiheadAttention never calls": "`nn.MultiheadAttention` (`compress.split_layers`)",
    "MultiheadAttention: compress.split_layers": "`nn.MultiheadAttention` (`compress.split_layers`)",
    "no calibration token reached": "layers that no token reached",
}
OWN_CLASS = re.compile(r"(\w+): not a linear layer")
DENSE_CONVOLUTION = re.compile(r"is a (\w*Conv\w*), which compressed-tensors cannot hold with a rounded input")
REFUSED = {
    "gptq compressed nothing": "every layer runs several times in a forward pass; `--method rtn` rounds them",
    "has no Cholesky factor": "GPTQ finds no solution on this random model, whose activations vanish",
    "loads in transformers with logits that differ": "its logits in transformers differ more than verification allows",
    "there is nothing in it": "a weight without elements",
    "lacks the tensor": "names of tensors in its checkpoint do not lead to its layers",
    "has no such layer": "names of tensors in its checkpoint do not lead to its layers",
}


def rows_of(path: Path = RESULTS) -> list[dict[str, Any]]:
    """The rows of the stored run."""
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return found


def result_of(row: Mapping[str, Any], method: str) -> str:
    """The verdict of a row on a method."""
    return "not tried" if "not tried" in row else str(row[method]["result"])


def reason_of(row: Mapping[str, Any]) -> str:
    """The reason why a row is not "works", in a user's words: of 4 bits, and of w8a8 where that has another."""
    if "not tried" in row:
        return f"no small model was made: {in_words_of_others(row['not tried'])}"
    told = {name: of_method(row[method]) for method, name in METHODS.items()}
    first, second = told.values()
    if first == second:
        return first
    return "; ".join(f"{name}: {why}" if why else f"{name}: all in codes" for name, why in told.items())


def of_method(found: Mapping[str, Any]) -> str:
    """The reason of one method's verdict; empty where all layers are in codes."""
    if found["result"] == "refused":
        return refusal(found["why"])
    if found["result"] in ("wrong", "fails"):
        return str(found.get("why", f"computes something else, off by {found.get('off')}"))
    shares: Counter[str] = Counter()
    for dense in found.get("dense", ()):
        shares[in_words(dense["why"])] += dense["share"]
    large = [(why, share) for why, share in shares.most_common() if share >= LEAST]
    shown = [f"{why} ({percent(share)})" for why, share in large[:TOLD]]
    if not shown and shares:
        return f"{next(iter(shares))} (under {percent(LEAST)})"
    return ", ".join([*shown, *([f"{len(large) - TOLD} more"] if len(large) > TOLD else [])])


def in_words(why: str) -> str:
    """A stored reason for its user."""
    if (own := OWN_CLASS.match(why)) is not None:
        return f"a weight of `{own[1]}`, which is no linear layer"
    return next(words for start, words in WORDS.items() if why.startswith(start))


def refusal(why: str) -> str:
    """A refusal for its user; a message of a run that has no shorter words is told as it is."""
    if DENSE_CONVOLUTION.search(why) is not None:
        return "refused: no checkpoint format holds a convolution with rounded inputs (ONNX graphs do)"
    return f"refused: {next((words for part, words in REFUSED.items() if part in why), why)}"


def in_words_of_others(why: str) -> str:
    """The reason why no small model was made."""
    if (needed := re.search(r"requires the (\w+) library", why)) is not None:
        return f"it needs the library {needed[1]}"
    return f"`{why.replace('`', '')[:120].rstrip()}`"


def percent(share: float) -> str:
    """A share in percent, in tenths below 10 %."""
    return f"{share:.0%}" if share >= 0.1 or not share else f"{share:.1%}"


def readers(row: Mapping[str, Any]) -> str:
    """The programs that have computed a row's results: ours, and transformers alone."""
    ways = {name: row[method].get("transformers", "") for method, name in METHODS.items() if method in row}
    read = [name for name, way in ways.items() if way in ("default", "dequantize=True")]
    ours = any(result_of(row, method) in (*SUPPORTED, "little") for method in METHODS)
    theirs = "transformers" if len(read) == len(METHODS) else f"transformers ({read[0]})" if read else ""
    return ", ".join(filter(None, ["compress" if ours else "", theirs]))


def cell(row: Mapping[str, Any], method: str) -> str:
    """A verdict with the share of weights in codes."""
    verdict, share = result_of(row, method), row.get(method, {}).get("share")
    if share is None or verdict == "works":
        return verdict
    return f"{verdict}, " + (f"over {1 - LEAST:.1%}" if share > 1 - LEAST else f"{share:.1%}")


def counts(rows: Iterable[Mapping[str, Any]], method: str) -> Counter[str]:
    """{verdict: rows}."""
    return Counter(result_of(row, method) for row in rows)


def summary(rows: list[dict[str, Any]]) -> str:
    """A sentence: the number of architectures that are compressed, by method."""
    tried = [row for row in rows if "not tried" not in row]
    fours, eights = (sum(counts(rows, method)[verdict] for verdict in SUPPORTED) for method in METHODS)
    return (
        f"Of {len(rows)} architectures of transformers, {len(tried)} were tried as small random models: at least half "
        f"of the weights of layers are in codes for {fours} in 4 bits, for {eights} in 8-bit weights and inputs"
    )


def overview(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of the table of counts."""
    heads = ["", "rows", *(f"{name}: {', '.join(VERDICTS[:4])}" for name in METHODS.values()), "not tried"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for task, title in {**TASKS, "": "all"}.items():
        found = {method: counts([row for row in rows if task in ("", row["task"])], method) for method in METHODS}
        cells = [", ".join(str(found[method][verdict]) for verdict in VERDICTS[:4]) for method in METHODS]
        first = next(iter(found.values()))
        lines.append(f"| {title} | {first.total()} | {' | '.join(cells)} | {first['not tried']} |")
    return lines


def page() -> str:
    """The page as Markdown."""
    record = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = record["rows"]
    commits = sorted({row.get("commit", record["commit"]) for row in rows})
    made = f"transformers {record['transformers']}, torch {record['torch']}, commits {', '.join(commits)}"
    lines = [HEAD.format(made=made, summary=summary(rows)), *overview(rows)]
    for task, title in TASKS.items():
        lines += ["", f"## {title}", "", "| class | model type | 4 bits | w8a8 | what stays dense, and why | run by |"]
        lines.append("|---|---|---|---|---|---|")
        for row in sorted((row for row in rows if row["task"] == task), key=lambda row: row["class"].lower()):
            cells = [row["class"], ", ".join(row["model_types"]), *(cell(row, method) for method in METHODS)]
            cells += [reason_of(row), readers(row)]
            lines.append(f"| {' | '.join(text.replace('|', '/') for text in cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
