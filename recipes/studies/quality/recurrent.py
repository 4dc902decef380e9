"""An LSTM language model, trained on a text and then quantized: perplexity of held-out text before and after.

    python recipes/studies/quality/recurrent.py --train STORIES --text OTHERS --tokenizer MODEL --weights FILE.pt
        --json OUT.json [--steps N]

STORIES and OTHERS are .jsonl files with `text`; the tokenizer is that of another model. An embedding, an LSTM of two
layers and a head are trained for some minutes (FILE.pt keeps the weights; a second run reads them). Then come the rows:
a method and a scheme for all weights of the LSTM and for the head, some with the embedding in 8 bits. Every result
computes on its codes (`compress.on_codes`).
"""

import argparse
import copy
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import compress
from compress.checkpoint.read.pretrained import load_tokenizer
from compress.checkpoint.read.source import find_source
from compress.passes.protocol.base import Pass
from compress.recipes.studies.figures import asked, made_by

EMBEDDED, HIDDEN, LAYERS = 128, 256, 2
LENGTH, BATCH, WARMUP, RATE = 128, 32, 50, 4e-3
CALIBRATION, WINDOWS = 64, 128  # windows of LENGTH tokens
SCHEMES = ("w8a16", "w8a8", "w4a16", "w4a8", "w3a16")
METHODS: dict[str, type[Any]] = {"rtn": compress.RTN, "gptq": compress.GPTQ}


class LanguageModel(nn.Module):
    """Embedding, LSTM, head."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, EMBEDDED)
        self.rnn = nn.LSTM(EMBEDDED, HIDDEN, LAYERS, batch_first=True)
        self.head = nn.Linear(HIDDEN, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, T, vocabulary] of token ids [B, T]."""
        logits: Tensor = self.head(self.rnn(self.embed(x))[0])
        return logits


def tokens_of(path: str, tokenizer: Any) -> Tensor:
    """The tokens of all stories, one after the other."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    found = [tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"] for line in lines]
    return torch.tensor([token for story in found for token in story])


def trained(model: LanguageModel, tokens: Tensor, steps: int) -> None:
    """Train on random windows, the rate rising and then falling to nothing."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * i / steps))
    )
    begun = time.monotonic()
    for step in range(steps):
        starts = torch.randint(len(tokens) - LENGTH - 1, (BATCH,), generator=generator)
        rows = torch.stack([tokens[start : start + LENGTH + 1] for start in starts.tolist()])
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"{step}: {math.exp(loss.item()):.2f} after {time.monotonic() - begun:.0f} s", flush=True)


@torch.no_grad()
def perplexity(model: nn.Module, windows: Tensor) -> float:
    """exp(mean negative log-likelihood) of all tokens of the windows but the first."""
    lost = []
    for rows in windows.split(BATCH):
        logits = model(rows[:, :-1]).flatten(0, 1)
        lost.append(nn.functional.cross_entropy(logits, rows[:, 1:].flatten(), reduction="none").double())
    return math.exp(float(torch.cat(lost).mean()))


def bytes_of(model: nn.Module) -> int:
    """Bytes of all parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--train", "--text", "--tokenizer"):
        parser.add_argument(name, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=800)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(find_source(arguments.tokenizer))
    torch.manual_seed(0)
    model = LanguageModel(len(tokenizer))
    tokens = tokens_of(arguments.train, tokenizer)
    if not arguments.weights.exists():
        trained(model, tokens, arguments.steps)
        torch.save(model.state_dict(), arguments.weights)
    model.load_state_dict(torch.load(arguments.weights))
    model.eval()
    shown = [{"x": rows} for rows in tokens[: CALIBRATION * LENGTH].view(-1, LENGTH).split(16)]
    held_out = tokens_of(arguments.text, tokenizer)[: WINDOWS * LENGTH].view(-1, LENGTH)
    record: dict[str, Any] = {
        "command": asked(__file__),
        **made_by(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_steps": arguments.steps,
        "training_tokens": arguments.steps * BATCH * LENGTH,
        "held_out_tokens": held_out.numel(),
        "perplexity": perplexity(model, held_out),
        "bytes": bytes_of(model),
        "rows": [],
    }
    print(f"| original | {record['perplexity']:.3f} | {record['bytes']} |", flush=True)
    for scheme in SCHEMES:
        for name, method in METHODS.items():
            passes: list[Pass] = [method(scheme=scheme)]
            ours = copy.deepcopy(model)
            compress.split_layers(ours)
            compress.on_codes(compress.quantize(ours, passes, calibration=shown, keep_codes=True))
            row = {"scheme": scheme, "method": name, "perplexity": perplexity(ours, held_out), "bytes": bytes_of(ours)}
            record["rows"].append(row)
            print(f"| {scheme} | {name} | {row['perplexity']:.3f} | {row['bytes']} |", flush=True)
            arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
