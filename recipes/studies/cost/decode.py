"""A compressed model from the first token of a prompt to the last of an answer, on a CPU, beside llama.cpp.

    python recipes/studies/cost/decode.py ORIGINAL OUT --llama LIBRARY --gguf q4_0.gguf --gguf q8_0.gguf --json FILE

ORIGINAL: the dense model; OUT: a checkpoint of it of 4-bit weights. LIBRARY: a shared library with llama.cpp's C
interface, such as xllamacpp.abi3.so of the package xllamacpp (built for AVX2); GGUF files hold the same model. All take
turns in one process, with one thread: a prompt of random tokens, then greedy steps of one token. Times are CPU times of
the thread: the median over all steps, the least of the few prompts.

What the libraries may use of the processor is capped from outside, as llama.cpp's build is:
COMPRESS_CPU=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2

`parts` of ours: the products of the blocks and of the head, called alone, out of one step; the rest is norms, rotary
embeddings, attention, the cache, and Python.
"""

import argparse
import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

import compress
from compress.evaluation.speed.timing import elapsed_ms
from compress.inference.layers.compressed_layers import compressed_layers
from compress.recipes.studies.figures import tell_times

CPU = torch.device("cpu")
PARAMETERS = 512  # bytes, more than any of llama.cpp's parameter structures takes
# int32 members of llama_context_params, by their place: the context's tokens, threads of steps and of prompts.
CONTEXT, THREADS = 0, (7, 8)
DEFAULTS = (512, 2048, 512)  # defaults of the first three at their expected places
PARTS_ROUNDS = 7


class Runs(Protocol):
    """A model that is timed."""

    def start(self) -> None:
        """Forget all tokens read."""
        ...

    def read(self, ids: list[int]) -> int:
        """Read tokens, and return the one most likely to follow."""
        ...


class Ours:
    """A transformers model, dense or compressed."""

    def __init__(self, model: Any) -> None:
        self.model, self.cache = model.eval(), cast(Any, None)

    def start(self) -> None:
        """Begin with an empty cache."""
        self.cache = DynamicCache(config=self.model.config)

    @torch.no_grad()
    def read(self, ids: list[int]) -> int:
        """Read tokens, and return the one most likely to follow."""
        given = torch.tensor([ids])
        out = self.model(given, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())


class Compiled(Ours):
    """A transformers model with a cache of fixed size and compiled steps (as `compress.compile_steps` compiles for
    `generate`)."""

    def __init__(self, model: Any, room: int) -> None:
        super().__init__(model)
        self.room, self.step = room, torch.compile(model.forward, dynamic=False)
        self.start()
        for _ in range(2):  # the first step compiles; the first compiled step allocates
            self.read([0])

    def start(self) -> None:
        """Empty the cache in place: compiled code refers to it."""
        if self.cache is None:
            self.cache = StaticCache(config=self.model.config, max_cache_len=self.room)
        self.cache.reset()

    @torch.no_grad()
    def read(self, ids: list[int]) -> int:
        """Read tokens, and return the one most likely to follow."""
        forward = self.step if len(ids) == 1 else self.model
        out = forward(torch.tensor([ids]), past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())


def declare(library: ctypes.CDLL, *functions: tuple[str, Any, list[Any]]) -> None:
    """Declare functions of a C library: (name, type of the result, types of the arguments)."""
    for name, returned, given in functions:
        function = getattr(library, name)
        function.restype, function.argtypes = returned, given


class _Parameters(ctypes.Structure):
    """A structure of which only int32 members at known places are set."""

    _fields_ = (("members", ctypes.c_int32 * (PARAMETERS // 4)),)


class _Batch(ctypes.Structure):
    """`llama_batch`."""

    _fields_ = (("tokens", ctypes.c_int32), *((f"pointer{i}", ctypes.c_void_p) for i in range(6)))


class Llama:
    """A GGUF file in llama.cpp, on one thread."""

    def __init__(self, library: ctypes.CDLL, path: Path, room: int) -> None:
        self.library = library
        self._declare()
        self.model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
        asked = library.llama_context_default_params()
        assert tuple(asked.members[: len(DEFAULTS)]) == DEFAULTS, "llama.cpp's parameters have moved"
        asked.members[CONTEXT] = room
        for place in THREADS:
            asked.members[place] = 1
        self.context = library.llama_init_from_model(self.model, asked)
        assert self.model, path
        assert self.context, path
        library.llama_set_n_threads(self.context, 1, 1)
        self.vocabulary = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self.model))

    def _declare(self) -> None:
        pointer, words = ctypes.c_void_p, ctypes.c_int32
        declare(
            self.library,
            ("llama_model_default_params", _Parameters, []),
            ("llama_context_default_params", _Parameters, []),
            ("llama_model_load_from_file", pointer, [ctypes.c_char_p, _Parameters]),
            ("llama_init_from_model", pointer, [pointer, _Parameters]),
            ("llama_set_n_threads", None, [pointer, words, words]),
            ("llama_model_get_vocab", pointer, [pointer]),
            ("llama_vocab_n_tokens", words, [pointer]),
            ("llama_batch_get_one", _Batch, [pointer, words]),
            ("llama_decode", words, [pointer, _Batch]),
            ("llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), [pointer, words]),
            ("llama_get_memory", pointer, [pointer]),
            ("llama_memory_clear", None, [pointer, ctypes.c_bool]),
        )

    def start(self) -> None:
        """An empty cache."""
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)

    def read(self, ids: list[int]) -> int:
        """The likeliest token after these."""
        given = (ctypes.c_int32 * len(ids))(*ids)
        failed = self.library.llama_decode(self.context, self.library.llama_batch_get_one(given, len(ids)))
        assert not failed, f"llama_decode: {failed}"
        found = self.library.llama_get_logits_ith(self.context, -1)
        row = (ctypes.c_float * self.vocabulary).from_address(ctypes.addressof(found.contents))
        return int(torch.frombuffer(row, dtype=torch.float32).argmax())


def opened(library: Path) -> ctypes.CDLL:
    """llama.cpp, which says nothing from now on."""
    found = ctypes.CDLL(str(library))
    found.llama_backend_init()
    found.quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)  # type: ignore[attr-defined]
    found.llama_log_set(found.quiet, None)
    return found


