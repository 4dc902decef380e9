"""GPTQ by one library, for `solver_time.py`, which runs this file in a python that has the library; others may be
missing.

    python solver_worker.py JOB.json RESULT.json

JOB: library (compress, gptqmodel or llmcompressor), model and output (folders), tokens (a file of ids [rows, length]),
group_size, threads, options (of compress: those of its pass; else of the library's configuration), method (of compress:
the class of its pass). RESULT: CPU seconds (user and system, of this process and of those that it started) of the
imports and of everything after them: the model read, quantized to 4 bits and written; or `error`, the reason why there
is nothing of that.

compress cannot read GPTQModel's own checkpoint format: the values of its layers are written to a plain checkpoint
beside it, `values`, which the seconds leave out.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("compress-models", "gptqmodel", "llmcompressor", "torch", "transformers", "compressed-tensors")


def cpu_seconds() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def installed() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def by_compress(job: Mapping[str, Any]) -> Callable[[], Any]:
    import time
    from types import SimpleNamespace

    import torch

    import compress
    from compress.engine.walk import state

    # What a record says its seconds went to is by the clock; other processes are no concern of ours here.
    vars(state)["time"] = SimpleNamespace(monotonic=time.process_time)
    torch.set_num_threads(job["threads"])
    sizes = {"group_size": job["group_size"]} if job["method"] == "GPTQ" else {}
    one = getattr(compress, job["method"])(scheme="w4a16", **sizes, **job["options"])
    options = {"output": job["output"], "overwrite": True, "verify": False}
    quantize = compress.quantize  # imports what it needs
    return lambda: quantize(job["model"], one, calibration=job["tokens"], **options).record.spent


def by_gptqmodel(job: Mapping[str, Any]) -> Callable[[], Any]:
    import torch
    from gptqmodel import GPTQModel, QuantizeConfig
    from safetensors.torch import load_file, save_file

    torch.set_num_threads(job["threads"])
    rows = [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in torch.load(job["tokens"])]
    config = QuantizeConfig(bits=4, group_size=job["group_size"], sym=True, **job["options"])

    def work() -> Any:
        model = GPTQModel.load(job["model"], config, device="cpu", dtype=torch.float32)
        model.quantize(rows, batch_size=1)
        model.save(job["output"])
        return model

    def values(model: Any) -> None:
        stored = load_file(Path(job["model"]) / "model.safetensors")
        for name, module in model.model.named_modules():
            if hasattr(module, "dequantize_weight"):
                found = module.dequantize_weight().detach().float()  # [K, N]
                # In the format in which it writes, zero points are one less than what was rounded with.
                found -= module.scales.float()[module.g_idx.long()]
                assert found.t().shape == stored[f"{name}.weight"].shape
                stored[f"{name}.weight"] = found.t().contiguous()
        target = Path(job["values"])
        target.mkdir()
        save_file(stored, target / "model.safetensors", {"format": "pt"})
        for file in Path(job["model"]).glob("*.json"):
            (target / file.name).write_bytes(file.read_bytes())

    return WorkerResult(work, values)


def by_llmcompressor(job: Mapping[str, Any]) -> Callable[[], Any]:
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job["threads"])
    ids = torch.load(job["tokens"])
    rows = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": job["group_size"]}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    recipe = GPTQModifier(config_groups=groups, ignore=["lm_head"], **job["options"])

    def work() -> None:
        model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
        counts = {"num_calibration_samples": len(ids), "max_seq_length": ids.shape[1]}
        oneshot(model=model, dataset=rows, recipe=recipe, output_dir=job["output"], **counts)

    return work


class WorkerResult:
    """Timed work, with a function that writes its result afterwards."""

    def __init__(self, work: Callable[[], Any], after: Callable[[Any], None]) -> None:
        self.work, self.after = work, after

    def __call__(self) -> Any:
        return self.work()


LIBRARIES = {"compress": by_compress, "gptqmodel": by_gptqmodel, "llmcompressor": by_llmcompressor}


def main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    try:
        work = LIBRARIES[job["library"]](job)
        imported = cpu_seconds()
        made = work()
        result: dict[str, Any] = {"import": imported, "work": cpu_seconds() - imported}
        if job["library"] == "compress":
            result["spent"] = made
        if isinstance(work, WorkerResult):
            work.after(made)
    except Exception as error:  # noqa: BLE001 - whatever a library raises is the answer
        result = {"error": f"{type(error).__name__}: {error}"}
    Path(result_file).write_text(json.dumps({**result, "versions": installed()}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
