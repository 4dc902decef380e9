"""Print docs/memory.md: which well-known models run, and are quantized, in the memory of a GPU.

python recipes/studies/models/memory_table.py > docs/memory.md
"""

import compress
from compress.jobs.forecast.forecast import Forecast, working_bytes
from compress.jobs.known_models import known_models

SIZES = (8, 12, 16, 24, 80)  # GiB of memory
LEFT = 1  # GiB for the driver, and for what a forward computes
GIB = 2**30
HEAD = """# What fits in a GPU

Computed from the configurations by `compress plan`, not measured: 4-bit weights in groups of 128 (`--scheme w4a16`).
Embedding, output head, keys and values have 16 bits. One GiB of each GPU is left to the driver and to activations.

```
compress plan llama-3.1-8b --method gptq --device cuda --device-memory 12GiB
```

answers for one model and one GPU, which need not be there. It takes one of the names below, a `config.json`, or a
model.

- **Context**: the most tokens of one sequence that fit beside the weights. `--kv-cache int8` nearly doubles it.
- **To quantize**: the peak memory of the GPU by GPTQ. The model may be larger: it is read block by block. The first
  setting is the default: 128 samples of 2,048 tokens, 8 at a time. The second is `--samples 128 --length 512
  --batch-size 1`. Forwards are repeated where keeping all of them would take more than 8 GiB. A row needs more by the
  second for one of two reasons: all forwards fit in 8 GiB and are kept (smollm2-1.7b), or a layer gets fewer than two
  tokens for each input, for which GPTQ keeps seven matrices instead of three (llama-3.1-405b). `--method rtn` takes
  less than both.
"""


def tokens(count: int) -> str:
    """A context length in thousands; a dash for none."""
    return "-" if not count else f"{count // 1024}k" if count >= 1024 else str(count)


def peak(told: Forecast) -> str:
    """GiB at the peak of quantizing."""
    return f"{working_bytes(told) / GIB:.1f}" if told.memory is not None else "not told"


def row(name: str) -> str:
    """The row of a model."""
    gptq, least = compress.GPTQ(scheme="w4a16"), SIZES[0] * GIB
    told = compress.plan(name, gptq, device="cuda", device_memory=least)
    short = compress.plan(name, gptq, samples=128, length=512, batch_size=1, device="cuda", device_memory=least)
    run = told.run
    contexts = ["?" if run is None else tokens(run.context_within((size - LEFT) * GIB)) for size in SIZES]
    cells = [
        name,
        f"{told.saving.before / GIB:.1f}",
        f"{told.saving.after / GIB:.1f}",
        *contexts,
        peak(told),
        peak(short),
    ]
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """The page as Markdown."""
    heads = ["model", "16 bits, GiB", "4 bits, GiB", *(f"context in {size} GiB" for size in SIZES)]
    heads += ["to quantize, GiB", "with 128 x 512 tokens, GiB"]
    rows = [row(name) for name in known_models()]
    return "\n".join([HEAD, f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
