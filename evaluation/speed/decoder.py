"""Models to benchmark: random Llamas of known shapes, and dense ones that compressed ones are held against.

Random Llamas are made layer by layer: a compressed one never has a dense copy of the whole. Every variant of a shape
has the same weights: a layer's numbers come from a generator seeded by its name. A dense model has the values of the
compressed one, and multiplies the same layers together.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from compress.base.errors import InputError, one_of
from compress.inference.layers.compressed_layers import compressed_layers
from compress.inference.layers.fused import FusedLinear
from compress.inference.layers.linear import QuantLinear
from compress.model.splitting.stand_in import linear_of
from compress.weights.number_formats import SCHEMES

DENSE = "dense"
VARIANTS = (DENSE, *SCHEMES)

# name -> differences from LlamaConfig's defaults. The two Llamas: the config.json of Meta-Llama-3-8B and -70B.
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "max_position_embeddings": 2048,
    },
    "small": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 8192,
        "max_position_embeddings": 4096,
    },
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "llama-3-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
}


def config_of(shape: str) -> LlamaConfig:
    """The configuration of a shape. Raises InputError for a name that is not known."""
    return LlamaConfig(**SHAPES[one_of("shape", shape, SHAPES)], tie_word_embeddings=False)


def random_llama(config: LlamaConfig, scheme: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A Llama of random weights; the linear layers of its blocks rounded to a scheme, unless that is `dense`."""
    if scheme not in VARIANTS:
        raise InputError(f"scheme {scheme!r}; allowed: {', '.join(VARIANTS)}")
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            weight = _random(name, module.weight.shape, module.in_features**-0.5, dtype, device)
            if scheme == DENSE or ".layers." not in f".{name}":
                module.weight = nn.Parameter(weight, requires_grad=False)
            else:
                model.set_submodule(name, QuantLinear.from_linear(linear_of(weight, None, False), scheme))
        elif isinstance(module, nn.Embedding):
            module.weight = nn.Parameter(_random(name, module.weight.shape, 1.0, dtype, device), requires_grad=False)
        elif name.endswith("norm"):
            norm = cast(Any, module)
            norm.weight = nn.Parameter(torch.ones(norm.weight.shape, dtype=dtype, device=device), requires_grad=False)
        elif name.endswith("rotary_emb"):  # its buffers are computed when it is made
            model.set_submodule(name, type(module)(config=config).to(device))
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert not left, left
    return cast(nn.Module, model.eval())


def _random(name: str, shape: torch.Size, spread: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator(device=device).manual_seed(crc32(name.encode()))
    return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(spread)


# Layers that read one tensor, under the names that decoders have for them.
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def densify(model: nn.Module) -> None:
    """Replace every compressed layer by a linear layer with the values that its codes stand for, one after the other.

    A layer that rounds its input to int8 becomes one that does not: a baseline of speed, not of accuracy.
    """
    for name, layer in list(compressed_layers(model)):
        model.set_submodule(name, linear_of(layer.dequantize(), layer.bias, False))


def fuse_dense(model: nn.Module) -> None:
    """Multiply linear layers that read one tensor together, as `compress.load` does for compressed ones."""
    for parent in list(model.modules()):
        for names in SIBLINGS:
            layers = [getattr(parent, name, None) for name in names]
            if all(isinstance(layer, nn.Linear) for layer in layers):
                _fuse(parent, names, cast(list[nn.Linear], layers))


def fused_groups(model: nn.Module) -> int:
    """Groups of layers that are one product."""
    return sum(isinstance(m, FusedLinear) and m.stacked is not None for m in model.modules())


def _fuse(parent: nn.Module, names: Sequence[str], layers: Sequence[nn.Linear]) -> None:
    biases = [layer.bias for layer in layers]
    bias = None if any(b is None for b in biases) else torch.cat([b.detach() for b in biases])
    if bias is None and any(b is not None for b in biases):
        return
    stacked: Any = linear_of(torch.cat([layer.weight.detach() for layer in layers]), bias, False)
    first, start = None, 0
    for name, layer in zip(names, layers, strict=True):
        stop = start + layer.out_features
        made = FusedLinear(first, stacked if first is None else None, start, stop, layer is layers[-1])
        first, start = first or made, stop
        setattr(parent, name, made)
