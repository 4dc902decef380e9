"""Try the architectures of transformers: a tiny random model of each, through 4-bit GPTQ and 8-bit weights and inputs.

    python recipes/studies/models/architectures.py --json OUT.json [--only NAME ...] [--tasks causal masked ...]

Each is made small (`small.py`), quantized from its directory, loaded, and computed on its codes and on their
dequantized values, which must agree; transformers alone loads and computes it, too. Verdicts of a row: "works" (all
linear layers in codes), "partly" (most of the weights of layers, with what stays dense, and why), "little" (less than
half of them), "refused" (in which words), "wrong" and "fails"; "not tried" where no small model was made. Rows already
in the file are not computed again; `--only` computes them anew.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

import compress
from compress.base.errors import CheckpointError, CompressError, InputError, first_line
from compress.checkpoint.read.source import find_source
from compress.inference.check.by_transformers import load_with_transformers
from compress.jobs.verify import verify
from compress.recipes.studies.figures import asked, made_by, stored
from compress.recipes.studies.models.shares import CODES, fates, full_sizes, shares, sizes
from compress.recipes.studies.models.small import small

TASKS: dict[str, str] = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "embedding": "MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES",
    "vision": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "audio": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}
PLAIN: dict[str, Any] = {"drift": 1.0, "clip": False, "refit": 0, "sweeps": 0, "shrink": False}
METHODS = {
    "w4a16 gptq": lambda: compress.GPTQ(scheme="w4a16", group_size=-1, **PLAIN),
    "w8a8 rtn": lambda: compress.RTN(scheme="w8a8"),
}
MOST = 0.5  # of the weights of layers: below, little is in codes
AGREE = 1e-2  # of the outputs' deviation
NEAR = 0.2  # the same, between two ways of rounding inputs to 8 bits


def verdict(found: Mapping[str, float]) -> dict[str, Any]:
    """The verdict on a run that ended. found: `shares.shares`."""
    share = found.get(CODES, 0.0)
    dense = [{"why": why, "share": round(part, 4)} for why, part in found.items() if why != CODES]
    result = "works" if not dense else "partly" if share >= MOST else "little"
    return {"result": result, "share": round(share, 4), **({"dense": dense} if dense else {})}


def tried(model: nn.Module, folder: Path, method: str, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """The result of a method on a model, which is in a folder."""
    out = folder.parent / method.split()[0]
    try:
        made = compress.quantize(folder, METHODS[method](), calibration=[dict(batch)], output=out, verify=False)
        verify(out)  # as in a process of its own, which would take seconds to start
        with torch.no_grad():
            computed = first(compress.load(out)(**batch))
            if method.startswith("w4"):  # what rounds its inputs has no dequantized form
                expected = first(compress.load(out, dequantize=True)(**batch))
                if (off := distance(computed, expected)) > AGREE:
                    return {"result": "wrong", "off": off}
    except (InputError, CompressError) as error:
        return {"result": "refused", "why": anonymous(str(error), folder, out)}
    found = shares(fates(model, made.record), full_sizes(type(model)) or sizes(model))
    return {
        **verdict(found),
        "transformers": read_alone(out, batch, computed, AGREE if method.startswith("w4") else NEAR),
    }


def read_alone(out: Path, batch: Mapping[str, Tensor], expected: Tensor, most: float) -> str:
    """The way in which transformers reads an output ("default" or "dequantize=True"), or why it does not. most: the
    distance from what is expected."""
    try:
        model, way = load_with_transformers(find_source(str(out)))
        with torch.no_grad():
            off = distance(first(model(**batch)), expected)
        return way if off <= most else f"computes something else, {off:.3g} of the outputs' deviation"
    except CheckpointError as error:
        return f"no: {anonymous(first_line(error), out)}"
    except Exception as error:  # noqa: BLE001 - whatever another library finds
        return f"no: {type(error).__name__}: {anonymous(first_line(error), out)}"


def first(output: Any) -> Tensor:
    """The first tensor of a model's output."""
    value: Tensor = output[0]
    return value


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two outputs, by the deviation of the second."""
    return float((found - expected).abs().max() / expected.std())


def anonymous(said: str, *folders: Path) -> str:
    """A message without the names of scratch folders."""
    for folder in folders:
        said = said.replace(str(folder), "MODEL" if folder.name == "model" else "OUT")
    return said


def row(task: str, kind: str, model_types: list[str]) -> dict[str, Any]:
    """The results of an architecture."""
    about: dict[str, Any] = {"task": task, "class": kind, "model_types": model_types}
    try:
        model, batch = small(getattr(transformers, kind), task)
    except Exception as error:  # noqa: BLE001 - whatever transformers finds wrong with a small one
        said = first_line(error) if type(error) is ValueError else f"{type(error).__name__}: {first_line(error)}"
        return {**about, "not tried": said}
    about["inputs"] = sorted(batch)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        model.save_pretrained(folder)  # type: ignore[operator]
        results = {}
        for method in METHODS:
            try:
                results[method] = tried(model, folder, method, batch)
            except Exception as error:  # noqa: BLE001 - what this is to find
                results[method] = {"result": "fails", "why": f"{type(error).__name__}: {first_line(error)}"}
    return {**about, **results}


def architectures(tasks: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """(Task, class, model types) of the classes of tasks."""
    for task in tasks:
        found: dict[str, list[str]] = {}
        for model_type, kinds in getattr(modeling_auto, TASKS[task]).items():
            found.setdefault(kinds if isinstance(kinds, str) else kinds[0], []).append(model_type)
        for kind, model_types in found.items():
            yield task, kind, model_types


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, type=Path)
    parser.add_argument("--only", nargs="+", default=[], help="classes or model types")
    parser.add_argument("--tasks", nargs="+", default=[*TASKS])
    said = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows = {(r["task"], r["class"]): r for r in stored(said.json)}
    for task, kind, model_types in architectures(said.tasks):
        if {kind, *model_types} & {*said.only} or (not said.only and (task, kind) not in rows):
            found = rows[task, kind] = row(task, kind, model_types)
            print(task, kind, found.get("not tried") or {method: found[method] for method in METHODS}, flush=True)
            made = {**made_by(), "command": asked(__file__), "rows": [*rows.values()]}
            said.json.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
