"""Experts of transformers taken apart: what lies in one parameter [E, N, K] becomes E linear layers, and back.

    experts.gate_up_proj [E, 2I, H]     experts.3.gate_proj.weight [I, H]
                                  ->    experts.3.up_proj.weight   [I, H]
    experts.down_proj    [E, H, I]      experts.3.down_proj.weight [H, I]

These are the names that checkpoints on the hub and engines have (`w1`, `w3`, `w2` in families that call them so). No
architecture is known by name: transformers marks classes of experts with the layout of their parameters
(`use_experts_implementation`).
"""

import inspect
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compress.model.experts import Expert, Experts, SortedExperts
from compress.model.splitting.stand_in import linear_of

# What transformers sets on every instance of a class of experts that it marks.
MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
LEAVES = ("gate_proj", "up_proj", "down_proj")
JOINED = ("gate_up_proj", "up_proj", "down_proj")
# The same three where a block calls its experts so, in every family that does: Mixtral's names, which vLLM also expects
# of Granite, whose files hold them joined.
SPARSE, SPARSE_LEAVES = "block_sparse_moe", ("w1", "w3", "w2")
# A tensor of one expert: `model.layers.0.mlp.experts.3.down_proj.weight`.
NUMBERED = re.compile(r"(.+)\.\d+\.(\w+)\.\w+$")


def is_joined(module: nn.Module) -> bool:
    """True for a module of transformers that holds all experts in one parameter for each matrix."""
    stacks = {name for name, p in module._parameters.items() if p is not None and p.ndim == 3}
    if all(hasattr(module, mark) for mark in MARKS):
        return {"gate_up_proj" if module.has_gate else "up_proj", "down_proj"} <= stacks
    return _gets_sorted_rows(module) and stacks == {"gate_up_proj", "down_proj"} and hasattr(module, "act_fn")


def _gets_sorted_rows(module: nn.Module) -> bool:
    """True for experts whose forward takes rows alone, [E T, H], without a routing (Llama 4)."""
    if not hasattr(module, "num_experts") or hasattr(module, MARKS[0]):
        return False
    return list(inspect.signature(type(module).forward).parameters) == ["self", "hidden_states"]


def has_experts(model: nn.Module) -> bool:
    """True for a mixture, whether its experts lie in one parameter or are layers."""
    return any(isinstance(module, Experts) or is_joined(module) for module in model.modules())


def split_experts(model: nn.Module, stored: Collection[str] | None = None) -> list[str]:
    """Replace the marked experts of a model by linear layers, in place. Returns the names of the modules. stored: the
    names of tensors of a checkpoint; where these are not of single experts, nothing is replaced.

    The layers are views of the parameters that they replace, where these are stored as [outputs, inputs]; copies
    otherwise.
    """
    fused = [name for name, module in model.named_modules() if is_joined(module)]
    numbered = None if stored is None else [match for each in stored if (match := NUMBERED.match(each)) is not None]
    if numbered is not None:
        apart = {match[1] for match in numbered}
        # Families that transformers renames have other names in front of the last.
        last = {name.rpartition(".")[2] for name in apart}
        same = [name for name in fused if name in apart]
        fused = same or [name for name in fused if name.rpartition(".")[2] in last]
    held = None if numbered is None else {match[2] for match in numbered}
    usual = leaves_of(model)
    for name in fused:
        model.set_submodule(name, _split(model.get_submodule(name), _leaves(name, usual, held)))
    return fused


def _leaves(name: str, usual: tuple[str, ...], held: set[str] | None) -> tuple[str, ...]:
    """The names of the layers of a module's experts: those that a checkpoint holds, otherwise the usual ones of its
    block."""
    wanted = [usual, LEAVES, SPARSE_LEAVES]
    if SPARSE in name.split("."):
        wanted = [SPARSE_LEAVES, usual, LEAVES]
    return next((leaves for leaves in wanted if held is None or held.issuperset(leaves[1:])), wanted[0])


