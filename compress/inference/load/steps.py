"""Speeds up generation steps on a CPU: attention of one token over the cache, by `kernels/cpu/cpu_attention.h`.

torch's attention reads bfloat16 and float16 several times as slowly as float32 on processors without instructions for
them, and its cost is that of many queries even for one. transformers looks the attention function of a model up by its
name (`sdpa`) at every call. Once a model is loaded here, that name has a function that computes generation steps of
such models, and passes all other calls on to the previous function.
"""

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.generation.configuration_utils import CompileConfig

from compress.base.errors import InputError
from compress.inference.steps.trace import note_attention, watched
from compress.kernels.cpu import direct
from compress.kernels.cpu.build import compilers

SDPA = "sdpa"
MARK = "compress_attends"
# Arguments of some models that our loop does not support.
BESIDE = ("position_bias", "softcap", "cache", "s_aux", "output_attentions")
# Arguments of `generate` that choose a cache, for which steps are not compiled.
OWN_CACHE = ("past_key_values", "cache_implementation", "use_cache", "assistant_model", "prompt_lookup_num_tokens")
Attends = Callable[..., tuple[Tensor, Tensor | None]]


def compile_steps(network: nn.Module) -> None:
    """Make `generate` of this model compile its steps, with a cache of fixed size, on first use. That takes about a
    minute for 30 layers, which pays off for long answers, or many. Prompts are read as before.

    A compiled step is for one batch size and one cache size; others are compiled again. A call of `generate` that
    passes or names a cache, or is assisted, runs uncompiled. Raises InputError for a model that does not generate, and
    on a CPU without a C++ compiler.
    """
    own: Any = network
    if getattr(own, "generation_config", None) is None:
        raise InputError(f"{type(network).__name__} does not generate text: there are no steps to compile")
    if own.device.type == "cpu" and not compilers():
        raise InputError("there is no C++ compiler to compile steps with: install g++ or clang++, or set CXX")
    # Set on the instance, not in its configuration, which is saved with a model.
    own.generate = MethodType(generate, own)


def generate(network: Any, *given: Any, **asked: Any) -> Any:
    """`generate` of a model, with compiled steps unless an argument rules them out (OWN_CACHE)."""
    if not any(asked.get(name) is not None for name in OWN_CACHE):
        compiled = CompileConfig(mode="default", dynamic=False)
        compiled._compile_all_devices = True  # else transformers compiles on a GPU only
        asked |= {"cache_implementation": "static", "compile_config": compiled}
    return type(network).generate(network, *given, **asked)


def attend_here(network: nn.Module) -> None:
    """Make the attention of a model on the CPU use our loop where transformers would use torch's (`sdpa`). The first
    step finds out whether the loop is available."""
    for module in network.modules():
        if "Attention" in type(module).__name__:
            setattr(module, MARK, True)
    _answer()


@cache
def _answer() -> None:
    before: Attends = AttentionInterface()[SDPA]

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **asked: Any
    ) -> tuple[Tensor, Tensor | None]:
        if watched():
            scale = asked.get("scaling")
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            note_attention(query, scale, {name: asked[name] for name in BESIDE if _given(asked.get(name))})
        ours = (
            getattr(module, MARK, False)
            and not asked.get("dropout")
            and all(not _given(asked.get(name)) for name in BESIDE)
            and direct.attends(query, key, value, attention_mask)
        )
        if not ours:
            return before(module, query, key, value, attention_mask, **asked)
        scale = asked.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return direct.attention(query, key, value, attention_mask, scale), None

    AttentionInterface.register(SDPA, attend)


def _given(word: Any) -> bool:
    return word is not None and word is not False
