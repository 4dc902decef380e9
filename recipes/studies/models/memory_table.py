"""Print docs/memory.md: which well-known models run, and are quantized, in the memory of a GPU.

python recipes/studies/models/memory_table.py > docs/memory.md
"""

from collections.abc import Sequence

import compress
from compress.jobs.forecast.forecast import Forecast, working_bytes
from compress.jobs.known_models import known_models

SIZES = (8, 12, 16, 24, 80)  # GiB of memory
LEFT = 1  # GiB for the driver, and for what a forward computes
GIB, CONTEXT = 2**30, 8192
ON_RANKS = ("qwen3-235b-a22b", "deepseek-v3", "kimi-k2")  # for docs/ranks.md
HEAD = """# What fits in a GPU

Computed from the configurations by `compress plan`, not measured: 4-bit weights in groups of 128 (`--scheme w4a16`).
Embedding, output head, keys and values have 16 bits. One GiB of each GPU is left to the driver and to activations.

```
compress plan llama-3.1-8b --method gptq --device cuda --device-memory 12GiB
```

answers for one model and one GPU, which need not be there. It takes one of the names below, a `config.json`, or a
model; Qwen3-235B, DeepSeek-V3 and Kimi-K2 are for [several](ranks.md#what-it-takes).

- **Context**: the most tokens of one sequence that fit beside the weights. `--kv-cache int8` nearly doubles it.
- **To quantize**: the memory that GPTQ takes of a GPU of 8 GiB, or else the least that it can. The model may be
  larger: it is read block by block. The first setting is the default: 128 samples of 2,048 tokens, 8 at a time. The
  second is `--samples 128 --length 512 --batch-size 1`. `--method rtn` takes less than both.

A run keeps to what is free (`torch.cuda.mem_get_info`), and takes the first of these that fits. It says which:

1. all forwards of a block are kept while its layers are solved;
2. they are repeated for each group of layers that share an input: 2.5 times the time of the forwards;
3. also, hidden states and statistics wait in pinned memory of the host, and rows are solved in runs;
4. also, fewer samples run at once, down to one.

The codes are the same, but for the rounding of the GPU's sums.
"""
CARDS = """
The largest of these models that a GPU quantizes by GPTQ with its defaults (`compress quantize MODEL --method gptq
--calibration TEXT --output OUT`), and the largest that it runs in 4 bits with 8,192 tokens of context. How long it
takes is not measured on a GPU.

| GPU, GiB | quantizes | GiB of it | runs |
|---|---|---|---|
"""


def shown() -> list[str]:
    """The names of the models of the table."""
    return [name for name in known_models() if name not in ON_RANKS]


def tokens(count: int) -> str:
    """A context length in thousands; a dash for none."""
    return "-" if not count else f"{count // 1024}k" if count >= 1024 else str(count)


def peak(told: Forecast) -> str:
    """GiB at the peak of quantizing."""
    return f"{working_bytes(told) / GIB:.1f}" if told.memory is not None else "not told"


def row(name: str) -> str:
    """The row of a model."""
    gptq, least = compress.GPTQ(scheme="w4a16"), (SIZES[0] - LEFT) * GIB
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


def card(size: int, names: Sequence[str] | None = None) -> str:
    """The row of a GPU of so many GiB. names: of models to choose from (None: all)."""
    gptq, room = compress.GPTQ(scheme="w4a16"), (size - LEFT) * GIB
    fits: list[tuple[int, str, str]] = []
    runs: list[tuple[int, str]] = []
    for name in shown() if names is None else names:
        told = compress.plan(name, gptq, device="cuda", device_memory=room)
        if told.memory is not None and working_bytes(told) <= room:
            fits.append((told.saving.before, name, peak(told)))
        if told.run is not None and told.run.context_within(room) >= CONTEXT:
            runs.append((told.saving.before, name))
    _, largest, needed = max(fits)
    return f"| {size} | {largest} | {needed} | {max(runs)[1]} |"


def page() -> str:
    """The page as Markdown."""
    heads = ["model", "16 bits, GiB", "4 bits, GiB", *(f"context in {size} GiB" for size in SIZES)]
    heads += ["to quantize, GiB", "with 128 x 512 tokens, GiB"]
    rows = [row(name) for name in shown()]
    table = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows]
    return "\n".join([HEAD, *table, CARDS.rstrip("\n"), *map(card, SIZES)]) + "\n"


if __name__ == "__main__":
    print(page(), end="")
