"""Prefill and decode of one model at one batch size, as timed steps.

A round is a prefill of [batch, prompt] tokens into a static cache and then `new` greedy steps of one token per
sequence. On a GPU the step is captured as a CUDA graph once and replayed; prefill is launched eagerly, as transformers
does it. On a CPU both are eager. A step that cannot be captured is launched eagerly, and its figures say why.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from compress.evaluation.speed.timing import elapsed_ms


class GenerationTimer:
    """One model at one batch size: `prefill`, then as many calls of `step` as there is room for."""

    def __init__(self, model: Any, batch: int, prompt: int, new: int) -> None:
        self.model, self.batch, self.new = model, batch, new
        self.device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(batch)
        vocabulary = model.config.get_text_config().vocab_size
        self.prompt = torch.randint(vocabulary, (batch, prompt), generator=generator).to(self.device)
        self.ids = self.prompt[:, -1:].clone()
        self.cache = StaticCache(model.config, max_cache_len=prompt + new)
        self.run_step: Callable[[], object] = self.step
        self.launch, self.why_eager = "eager", "a CPU has no graphs" if self.device.type == "cpu" else "not captured"

    def rewind(self) -> None:
        """Empty the cache."""
        self.cache.reset()

    @torch.no_grad()
    def prefill(self) -> None:
        """Read the prompt into the cache, and choose the token that follows it."""
        out = self.model(self.prompt, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.ids.copy_(out.logits[:, -1:].argmax(-1))

    @torch.no_grad()
    def step(self) -> None:
        """Generate one more token per sequence."""
        out = self.model(self.ids, past_key_values=self.cache, use_cache=True)
        self.ids.copy_(out.logits[:, -1:].argmax(-1))

    def start(self) -> None:
        """Empty the cache and prefill, ready for the first step."""
        self.rewind()
        self.prefill()

    def capture(self) -> None:
        """Make `run_step` the replay of a CUDA graph, where there is a GPU and the model allows it."""
        if self.device.type != "cuda":
            return
        if any(type(layer) is not StaticLayer for layer in self.cache.layers):
            self.why_eager = "a cache with sliding windows counts its tokens in Python"
            return
        self.start()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(min(2, self.new)):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.step()
        except RuntimeError as reason:
            torch.cuda.synchronize()
            self.why_eager = f"capture failed: {str(reason).splitlines()[0]}"
            return
        self.run_step, self.launch, self.why_eager = graph.replay, "graph", ""

    def round(self) -> tuple[float, float]:
        """Run a round: (milliseconds of the prefill, milliseconds of one step)."""
        self.rewind()
        prefill = elapsed_ms(self.prefill, self.device)

        def decode() -> None:
            for _ in range(self.new):
                self.run_step()

        return prefill, elapsed_ms(decode, self.device) / self.new
