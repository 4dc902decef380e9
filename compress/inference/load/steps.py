"""Speeds up generation steps on a CPU: attention of one token over the cache, by `kernels/cpu/cpu_attention.h`.

torch's attention reads bfloat16 and float16 several times as slowly as float32 on processors without instructions for
them, and its cost is that of many queries even for one. transformers looks the attention function of a module up at
every call, by the name in its configuration. Modules of a model that is loaded here find `OWN` where the model says
`sdpa`: a function that computes generation steps, and passes all other calls on to that of `sdpa`. The configuration of
the model, and the functions of other models, stay as they are. On a GPU that function only tells the trial of a block
(`inference.steps`) how it attends.
"""

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.generation.configuration_utils import CompileConfig

from compress.base.errors import InputError
from compress.inference.steps.graph import OWN_CACHE
from compress.inference.steps.trace import is_watched, note_attention
from compress.kernels.cpu import direct
from compress.kernels.cpu.build import compilers

SDPA = "sdpa"
OWN = "compress_sdpa"
# Arguments of some models that our loop does not support.
BESIDE = ("position_bias", "softcap", "cache", "s_aux", "output_attentions")
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
    if not any(asked.get(name) is not None for name in (*OWN_CACHE, "use_cache")):
        compiled = CompileConfig(mode="default", dynamic=False)
        compiled._compile_all_devices = True  # else transformers compiles on a GPU only
        asked |= {"cache_implementation": "static", "compile_config": compiled}
    return type(network).generate(network, *given, **asked)


class OwnAttention:
    """The configuration that an attention module sees: the model's, but for the name of the attention function."""

    def __init__(self, config: Any) -> None:
        self.shared = config

    def __getattr__(self, name: str) -> Any:
        if name == "shared":  # of a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.shared, name)

    @property
    def _attn_implementation(self) -> Any:
        asked = self.shared._attn_implementation
        return OWN if asked == SDPA else asked


def attend_here(network: nn.Module) -> None:
    """Make the attention of a model use our function where transformers would use torch's (`sdpa`). On a CPU the first
    step finds out whether our loop is available."""
    AttentionInterface.register(OWN, attend)
    for module in network.modules():
        asks = getattr(module, "config", None)
        if "Attention" in type(module).__name__ and hasattr(asks, "_attn_implementation") and not _compares(module):
            module.__dict__["config"] = OwnAttention(asks)


def _compares(module: nn.Module) -> bool:
    """True for a module whose forward itself compares the name of the attention function with `sdpa`."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return any(each == SDPA or (isinstance(each, tuple) and SDPA in each) for each in getattr(code, "co_consts", ()))


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **asked: Any
) -> tuple[Tensor, Tensor | None]:
    """The function of `OWN`."""
    scale = asked.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    others = {name: word for name in BESIDE if (word := asked.get(name)) is not None and word is not False}
    if is_watched():
        note_attention(query, scale, others)
    if asked.get("dropout") or others or not direct.attends(query, key, value, attention_mask):
        plain: Attends = AttentionInterface()[SDPA]
        return plain(module, query, key, value, attention_mask, **asked)
    return direct.attention(query, key, value, attention_mask, scale), None