def with_small_head(model: Any, int8_input: bool) -> Any:
    """A model whose head, which is not of its blocks, holds 8-bit codes, as in llama.cpp's files."""
    head = compress.QuantLinear.from_linear(model.lm_head, "w8a16")
    if int8_input:
        head.input_group = -1  # type: ignore[assignment]
    model.lm_head = head
    return model


def variants(
    original: str, out: str, llama: Path | None, files: list[Path], room: int, compiled: str | None
) -> dict[str, Runs]:
    """{title: model to time}."""
    found: dict[str, Runs] = {}
    for dtype in (torch.bfloat16, torch.float32):
        found[f"dense {str(dtype).removeprefix('torch.')}"] = Ours(compress.load(original, dtype=dtype))
    found["w4a16"] = Ours(with_small_head(compress.load(out), False))
    for fuse in (False, True):
        loaded = with_small_head(compress.load(out, int8_activations=True, fuse=fuse), True)
        found["w4a16, int8 inputs" + ", fused" * fuse] = Ours(loaded)
    if compiled is not None:  # one alone: what is compiled of several models is looked through at every step
        rounded = compiled == "int8"
        if not rounded:
            loaded = with_small_head(compress.load(out, fuse=True), False)
        found["w4a16" + ", int8 inputs" * rounded + ", fused, compiled"] = Compiled(loaded, room)
    library = None if llama is None else opened(llama)
    return found | {f"llama.cpp {file.stem}": Llama(library, file, room) for file in files if library is not None}


def timed(runs: dict[str, Runs], prompt: list[int], new: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Milliseconds of a prompt and of a step, round by round in turns, and the first tokens of the answer."""
    prefill: dict[str, list[float]] = {title: [] for title in runs}
    steps: dict[str, list[float]] = {title: [] for title in runs}
    said: dict[str, list[int]] = {}
    for _ in range(rounds):
        for title, run in runs.items():
            run.start()
            run.read(prompt[:8])  # allocates at the first call
            run.start()
            began = time.thread_time()
            tokens = [run.read(prompt)]
            prefill[title].append((time.thread_time() - began) * 1e3)
            for _ in range(new):
                began = time.thread_time()
                tokens.append(run.read(tokens[-1:]))
                steps[title].append((time.thread_time() - began) * 1e3)
            said[title] = tokens[:8]
            print(f"{title}: {prefill[title][-1]:.0f} ms, {statistics.median(steps[title]):.2f} ms a step", flush=True)
    return {
        title: {
            "prefill_ms": min(prefill[title]),
            "step_ms": statistics.median(steps[title]),
            "least_step_ms": min(steps[title]),
            "says": said[title],
        }
        for title in runs
    }


@torch.no_grad()
def parts(model: Any) -> dict[str, float]:
    """Milliseconds of a step's products, called one after another and alone."""
    layers: list[Any] = [layer for _, layer in compressed_layers(model) if layer is not model.lm_head]
    if not layers:
        layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not model.lm_head]
    given: dict[int, Tensor] = {n: torch.randn(1, 1, n, dtype=model.dtype) for n in {m.in_features for m in layers}}
    head = torch.randn(1, 1, model.lm_head.in_features, dtype=model.dtype)

    def least(call: Callable[[], object]) -> float:
        return min(elapsed_ms(call, CPU) for _ in range(PARTS_ROUNDS))

    return {
        "products": len(layers),
        "blocks_ms": least(lambda: [layer(given[layer.in_features]) for layer in layers]),
        "head_ms": least(lambda: model.lm_head(head)),
    }


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told.add_argument("original")
    told.add_argument("out", metavar="OUT")
    told.add_argument("--llama", type=Path, metavar="LIBRARY")
    told.add_argument("--gguf", type=Path, action="append", default=[])
    told.add_argument("--compile", choices=("int8", "exact"), help="compiled steps, too, of such inputs")
    told.add_argument("--prompt", type=int, default=512, help="tokens")
    told.add_argument("--new", type=int, default=64, help="steps")
    told.add_argument("--rounds", type=int, default=2)
    told.add_argument("--json", type=Path, dest="file")
    asked = told.parse_args()
    torch.set_num_threads(1)
    runs = variants(asked.original, asked.out, asked.llama, asked.gguf, asked.prompt + asked.new + 1, asked.compile)
    gc.collect()
    gc.freeze()  # the collector is not to walk through several models where a person has one
    ours = [run.model for run in runs.values() if isinstance(run, Ours)]
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(ours[0].config.vocab_size, (asked.prompt,), generator=generator).tolist()
    found = timed(runs, prompt, asked.new, asked.rounds)
    for title, run in runs.items():
        if isinstance(run, Ours):
            found[title]["parts"] = parts(run.model)
    sizes = {"model": Path(asked.original).name, "prompt": asked.prompt, "steps": asked.new, "rounds": asked.rounds}
    tell_times({**sizes, "results": found}, asked.file)


if __name__ == "__main__":
    main()
