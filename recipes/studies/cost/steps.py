"""A step of generating on a CPU: blocks by their modules, in one call each, and compiled.

    OMP_NUM_THREADS=1 python recipes/studies/cost/steps.py [OUT] --cell bfloat16:1 --cell float32:1 --json FILE

OUT: a compressed checkpoint. Without it: six blocks of the shape of Qwen3 0.6 B with random weights, w4a16 in groups of
128 and a vocabulary of 32,000. A cell is a dtype and the sequences that are generated at a time. Blocks by modules and
in one call read from a growing cache, compiled steps from one of fixed size. They take turns. Times are
milliseconds of the CPU of one thread for a step (and of the clock), the median and the least of all rounds.

Before anything is timed, blocks in one call are compared with their modules on the same tokens: the relative error of
their logits over those of float32 is not larger (in float32: over those of their modules).
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM, StaticCache

import compress
from compress.inference.steps.block import STATE, installed_steps
from compress.recipes.studies.figures import tell_times

PROMPT, SAME = 32, 16  # tokens read before, and steps that are compared
# Relative errors of logits: of float32, and beyond that of modules in other dtypes.
EXACT, BEYOND = 1e-4, 1.1
Read = Callable[[Tensor], Tensor]
QWEN3 = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
QWEN3 |= {"head_dim": 128, "num_hidden_layers": 6, "vocab_size": 32000, "max_position_embeddings": 2048}


def random_model(folder: Path) -> Path:
    """A checkpoint of random weights."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**QWEN3)).to(torch.bfloat16)
    compress.quantize(model, compress.RTN(scheme="w4a16", group_size=128), output=folder / "out", verify=False)
    return folder / "out"


@contextmanager
def by_modules(model: nn.Module) -> Iterator[None]:
    """Blocks run their own forwards."""
    taken = [module for module in model.modules() if STATE in module.__dict__]
    forwards = [module.__dict__.pop("forward") for module in taken]
    try:
        yield
    finally:
        for module, forward in zip(taken, forwards, strict=True):
            module.__dict__["forward"] = forward


class Way:
    """A way to run steps: its cache, and the tokens that follow."""

    def __init__(self, model: Any, prompt: Tensor, room: int, compiled: bool) -> None:
        self.model, self.compiled = model, compiled
        self.cache: Any = DynamicCache(config=model.config)
        if compiled:
            self.cache = StaticCache(config=model.config, max_cache_len=room)
        self.step: Any = torch.compile(model.forward, dynamic=False) if compiled else model
        self.ids = self._next(model, prompt)

    def _next(self, forward: Any, ids: Tensor) -> Tensor:
        out = forward(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return cast(Tensor, out.logits[:, -1].argmax(-1, keepdim=True))

    def run(self, count: int) -> tuple[float, float]:
        """Milliseconds of a step, of the CPU and of the clock."""
        began, clock = time.thread_time(), time.perf_counter()
        for _ in range(count):
            self.ids = self._next(self.step, self.ids)
        spent, clocked = time.thread_time() - began, time.perf_counter() - clock
        return spent / count * 1e3, clocked / count * 1e3


def logits(model: Any, ids: Tensor) -> Tensor:
    """[steps, batch, vocabulary] of the last SAME tokens, one step for each."""
    cache = DynamicCache(config=model.config)
    model(ids[:, :-SAME], past_key_values=cache, use_cache=True)
    steps = (
        model(ids[:, i : i + 1], past_key_values=cache).logits[:, -1] for i in range(ids.shape[1] - SAME, ids.shape[1])
    )
    return torch.stack([*steps]).double()


def errors(model: Any, exact: Any, ids: Tensor) -> dict[str, float]:
    """Relative errors of logits, of modules and of blocks in one call. exact: the model in float32, by its modules."""
    with by_modules(exact):
        expected = logits(exact, ids)
    with by_modules(model):
        of_modules = float((logits(model, ids) - expected).norm() / expected.norm())
    found = float((logits(model, ids) - expected).norm() / expected.norm())
    assert found <= max(EXACT, BEYOND * of_modules), f"error {found:.3g}, of modules {of_modules:.3g}"
    return {"modules": of_modules, "one call": found}


@torch.no_grad()
def measure(out: Path, dtype: torch.dtype, batch: int, rounds: int, each: int) -> dict[str, Any]:
    """{way: milliseconds}, in turns of so many steps."""
    model: Any = compress.load(out, dtype).eval()
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (batch, PROMPT), generator=generator)
    error = errors(model, compress.load(out, torch.float32).eval(), prompt)
    known = [steps.why_not for _, steps in installed_steps(model) if steps.known is None]
    assert not known, known
    room = PROMPT + (rounds + 2) * each
    with by_modules(model):
        turns = {"modules": Way(model, prompt, room, False)}
    turns["one call"] = Way(model, prompt, room, False)
    began = time.perf_counter()
    turns["compiled"] = Way(model, prompt, room, True)
    turns["compiled"].run(2)
    compiling = time.perf_counter() - began
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, turn in turns.items():
            if name == "modules":
                with by_modules(model):
                    times[name].append(turn.run(each))
            else:
                times[name].append(turn.run(each))
    torch._dynamo.reset()
    found: dict[str, Any] = {"compiling_s": compiling, "errors": error}
    for name, pairs in times.items():
        spent, clock = zip(*pairs, strict=True)
        found[name] = {"median": statistics.median(spent), "least": min(spent), "least_clock": min(clock)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--cell", action="append", required=True, help="dtype:sequences")
    parser.add_argument("--title", default="Qwen3 0.6 B, six blocks of random weights")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=16, help="Of a way in its turn.")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        out = asked.out or random_model(Path(folder))
        for cell in asked.cell:
            dtype, batch = cell.split(":")
            found[cell] = measure(out, getattr(torch, dtype), int(batch), asked.rounds, asked.steps)
            told = {"model": asked.title, "rounds": asked.rounds, "steps": asked.steps, "ms": found}
            tell_times(told, asked.json)  # after every cell: compiling takes minutes


if __name__ == "__main__":
    main()
