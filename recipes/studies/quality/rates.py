"""The learning rate that a range test chooses, beside five that a hand would pick: QAT and distillation.

    python recipes/studies/quality/rates.py MODEL --calibration TOKENS --text TOKENS --scheme w2a16 \\
        --group-size -1 --json OUT.json
    python recipes/studies/quality/rates.py MODEL --calibration TOKENS --text TOKENS --student-layers 2 --json OUT.json

Each row is trained in this process on the calibration tokens, alike but for its rate, and compared with the original on
held-out text. The first row is the model before training. Rows already in the file are not computed again.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import compress
from compress.checkpoint.read.pretrained import load_dense
from compress.checkpoint.read.source import find_source
from compress.cli.run_command import split_settings
from compress.engine.walk.held_out_kl import divergence_between
from compress.model.layers import find_stacks
from compress.passes.protocol.base import Pass
from compress.passes.protocol.recipe import make_pass
from compress.passes.train import Train
from compress.passes.whole_model.structure import Structure
from compress.recipes.studies.figures import asked, made_by, stored

RATES = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3)
EVALUATED = 8  # samples at once


def beginning(said: argparse.Namespace) -> list[Pass]:
    """The passes before training."""
    if said.student_layers is not None:
        blocks = len(find_stacks(load_dense(find_source(said.model)))[0].blocks)
        return [Structure(layers=blocks - said.student_layers)]
    return [make_pass("gptq", split_settings(said.set, {"scheme": said.scheme, "group_size": said.group_size}))]


def row(title: str, said: argparse.Namespace, passes: list[Pass], tokens: Tensor, text: Tensor) -> dict[str, Any]:
    """The figures of one way; `kept`: the step whose parameters are written."""
    began = time.process_time()
    result = compress.quantize(said.model, passes, calibration=tokens)
    seconds = round(time.process_time() - began, 1)
    assert result.model is not None
    original, model = load_dense(find_source(said.model)).float(), result.model.float()
    kl = divergence_between(original.eval(), model.eval(), [{"input_ids": part} for part in text.split(EVALUATED)])
    found: dict[str, Any] = {"title": title, "kl_mean": kl, "cpu_seconds": seconds}
    for history in result.record.training:
        tested = history["range_test"]
        found |= {"learning_rate": history["options"]["learning_rate"], "kept": history["kept"]}
        found |= {} if tested is None else {"range_test": tested["curve"]}
    rate = f"{found['learning_rate']:.2g}" if "learning_rate" in found else ""
    print(f"| {title} | {rate} | {kl:.4f} | {seconds} |", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True, type=Path)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--scheme", default="w2a16")
    parser.add_argument("--group-size", type=int, default=-1)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of gptq")
    parser.add_argument("--student-layers", type=int, help="distil a part of the model instead")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--samples", type=int, help="of the text, to evaluate on  [default: all]")
    parser.add_argument("--length", type=int, help="tokens of a window  [default: those of the tokens]")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--json", required=True, type=Path)
    said = parser.parse_args()
    tokens, text = (windows(torch.load(path, weights_only=True), said.length) for path in (said.calibration, said.text))
    text = text[: said.samples]
    few: dict[str, Any] = {"steps": said.steps, "rows": said.rows}
    start = beginning(said)
    kind = f"{said.scheme}, group size {said.group_size}" if said.student_layers is None else "distilled"
    ways: dict[str, list[Pass]] = {"before": start, "chosen": [*start, Train(**few)]}
    ways |= {f"given {rate:g}": [*start, Train(**few, learning_rate=rate)] for rate in said.rates}
    about = {"model": Path(said.model).name, "kind": kind, **few, "length": tokens.shape[1]}
    rows = stored(said.json)
    for title, passes in ways.items():
        if any({**about, "title": title}.items() <= found.items() for found in rows):
            continue
        rows.append({**about, **row(title, said, passes, tokens, text), "command": asked(__file__)})
        record = {**made_by(), "rows": rows}
        said.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def windows(ids: Tensor, length: int | None) -> Tensor:
    """Token ids [samples, T] in windows of so many tokens."""
    if length is None:
        return ids
    return torch.cat([part for part in ids.split(length, dim=1) if part.shape[1] == length])


if __name__ == "__main__":
    main()
