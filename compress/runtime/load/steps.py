"""Steps of generating on a CPU: attention of one token over the cache, by the loop of `kernels/cpu/cpu_attention.h`.

torch's attention reads bfloat16 and float16 several times as slowly as float32 where the processor has no instructions
for them, and pays for many queries where there is one. transformers asks the attention function of a
model by its name (`sdpa`) at every call. What answers to that name is, once a model was loaded here, a function that
takes steps of the modules of such models, and passes everything else on to the one that was there before.
"""

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.generation.configuration_utils import CompileConfig

from compress.errors import InputError
from compress.kernels.cpu import direct
from compress.kernels.cpu.build import compilers

SDPA = "sdpa"
MARK = "compress_attends"
# What some models ask beside a mask, which the loop knows nothing of.
BESIDE = ("position_bias", "softcap", "cache", "s_aux", "output_attentions")
# What a call of `generate` says that wants a cache of its own.
OWN_CACHE = ("past_key_values", "cache_implementation", "use_cache", "assistant_model", "prompt_lookup_num_tokens")
Attends = Callable[..., tuple[Tensor, Tensor | None]]


def compile_steps(network: nn.Module) -> None:
    """From now on `generate` compiles the step of this model, with a cache of fixed size, when it first takes one:
    about a minute for 30 layers, which longer answers, or many, win back. Prompts are read as before.

    A compiled step is one of a batch size and of a cache size; others compile anew. A call of `generate` that brings or
    names a cache, or is assisted, goes as it would have gone. Raises InputError for what does not generate, and on a
    CPU without a C++ compiler.
    """
    own: Any = network
    if getattr(own, "generation_config", None) is None:
        raise InputError(f"{type(network).__name__} does not generate text: there are no steps to compile")
    if own.device.type == "cpu" and not compilers():
        raise InputError("there is no C++ compiler to compile steps with: install g++ or clang++, or set CXX")
    # On the instance, and not in its configuration, which is saved with a model.
    own.generate = MethodType(generate, own)


def generate(network: Any, *given: Any, **asked: Any) -> Any:
    """`generate` of a model, its steps compiled unless what is asked for speaks against it."""
    if not any(asked.get(name) is not None for name in OWN_CACHE):
        compiled = CompileConfig(mode="default", dynamic=False)
        compiled._compile_all_devices = True  # else transformers compiles on a GPU only
        asked |= {"cache_implementation": "static", "compile_config": compiled}
    return type(network).generate(network, *given, **asked)


def attend_here(network: nn.Module) -> None:
    """Let the attention of a model in the memory of the CPU take our loop, where transformers asks torch's and the loop
    can be had, which is found out at the first step."""
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