def join_experts(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """{name: tensor} of a model with experts in parameters, from those of one with experts apart. model: of the names
    and layouts, without values. Tensors under other names stay what they are."""
    joined = dict(tensors)
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            for part in ("weight", "bias"):
                _join(name, module, part, joined)
    return joined


def joined_lists(model: nn.Module) -> list[str]:
    """Names of the modules whose experts transformers reads from joined tensors only."""
    apart = [name for name, module in model.named_modules() if isinstance(module, Experts)]
    return [] if any(map(joins_experts, loading_steps(model))) else apart


def _join(name: str, experts: Experts, part: str, tensors: dict[str, Tensor]) -> None:
    """Replace the weights (or biases) of a module's experts by its parameters."""
    *first, last = ([f"{name}.{i}.{leaf}.{part}" for i in experts.numbers] for leaf in experts.leaves)
    if not all(held in tensors for each in (*first, last) for held in each):
        return
    dim = {"weight": 1 if not experts.is_transposed else 2, "bias": 1}[part]
    stacks = [torch.stack([tensors.pop(held) for held in each]) for each in (*first, last)]
    if experts.is_transposed and part == "weight":
        stacks = [stack.mT for stack in stacks]
    *inner, outer = stacks
    whole = inner[0]
    if experts.has_gate:
        whole = torch.cat(inner, dim) if experts.is_concatenated else torch.stack(inner, dim + 1).flatten(dim, dim + 1)
    suffix = "" if part == "weight" else "_bias"
    tensors[f"{name}.{'gate_up_proj' if experts.has_gate else 'up_proj'}{suffix}"] = whole.contiguous()
    tensors[f"{name}.down_proj{suffix}"] = outer.contiguous()


def joins_experts(step: object) -> bool:
    """True for a step of transformers' loading that joins tensors of single experts to a parameter."""
    sources, targets = getattr(step, "source_patterns", ()), getattr(step, "target_patterns", ("",))
    return targets[0].rpartition(".")[2] in JOINED and any(".*." in source for source in sources)


def loading_steps(model: nn.Module) -> list[Any]:
    """The steps by which transformers renames, joins and splits the tensors of a checkpoint for a model."""
    # Imported here, because these imports load all of transformers: seconds, wasted unless a model is loaded.
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model)) if isinstance(model, PreTrainedModel) else []


def joins(model: nn.Module) -> bool:
    """True where transformers joins or splits tensors of a checkpoint for a model."""
    from transformers.core_model_loading import WeightConverter

    return any(isinstance(step, WeightConverter) for step in loading_steps(model))


def leaves_of(model: nn.Module) -> tuple[str, ...]:
    """The names of an expert's layers (gate, up, down) on the hub: those from which transformers joins its
    parameters."""
    leaves: dict[str, list[str]] = {}
    for step in loading_steps(model):
        if joins_experts(step):
            sources = [source.removesuffix(".weight") for source in step.source_patterns]
            leaves[step.target_patterns[0].rpartition(".")[2]] = [source.rpartition(".")[2] for source in sources]
    named = (*leaves.get("gate_up_proj", LEAVES[:2]), *leaves.get("down_proj", LEAVES[2:]))
    return named if len(named) == len(LEAVES) else LEAVES


def _split(fused: Any, leaves: tuple[str, ...]) -> Experts:
    """The linear layers of a marked module."""
    experts = SortedExperts() if _gets_sorted_rows(fused) else Experts()
    kept = {key: value for key, value in fused.__dict__.items() if not key.startswith("_parameters")}
    experts.__dict__.update({k: dict(v) if k in ("_modules", "_buffers") else v for k, v in kept.items()})
    if isinstance(experts, SortedExperts):
        _, inputs = fused.gate_up_proj.shape[1:]
        marks = {"has_gate": True, "has_bias": False, "has_post_expert_norm": False, "is_concatenated": True}
        experts.__dict__.update(marks, is_transposed=inputs != fused.down_proj.shape[1])
    experts.kind, experts.leaves = type(fused), leaves if experts.has_gate else leaves[1:]
    own = dict(fused._parameters)
    first, last = own.pop("gate_up_proj" if experts.has_gate else "up_proj"), own.pop("down_proj")
    biases = [own.pop(f"{key}_bias", None) for key in ("gate_up_proj" if experts.has_gate else "up_proj", "down_proj")]
    experts._parameters = own
    for i in range(len(first)):
        expert = Expert()
        inner, outer = first.data[i], last.data[i]
        inner_bias, outer_bias = (None if bias is None else bias.data[i] for bias in biases)
        if experts.is_transposed:
            inner, outer = inner.mT, outer.mT
        parts = _gate_and_up(inner, experts), _gate_and_up(inner_bias, experts)
        layers = [*zip(*parts, strict=True), (outer, outer_bias)]
        for leaf, (weight, bias) in zip(experts.leaves, layers, strict=True):
            assert weight is not None
            views = weight.contiguous(), None if bias is None else bias.contiguous()
            expert.add_module(leaf, linear_of(*views, first.requires_grad))
        experts.add_module(str(i), expert)
    experts.train(fused.training)
    return experts


def _gate_and_up(whole: Tensor | None, experts: Experts) -> list[Tensor | None]:
    """The rows of the gate and of the other projection; the whole, where there is no gate."""
    if not experts.has_gate:
        return [whole]
    if whole is None:
        return [None, None]
    return list(whole.chunk(2)) if experts.is_concatenated else [whole[::2], whole[1::2]]
