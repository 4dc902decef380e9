"""The loss of quality by int8 inputs of weight-only layers on a CPU, beside the loss by the weights, and the time
gained.

    python recipes/studies/cost/int8_inputs.py ORIGINAL OUT TEXT --windows 8 --length 1024 --json FILE

ORIGINAL and OUT: a model and a checkpoint of it, of 4- or 8-bit weights. KL of OUT's next-token distributions from
ORIGINAL's in nats, its inputs exact and rounded (`compress.load(OUT, int8_activations=...)`), on the same windows,
spread over TEXT. Times are those of the forwards, of one thread, in milliseconds of the CPU.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

import compress
from compress.evaluation.speed.timing import elapsed_ms
from compress.recipes.studies.figures import tell_times

CPU = torch.device("cpu")
KINDS = ("exact", "int8")


def windows(ids_T: Tensor, count: int, length: int) -> Tensor:
    """[count, length] windows of a text, from its first token to its last, as far apart as possible."""
    starts = torch.linspace(0, len(ids_T) - length, count).long()
    return torch.stack([ids_T[start : start + length] for start in starts])


@torch.no_grad()
def log_probabilities(model: Any, ids_T: Tensor) -> tuple[Tensor, float]:
    """([T - 1, V] of the next tokens, milliseconds)."""
    found: list[Tensor] = []
    took = elapsed_ms(lambda: found.append(model(ids_T[None], use_cache=False).logits), CPU)
    return found[0][0, :-1].float().log_softmax(-1), took


def figures(per_window: list[float]) -> dict[str, float]:
    """The mean and its standard error over windows."""
    values = torch.tensor(per_window, dtype=torch.float64)
    return {"value": float(values.mean()), "standard_error": float(values.std() / len(values) ** 0.5)}


def divergence(of_TV: Tensor, other_TV: Tensor) -> float:
    """KL of the second from the first, nats, mean over tokens."""
    return float((of_TV.exp() * (of_TV - other_TV)).sum(-1).mean())


def measured(original: Any, models: dict[str, Any], ids_RT: Tensor) -> dict[str, Any]:
    """For every kind KL from the original, perplexity and milliseconds; KL of int8 inputs from exact ones."""
    kl: dict[str, list[float]] = {kind: [] for kind in (*models, "int8 from exact")}
    nats: dict[str, list[float]] = {kind: [] for kind in ("original", *models)}
    took: dict[str, list[float]] = {kind: [] for kind in ("original", *models)}
    for ids_T in ids_RT:
        said: dict[str, Tensor] = {}
        for kind, model in {"original": original, **models}.items():
            said[kind], ms = log_probabilities(model, ids_T)
            took[kind].append(ms)
            nats[kind].append(float(-said[kind].gather(1, ids_T[1:, None]).mean()))
        for kind in models:
            kl[kind].append(divergence(said["original"], said[kind]))
        kl["int8 from exact"].append(divergence(said["exact"], said["int8"]))
    return {
        "kl": {kind: figures(values) for kind, values in kl.items()},
        "perplexity": {kind: float(torch.tensor(values).mean().exp()) for kind, values in nats.items()},
        "forward_ms": {kind: min(values) for kind, values in took.items()},
    }


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told.add_argument("original")
    told.add_argument("out", metavar="OUT")
    told.add_argument("text", type=Path)
    told.add_argument("--windows", type=int, default=8)
    told.add_argument("--length", type=int, default=1024)
    told.add_argument("--json", type=Path, dest="file")
    asked = told.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(asked.original)
    text = asked.text.read_text(encoding="utf-8")
    ids_T = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    models = {kind: compress.load(asked.out, int8_activations=kind == "int8").eval() for kind in KINDS}
    found = measured(compress.load(asked.original).eval(), models, windows(ids_T, asked.windows, asked.length))
    about = {"model": Path(asked.original).name, "text": asked.text.name, "windows": asked.windows}
    tell_times({**about, "length": asked.length, **found}, asked.file)


if __name__ == "__main__":
    main()
