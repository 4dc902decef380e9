"""Train the built-in `demo` model: a 4.5 M parameter Llama that has read Python's standard library.

    python recipes/studies/train_demo.py [--output compress/demo] [--steps 1800]

Data: text that every Python installation carries. `pydoc_data.topics` (the language reference's topics) and the
docstrings of the standard library are the prose; the sources of the library are extra training text. One topic or
module in twelve, chosen by a hash of its name, is held out and never trained on. What a person needs later ships
beside the weights: `calibration.txt` (a sample of the training prose) and `heldout.txt`, both under the PSF-2.0
licence of Python, as `NOTICE` says.

Model: byte-level BPE of 2048 tokens, hidden 256, intermediate 768, 5 layers, 8 heads on 4 key-value heads, context
256, tied embeddings. Hidden matrices are trained with Muon, the rest with AdamW; the rate falls linearly to zero.
A run with the same `--steps`, seed, Python and library versions repeats (up to the thread count's summation order);
1800 steps take about half an hour on two cores. `training.json` keeps data, steps, versions and held-out perplexity.
"""

import argparse
import ast
import hashlib
import json
import math
import platform
import random
import sysconfig
import time
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HELD_OUT_SHARE = 12  # one document in twelve
PROSE_REPEATS = 3  # the model is evaluated on prose; sources are filler
CALIBRATION_BYTES = 320_000
HELD_OUT_BYTES = 128_000
CONTEXT, BATCH, VOCABULARY = 256, 24, 2048
WARMUP = 50  # steps
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "pydoc_data", "ensurepip"}


def documents() -> tuple[dict[str, str], dict[str, str]]:
    """(prose, sources) by document name, in a stable order."""
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_paths()["stdlib"])
    prose = {f"topic {name}": text.strip() for name, text in sorted(topics.items())}
    sources: dict[str, str] = {}
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS & set(name.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (UnicodeDecodeError, SyntaxError):
            continue
        found = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring and len(docstring) > 40 and docstring not in seen:
                    seen.add(docstring)
                    found.append(docstring)
        if found:
            prose[f"module {name}"] = "\n\n".join(found)
        sources[f"module {name}"] = text
    return prose, sources


def held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, model_max_length=CONTEXT)


def clipped(texts: list[str], limit: int) -> str:
    text = "\n\n".join(texts).encode()[:limit].decode("utf-8", "ignore")
    return text.rsplit("\n", 1)[0] + "\n"


def perplexity(model: LlamaForCausalLM, tokens: torch.Tensor) -> float:
    rows = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    total = 0.0
    with torch.no_grad():
        for batch in rows.split(32):
            total += model(input_ids=batch, labels=batch).loss.item() * len(batch)
    return math.exp(total / len(rows))


class DemoTexts(NamedTuple):
    """The texts that the model reads, in shuffled order, and those held out."""

    prose: list[str]
    sources: list[str]
    held_out: list[str]


def gathered() -> DemoTexts:
    prose, sources = documents()
    read = [text for name, text in prose.items() if not held_out(name)]
    more = [text for name, text in sources.items() if not held_out(name)]
    kept = [text for name, text in prose.items() if held_out(name)]
    random.shuffle(read)
    random.shuffle(kept)
    return DemoTexts(read, more, kept)


def encoded(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """Token ids of all texts, an end token before each."""
    end = tokenizer.eos_token_id
    return torch.tensor([token for text in texts for token in [end, *tokenizer(text)["input_ids"]]])


def make_model(end: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=5,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=end,
            eos_token_id=end,
        )
    )


def train(model: LlamaForCausalLM, stream: torch.Tensor, test_tokens: torch.Tensor, steps: int, seed: int) -> None:
    """Train for so many steps on random windows of the stream."""
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(hidden, lr=0.02, weight_decay=0.05),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]

    def rate(step: int) -> float:
        return min((step + 1) / WARMUP, (steps - step) / (steps - WARMUP))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    started = time.time()
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        starts = torch.randint(len(stream) - CONTEXT, (BATCH,), generator=generator)
        batch = torch.stack([stream[s : s + CONTEXT] for s in starts.tolist()])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            test = perplexity(model, test_tokens) if step % 400 == 0 else float("nan")
            print(f"{step} loss {loss.item():.3f} held-out {test:.2f} {time.time() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("compress/demo"))
    parser.add_argument("--steps", type=int, default=1800, help="optimizer steps of 24 x 256 tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prose", type=Path, help="write the prose that is trained on into this file, and stop")
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    torch.manual_seed(arguments.seed)

    texts = gathered()
    if arguments.prose is not None:
        arguments.prose.write_text("\n\n".join(texts.prose), encoding="utf-8")
        return
    tokenizer = train_tokenizer(texts.prose)
    stream = torch.cat([encoded(tokenizer, texts.prose)] * PROSE_REPEATS + [encoded(tokenizer, texts.sources)])
    test_text = clipped(texts.held_out, HELD_OUT_BYTES)
    test_tokens = encoded(tokenizer, [test_text])
    print(f"training tokens {len(stream):,} (prose x{PROSE_REPEATS}), held-out {len(test_tokens):,}", flush=True)
    model = make_model(tokenizer.eos_token_id)
    train(model, stream, test_tokens, arguments.steps, arguments.seed)

    model.half()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    (output / "calibration.txt").write_text(clipped(texts.prose, CALIBRATION_BYTES), encoding="utf-8")
    (output / "heldout.txt").write_text(test_text, encoding="utf-8")
    record = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": arguments.steps,
        "tokens_per_step": BATCH * CONTEXT,
        "training_tokens": len(stream),
        "held_out_tokens": len(test_tokens),
        "held_out_perplexity": round(perplexity(model.float(), test_tokens), 4),
        "seed": arguments.seed,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (output / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
