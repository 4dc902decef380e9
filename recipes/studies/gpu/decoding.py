"""Times sequences in a Llama of random weights: prompts and single steps, and where a step's time goes.

    python recipes/studies/gpu/decoding.py --json decode.json [--shape llama-3-8b] [--blocks 8]

Variants, in this order: w4a16 and dense with all blocks, w4a16 also with a block's step in launches of its own
(`inference.steps`), and in batches; then w4a16 and dense with `--blocks` blocks, as they are
and by `torch.compile`, which takes long for all of them. A step is a captured CUDA graph, a prompt is launched eagerly.
The file is written anew after every variant:

    results: [{"variant", "blocks", "compiled", "steps", "batch", "prompt", "prefill_ms", "step_ms",
               "tokens_per_s", "launch", "peak_bytes", "profile": {"step" | "prefill": {"span_ms", "busy_ms", "gap_ms",
               "launches", "kernels": [{"name", "ms", "count"}]}}}]

steps: blocks whose steps run in their own launches, and why others do not; None where no block has them. span: from the
first kernel's start to the last one's end; busy: the part of it in which a kernel runs.
"""

import argparse
import gc
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from compress.checkpoint.files import write_json
from compress.evaluation.provenance import origin
from compress.evaluation.speed import decoder
from compress.evaluation.speed.generation import GenerationTimer
from compress.inference.load.conversions import fuse
from compress.inference.load.steps import attend_here
from compress.inference.steps.block import install, installed_steps, remarks
from compress.kernels import workspace
from compress.recipes.studies.figures import asked as command_of

SCHEMES = ("w4a16", decoder.DENSE)
AS_IS, LAUNCHES, COMPILED = range(3)
SHOWN = 20  # kernels of a profile


def build(shape: str, blocks: int | None, scheme: str, device: torch.device) -> Any:
    """A Llama of random weights as `compress.load` would assemble it, bfloat16; blocks: None for all of the shape."""
    config = decoder.config_of(shape)
    config.num_hidden_layers = blocks or config.num_hidden_layers
    model = decoder.random_llama(config, scheme, torch.bfloat16, device)
    if scheme == decoder.DENSE:
        decoder.fuse_dense(model)
    else:
        fuse(model)
    return model


def in_launches(model: Any) -> None:
    """Give the blocks of a model steps of their own, as `compress.load` does."""
    attend_here(model)
    install(model)


def steps_of(model: Any) -> dict[str, Any] | None:
    """The blocks whose steps are known, and remarks on others."""
    every = [steps for _, steps in installed_steps(model)]
    return {"blocks": sum(s.known is not None for s in every), "remarks": remarks(model)} if every else None


def timed(model: Any, batch: int, prompt: int, new: int, rounds: int) -> dict[str, Any]:
    """Medians over rounds of one prompt and of one step, and a profile of each."""
    generation = GenerationTimer(model, batch, prompt, new)
    generation.capture()
    generation.round()
    found = [generation.round() for _ in range(rounds)]
    prefill, step = (statistics.median(times) for times in zip(*found, strict=True))
    profiles = {"prefill": profiled(generation.start, generation.device)}
    profiles["step"] = profiled(generation.run_step, generation.device)
    return {
        "steps": steps_of(model),
        "batch": batch,
        "prompt": prompt,
        "prefill_ms": prefill,
        "step_ms": step,
        "tokens_per_s": 1e3 * batch / step,
        "rounds": rounds,
        "launch": generation.launch,
        "why_eager": generation.why_eager,
        "profile": profiles,
    }


def profiled(run: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """The kernels of one run by time, and the gaps between them. On a CPU: operators, each with those inside it."""
    gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        run()
        if gpu:
            torch.cuda.synchronize()
    kind = "CUDA" if gpu else "CPU"
    events = [e for e in profile.events() if e.device_type.name == kind]
    return spent((e.name, e.time_range.start, e.time_range.end) for e in events)


def spent(events: Iterable[tuple[str, float, float]]) -> dict[str, Any]:
    """Span, busy time and gaps of events (name, start, end) in microseconds, and their names by time."""
    ordered = sorted(events, key=lambda event: event[1])
    by_name: dict[str, list[float]] = {}
    busy, reached = 0.0, float("-inf")
    for name, start, end in ordered:
        by_name.setdefault(name, []).append((end - start) / 1e3)
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    span = reached - ordered[0][1] if ordered else 0.0
    most = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:SHOWN]
    return {
        "span_ms": span / 1e3,
        "busy_ms": busy / 1e3,
        "gap_ms": (span - busy) / 1e3,
        "launches": len(ordered),
        "kernels": [{"name": name, "ms": sum(times), "count": len(times)} for name, times in most],
    }


def measure(
    shape: str,
    few: int,
    batches: Sequence[int],
    prompts: Sequence[int],
    new: int,
    rounds: int,
    keep: Callable[[Any], None],
) -> None:
    """Call `keep` with the results of every variant as soon as there are any. Batches read the first prompt."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        workspace.prepare(device)
    single, many = [(1, prompt) for prompt in prompts], [(batch, prompts[0]) for batch in batches]
    for blocks, ways in ((None, (AS_IS, LAUNCHES)), (few, (AS_IS, COMPILED))):
        for scheme in SCHEMES:
            model = build(shape, blocks, scheme, device)
            for way in ways:
                if way == COMPILED:
                    model.compile(dynamic=False)
                elif way != AS_IS and scheme == decoder.DENSE:
                    continue
                elif way == LAUNCHES:
                    in_launches(model)
                about = {"variant": scheme, "blocks": model.config.num_hidden_layers, "compiled": way == COMPILED}
                for batch, prompt in [*single, *(many if blocks is None else ())]:
                    if device.type == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                    found = about | timed(model, batch, prompt, new, rounds)
                    found["peak_bytes"] = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
                    keep(found)
            del model
            torch.compiler.reset()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--shape", default="llama-3-8b", choices=list(decoder.SHAPES))
    parser.add_argument("--blocks", type=int, default=8, help="blocks of the variants that are also compiled")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--batches", type=int, nargs="*", default=[4, 16], help="of all blocks, with the first prompt")
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    whole = origin(device) | {
        "command": command_of(__file__),
        "shape": asked.shape,
        "dtype": "bfloat16",
        "new": asked.new,
        "results": [],
    }

    def keep(found: dict[str, Any]) -> None:
        whole["results"].append(found)
        write_json(asked.json, whole)
        step, name = found["profile"]["step"], found["variant"] + (", compiled" if found["compiled"] else "")
        name += f", {found['steps']['blocks']} in launches" if found["steps"] else ""
        print(
            f"{name}, {found['blocks']} blocks, batch {found['batch']}, prompt {found['prompt']}: "
            f"{found['prefill_ms']:.2f} ms, step {found['step_ms']:.3f} ms ({found['launch']}; kernels "
            f"{step['busy_ms']:.3f}, gaps {step['gap_ms']:.3f}, {step['launches']} launches)",
            flush=True,
        )
        for kernel in step["kernels"][:6]:
            print(f"    {kernel['ms']:8.3f} ms {kernel['count']:5d} x {kernel['name'][:80]}", flush=True)

    measure(asked.shape, asked.blocks, asked.batches, asked.prompts, asked.new, asked.rounds, keep)


if __name__ == "__main__":
    main()
