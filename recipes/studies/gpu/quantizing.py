"""Times GPTQ with its defaults, then rtn, on a few blocks of a Llama of random weights: seconds by part, peak memory.

    python recipes/studies/gpu/quantizing.py --json quantize.json [--library compress] [--blocks 4]

128 x 2,048 random tokens by default. Each runs on one block first, then on `--blocks`, so that a run that is cut off
has a result. The file is written anew after each:

    results: [{"method", "blocks", "seconds", "parts": {"forward", "statistics", "solve", "write"}, "peak_bytes",
               "seconds_of_all": what all blocks of the shape would take, at the same seconds a block}]

`--memory` takes all but so many GiB of the GPU away: compress then keeps to these. `--library llmcompressor` runs that
library's GPTQ on the same model and tokens, where it is installed; it tells no parts.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.files import write_json
from compress.evaluation.provenance import origin
from compress.evaluation.speed import decoder
from compress.recipes.studies.figures import asked as command_of

GROUP, GIB = 128, 2**30
LIBRARIES = ("compress", "llmcompressor")


def build(shape: str, blocks: int, device: torch.device) -> Any:
    """A dense Llama of random bfloat16 weights in the CPU's memory."""
    config = decoder.config_of(shape)
    config.num_hidden_layers = blocks
    return decoder.random_llama(config, decoder.DENSE, torch.bfloat16, device).to("cpu")


def by_compress(model: Any, tokens: Tensor, method: str, device: torch.device, out: Path) -> Mapping[str, float]:
    """Quantize and write; seconds by part."""
    import compress

    one = compress.GPTQ(scheme="w4a16") if method == "gptq" else compress.RTN(scheme="w4a16")
    data = tokens if method == "gptq" else None
    return compress.quantize(model, one, calibration=data, output=out, device=device, verify=False).record.spent


def by_llmcompressor(model: Any, tokens: Tensor, method: str, device: torch.device, out: Path) -> Mapping[str, float]:
    """Quantize and write."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    # Asked for, and not used: the data are ids.
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")), pad_token="a")
    rows = Dataset.from_dict({"input_ids": tokens.tolist(), "attention_mask": torch.ones_like(tokens).tolist()})
    recipe = GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
    # It writes what lies beside a model's weights, and so wants a place that the model came from.
    came_from = str(out.with_name("config"))
    model.config.save_pretrained(came_from)
    model.name_or_path = model.config._name_or_path = came_from
    sizes = {"num_calibration_samples": len(tokens), "max_seq_length": tokens.shape[1]}
    oneshot(model=model, processor=words, dataset=rows, recipe=recipe, output_dir=str(out), **sizes)
    return {}


def measure(
    library: str, shape: str, blocks: int, samples: int, length: int, keep: Callable[[dict[str, Any]], None]
) -> None:
    """Call `keep` with the result of each run as soon as it is there."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    whole = decoder.config_of(shape).num_hidden_layers
    vocabulary = decoder.config_of(shape).vocab_size
    tokens = torch.randint(vocabulary, (samples, length), generator=torch.Generator().manual_seed(0))
    methods = ("gptq", "rtn") if library == "compress" else ("gptq",)
    runs = [(method, count) for method in methods for count in dict.fromkeys((1, blocks))]
    first: dict[str, float] = {}
    for method, count in runs:
        model = build(shape, count, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            work = by_compress if library == "compress" else by_llmcompressor
            parts = work(model, tokens, method, device, Path(folder) / "out")
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.monotonic() - began
        first.setdefault(method, seconds)
        found = {"library": library, "method": method, "blocks": count, "seconds": seconds, "parts": dict(parts)}
        if count > 1:
            each = (seconds - first[method]) / (count - 1)
            found |= {"seconds_of_all": first[method] + each * (whole - 1)}
        found["peak_bytes"] = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        keep(found)
        del model
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--library", choices=LIBRARIES, default=LIBRARIES[0])
    parser.add_argument("--shape", default="llama-3-8b", choices=list(decoder.SHAPES))
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--memory", type=float, metavar="GIB")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if asked.memory is not None and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(asked.memory * GIB / torch.cuda.mem_get_info()[1])
    whole: dict[str, Any] = origin(device) | {
        "command": command_of(__file__),
        "shape": asked.shape,
        "samples": asked.samples,
    }
    whole |= {"length": asked.length, "group_size": GROUP, "memory_gib": asked.memory, "results": []}
    if find_spec(asked.library) is None:
        write_json(asked.json, whole | {"skipped": f"{asked.library} is not installed"})
        print(f"skipped: {asked.library} is not installed")
        return

    def keep(found: dict[str, Any]) -> None:
        whole["results"].append(found)
        write_json(asked.json, whole)
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found["parts"].items())
        peak = "" if found["peak_bytes"] is None else f"; peak {found['peak_bytes'] / 1e9:.1f} GB"
        scaled = f"; all blocks {found['seconds_of_all']:.0f} s" if "seconds_of_all" in found else ""
        print(
            f"{found['library']} {found['method']}, {found['blocks']} blocks: {found['seconds']:.1f} s ({parts})"
            f"{scaled}{peak}",
            flush=True,
        )

    measure(asked.library, asked.shape, asked.blocks, asked.samples, asked.length, keep)


if __name__ == "__main__":
    main()
