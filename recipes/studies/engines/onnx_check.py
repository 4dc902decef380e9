"""Our ONNX graphs beside those of ONNX Runtime's own quantizers: distance to the original, bytes and time.

    python recipes/studies/engines/onnx_check.py demo MODEL --encoder DIR --sentences TEST.jsonl DEV.jsonl \\
        --resnet20 WEIGHTS.safetensors IMAGES.npz --text TEXT --calibration TEXT --json OUT.json

Of each model there is one graph in float32 (`original`). ONNX Runtime's quantizers read that graph; ours are exported
as a person does. One evaluator runs all files in ONNX Runtime on the same inputs, which nobody was calibrated on. KL,
and of an encoder 1 - cosine of mean hidden states, are to the original. Times are of all files in turn, round by round,
on one thread; the ratio to the original is a median over rounds.
"""

import argparse
import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import onnxruntime
import torch
import transformers

import compress
from compress.checkpoint.files import read_json, write_json
from compress.onnx.readback import divergence
from compress.recipes.studies.engines import onnx_files
from compress.recipes.studies.engines.onnx_files import Case, Feed
from compress.recipes.studies.figures import asked, made_by

ORIGINAL = "original, float32"
WARM = 3  # runs before the first that counts
TABLE = (
    "| model | file | MB | distance | same top | time | of the original's | step | of the original's |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def opened(graph: Path) -> Any:
    """A session on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])


def first_output(session: Any, feed: Feed) -> torch.Tensor:
    """The first output for inputs by name."""
    return torch.from_numpy(session.run(None, feed)[0])


def distance(kind: str, original: torch.Tensor, found: torch.Tensor) -> tuple[float, float | None]:
    """(KL of predictions in nats, share of the same top), or of an encoder (1 - cosine of mean states, None)."""
    if kind == "encoder":
        pair = (original.mean(1).double(), found.mean(1).double())
        return float(1 - torch.nn.functional.cosine_similarity(*pair).mean()), None
    return divergence(original, found), float((original.argmax(-1) == found.argmax(-1)).double().mean())


def timed(sessions: dict[str, Any], feed: Feed, rounds: int) -> dict[str, list[float]]:
    """{title: milliseconds of each round}, all titles in turn in every round."""
    found: dict[str, list[float]] = {title: [] for title in sessions}
    for i in range(rounds + WARM):
        for title, session in sessions.items():
            begun = time.perf_counter()
            session.run(None, feed)
            if i >= WARM:
                found[title].append(1e3 * (time.perf_counter() - begun))
    return found


def rows_of(case: Case, scratch: Path, rounds: int) -> list[dict[str, Any]]:
    """The rows of a model: one for each file."""
    original = scratch / "original.onnx"
    onnx_ir.save(case.traced(), original)
    made = {ORIGINAL: original, **case.ours(scratch), **onnx_files.theirs(case, original, scratch)}
    sessions = {title: opened(path) for title, path in made.items() if isinstance(path, Path)}
    expected = [first_output(sessions[ORIGINAL], feed) for feed in case.held_out]
    times = {name: timed(sessions, feed, rounds) for name, feed in case.timed.items()}
    rows = []
    for title, path in made.items():
        row: dict[str, Any] = {"model": case.name, "kind": case.kind, "title": title}
        if not isinstance(path, Path):
            rows.append({**row, "refused": path})
            continue
        found = [first_output(sessions[title], feed) for feed in case.held_out]
        pairs = [distance(case.kind, *pair) for pair in zip(expected, found, strict=True)]
        row |= {"bytes": sum(each.stat().st_size for each in path.parent.glob(f"{path.name}*"))}
        row |= {"distance": float(np.mean([d for d, _ in pairs]))}
        if case.kind != "encoder":
            row["same_top"] = float(np.mean([same for _, same in pairs]))
        for name, each in times.items():
            ratios = np.divide(each[title], each[ORIGINAL])
            row[name] = {"ms": float(np.median(each[title])), "ratio": float(np.median(ratios))}
        rows.append({**row, "rounds": rounds, "inputs": len(case.held_out)})
    return rows


def line_of(row: dict[str, Any]) -> str:
    """A row as Markdown."""
    start = f"| {row['model']} | {row['title']} | "
    if "refused" in row:
        return f"{start}{row['refused']} | | | | | | |"
    top = f"{row['same_top']:.1%}" if "same_top" in row else ""
    cells = [f"{row[n]['ms']:.3g} ms | {row[n]['ratio']:.2f}" if n in row else " | " for n in ("forward", "step")]
    return f"{start}{row['bytes'] / 1e6:.2f} | {row['distance']:.2e} | {top} | {' | '.join(cells)} |"


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="decoders: directories, or 'demo'")
    parser.add_argument("--encoder", help="a directory of a BERT")
    parser.add_argument("--sentences", nargs=2, type=Path, metavar=("HELD_OUT", "CALIBRATION"), help="JSON lines")
    parser.add_argument("--resnet20", nargs=2, type=Path, metavar=("WEIGHTS", "IMAGES"))
    parser.add_argument("--text", default="demo")
    parser.add_argument("--calibration", default="demo")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--samples", type=int, default=16, help="windows, batches of sentences or of images")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    if arguments.encoder and not arguments.sentences:
        parser.error("--encoder needs --sentences")
    arguments.command = asked(__file__, words)
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)  # of ONNX Runtime's quantizers, a line for every tensor
    print(TABLE, flush=True)
    for case in onnx_files.cases(arguments):
        with tempfile.TemporaryDirectory() as scratch:
            rows = rows_of(case, Path(scratch), arguments.rounds)
        print("\n".join(map(line_of, rows)), flush=True)
        if arguments.json:
            keep(arguments.json, rows, arguments.command)


def keep(target: Path, rows: Sequence[dict[str, Any]], command: str) -> None:
    """Write rows in the place of earlier ones of the model; other rows stay."""
    about = {"command": command, "onnxruntime": onnxruntime.__version__, "compress": compress.__version__}
    before = read_json(target)["rows"] if target.exists() else []
    kept = [each for each in before if each["model"] != rows[0]["model"]]
    target.parent.mkdir(parents=True, exist_ok=True)
    write_json(target, {"rows": [*kept, *({**row, **about, "made_by": made_by()} for row in rows)]})


if __name__ == "__main__":
    main()
