"""A method that rounds for the error of each layer beside the same that rounds for the loss: KL of the same windows.

    python recipes/studies/quality/objective.py MODEL --calibration TEXT --text TEXT --scheme w3a16 --group-size 32 \\
        --json OUT.json

`--method` is gptq, spqr, k-quants (which has groups of its own) or trellis.

Both are made in this process, in float32, from the same tokens and on the same grid, so that their checkpoints take the
same bytes. Texts are files of text or of token ids. Rows already in the file are not computed again.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy.special import stdtrit

import compress
from compress.checkpoint.read.pretrained import load_dense, tokenizer_of
from compress.checkpoint.read.source import find_source
from compress.data.text import load_tokens
from compress.engine.walk.held_out_kl import divergence_between
from compress.passes.protocol.recipe import make_pass
from compress.recipes.studies.figures import asked, made_by, stored

OBJECTIVES = ("layer", "loss")
OF_RUN = ("method", "rotate")  # of a run's options those that are not of its method


def measured(model: str, calibration: torch.Tensor, text: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """The KL of each window, and the CPU seconds of the run."""
    source = find_source(model)
    original = load_dense(source).float().eval()
    began = time.process_time()
    online: dict[str, Any] = {"hidden": False, "heads": False, "online": True} if options["rotate"] == "online" else {}
    rotation: list[compress.Pass] = [compress.Rotation(**online)] if options["rotate"] else []
    method = make_pass(options["method"], {k: v for k, v in options.items() if k not in OF_RUN and v is not None})
    result = compress.quantize(load_dense(source).float().eval(), [*rotation, method], calibration=calibration)
    seconds = time.process_time() - began
    assert result.model is not None
    windows = [divergence_between(original, result.model.eval(), [{"input_ids": ids}]) for ids in text.split(1)]
    return {**options, "cpu_seconds": round(seconds, 1), "kl_windows": windows, "notes": result.record.notes}


def paired(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The ratio of the mean KLs, and the mean difference by windows with its interval of Student's t, 95 %."""
    layer, loss = (torch.tensor(row["kl_windows"], dtype=torch.float64) for row in rows)
    change, count = loss - layer, len(layer)
    beside = float(stdtrit(count - 1, 0.975)) * float(change.std()) / count**0.5
    figures = {"kl": [float(layer.mean()), float(loss.mean())], "ratio": float(loss.mean() / layer.mean())}
    figures |= {"change": float(change.mean()), "interval": beside, "lower": int((change < 0).sum()), "windows": count}
    return {**figures, "cpu_ratio": rows[1]["cpu_seconds"] / rows[0]["cpu_seconds"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--scheme", default="w4a16")
    parser.add_argument("--group-size", type=int, help="[default: the method's]")
    parser.add_argument(
        "--rotate",
        nargs="?",
        const=True,
        default=False,
        choices=["online"],
        help="rotate the model first; online: all of it as it runs",
    )
    parser.add_argument("--length", type=int, help="tokens of a window of calibration text")
    parser.add_argument("--text-length", type=int, help="tokens of a window of held-out text")
    parser.add_argument("--samples", type=int, default=128, help="windows to calibrate on  [default: 128]")
    parser.add_argument("--text-samples", type=int, default=120, help="windows to evaluate on  [default: 120]")
    parser.add_argument("--json", required=True, type=Path)
    said = parser.parse_args()
    source = find_source(said.model)
    read = partial(load_tokens, tokenizer=partial(tokenizer_of, source), config=load_dense(source).config)
    calibration = read(said.calibration, what="calibration", length=said.length, samples=said.samples).ids
    text = read(said.text, what="held-out", length=said.text_length, samples=said.text_samples).ids
    about = {"model": Path(said.model).name, "calibration": list(calibration.shape), "text": list(text.shape)}
    rows = stored(said.json)
    grid = {"method": said.method, "scheme": said.scheme, "group_size": said.group_size, "rotate": said.rotate}
    pair: list[dict[str, Any]] = []
    for objective in OBJECTIVES:
        options = {**grid, "objective": objective}
        known = [row for row in rows if {**about, **options}.items() <= row.items()]
        if not known:
            known = [{**about, **measured(said.model, calibration, text, options), "command": asked(__file__)}]
            rows += known
            keep(said.json, rows)
        pair += known
    both = {**about, **grid, "objective": "loss beside layer"}
    rows = [row for row in rows if not both.items() <= row.items()] + [{**both, **paired(pair)}]
    keep(said.json, rows)
    print(json.dumps(rows[-1]), flush=True)


def keep(target: Path, rows: list[dict[str, Any]]) -> None:
    target.write_text(json.dumps({**made_by(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
