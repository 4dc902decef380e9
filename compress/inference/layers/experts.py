"""Experts that multiply together: one product for all of them in place of one for each.

    routing = sort_by_expert(...)          pairs of a token and an expert, sorted by expert
    both_PN = first(x_MK)                  gate and up, in one product where they are alike
    y_PH    = last(gated(both_PN))
    out_MH  = combine(y_PH, routing)

The layers of experts stay where they are, under their names; what they hold becomes parts of one tensor [E, ...] for
each buffer, so that nothing is held twice (`ExpertStack`). A CPU multiplies in C++ (`kernels.cpu.direct`), a
GPU in one launch of Triton (`kernels.operators.grouped`). Where that cannot be (`why_not_together`), where a layer has
a hook, an adapter or another forward, and on a CPU where a gradient is asked for, experts compute one by one.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from compress.inference.layers.base import QuantLinear, run_of
from compress.inference.layers.fused import FusedLinear, why_not_fuse
from compress.inference.layers.packed import ActOrderLinear, PackedLinear
from compress.inference.layers.rows import Int8Linear
from compress.kernels.cpu import direct
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.cpu.arguments import TYPES, Operation
from compress.kernels.layouts.words import CodeWords
from compress.kernels.operators import grouped
from compress.kernels.operators.devices import runs_on_cpu
from compress.kernels.operators.int8_rows import why_not_w8a8
from compress.kernels.operators.words import why_not_weight_only
from compress.kernels.routes import Route
from compress.model.experts import Experts, SortedExperts, is_calibrating
from compress.weights.scheme import Scheme

# What the kernels read of a layer: the buffers that have a part for each expert.
STACKED: dict[type[QuantLinear], tuple[str, ...]] = {
    PackedLinear: ("words", "scale", "zero"),
    Int8Linear: ("codes", "weight_scale", "row_sum"),
}

# Of the attributes of a module: it has another forward than its class.
HAS_FORWARD = methodcaller("__contains__", "forward")


def why_not_together(
    scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, int8_input: bool | None = None
) -> list[str]:
    """Reasons why experts of this scheme and shape (N, K) cannot multiply together; empty when they can. int8_input: x
    is rounded to int8 (None: as the scheme says)."""
    kind, K = run_of(scheme), shape[1]
    on_cpu = runs_on_cpu(device)
    if scheme.outputs is not None:
        return ["outputs are rounded"]
    if scheme.inputs is not None and not scheme.dynamic:
        return ["every expert has ranges of its own for its inputs"]
    if issubclass(kind, Int8Linear):
        if on_cpu:
            return _why_not_direct("w8a8", K, -1, dtype)
        x_MK = torch.empty(1, K, dtype=dtype, device="meta")
        return why_not_w8a8(x_MK, torch.empty(0, K, dtype=torch.int8, device="meta"), device)
    if not issubclass(kind, PackedLinear) or issubclass(kind, ActOrderLinear):
        return [f"no kernel multiplies {scheme} of several experts"]
    layer = kind(scheme, K, shape[0], None)
    if layer.rounding_first is not None:
        return ["inputs are rounded to fewer than 8 bits"]
    rounded = layer.input_group is not None if int8_input is None else int8_input
    if on_cpu:
        return _why_not_direct("int8_activation" if rounded else "weight_only", K, layer.group_size, dtype)
    if rounded:
        return ["no kernel multiplies int8 inputs by words of several experts"]
    nothing = torch.empty(0, dtype=dtype, device="meta")
    weight = CodeWords(nothing, nothing, None, layer.group_size, layer.container)
    return why_not_weight_only(torch.empty(1, K, dtype=dtype, device="meta"), weight, device)


def _why_not_direct(operation: Operation, K: int, group_size: int, dtype: torch.dtype) -> list[str]:
    reasons = [] if dtype in TYPES else [f"x is {dtype}; allowed: float32, float16, bfloat16"]
    return [*reasons, *cpu_gemm.why_not_sizes(operation, K, group_size), *direct.why_not()]


def why_not_stack(layers: Sequence[QuantLinear]) -> list[str]:
    """Reasons why layers, one of each expert, cannot multiply together; empty when they can."""
    first = layers[0]
    if any(layer.batch_invariant for layer in layers):
        return ["batch_invariant: every expert sums its tokens alike"]
    shapes = {(layer.out_features, layer.in_features) for layer in layers}
    if len(shapes) > 1:
        return ["experts have several shapes"]
    reasons = list(dict.fromkeys(reason for layer in layers for reason in why_not_fuse([first, layer])))
    if reasons:
        return reasons
    if len({(getattr(layer, "input_group", None), layer.in_strips) for layer in layers}) > 1:
        return ["only some experts round their inputs, or are laid out in strips"]
    rounded = first.input_group is not None if isinstance(first, PackedLinear) else None
    return why_not_together(first.scheme, shapes.pop(), first.dtype, first.device, rounded)


class ExpertStack:
    """Layers of all experts, one or two of each side by side ([gate; up]), as one product."""

    def __init__(self, layers: Sequence[Sequence[QuantLinear]]) -> None:
        """Takes layers that have nothing against it (`why_not_stack`), and makes their buffers parts of its own."""
        first = layers[0][0]
        self.kind = PackedLinear if isinstance(first, PackedLinear) else Int8Linear
        self.layer, self.layers, self.on_cpu = first, layers, runs_on_cpu(first.device)
        if not self.on_cpu:
            for layer in (layer for beside in layers for layer in beside):
                layer.lay_in_rows()  # no kernel looks up the codes of several experts
        self.held = {name: self._stack(name) for name in STACKED[self.kind]}
        self.bias = self._stack("bias")
        self.group_size = first.group_size if isinstance(first, PackedLinear) else -1

    def _stack(self, name: str) -> Tensor | None:
        """[E, ...] the parts that layers hold under a name, which become views of it, one expert after the other."""
        given = getattr(self.layer, name)
        if given is None:
            return None
        rows = sum(len(getattr(layer, name)) for layer in self.layers[0])
        whole = given.new_empty(len(self.layers), rows, *given.shape[1:])
        for of_expert, beside in zip(whole, self.layers, strict=True):
            place = 0
            for layer in beside:
                part = getattr(layer, name)
                view = of_expert[place : place + len(part)]
                view.copy_(part.detach())
                place += len(part)
                if isinstance(part, nn.Parameter):
                    part.data = view
                else:
                    setattr(layer, name, view)
        return whole.detach()

    def is_whole(self) -> bool:
        """True while the layers hold parts of this stack."""
        for name, whole in (*self.held.items(), ("bias", self.bias)):
            if whole is None:
                continue
            place = whole.data_ptr()
            for layer in (layer for beside in self.layers for layer in beside):
                part = getattr(layer, name)
                if part is None or part.dtype != whole.dtype or part.data_ptr() != place:
                    return False
                place += part.nbytes
        return True

    def serves(self, x: Tensor) -> bool:
        """True where this stack multiplies x."""
        own = x.dtype is self.layer.dtype and x.shape[-1] == self.layer.in_features
        return own and (not self.on_cpu or direct.serves(x))

    def __call__(self, x_MK: Tensor, token_P: Tensor | None, start_E: Tensor) -> Tensor:
        """[P, N]; token and start as in `kernels.operators.grouped.grouped_words`."""
        parts: Any = (*self.held.values(), self.bias)
        layer: Any = self.layer
        if self.kind is PackedLinear:
            how: Any = (token_P, start_E, layer.container, self.group_size)
            return grouped.grouped_words(x_MK, *parts, *how, layer.input_group, layer.lookup)
        return grouped.grouped_w8a8(x_MK, *parts, None, None, token_P, start_E, layer.scheme.inputs.symmetric)


class StackedExperts(Experts):
    """Experts that multiply together where they can. stacks: of their first layers, and of their last; None where they
    compute one by one, for the `reasons`."""

    OF_STACKS: ClassVar[tuple[str, ...]] = ("stacks", "reasons", "leaf_modules", "hooks", "attributes")
    stacks: tuple[ExpertStack, ...] | None
    reasons: list[str]
    leaf_modules: list[tuple[str, list[dict[str, Any]], list[nn.Module]]]
    hooks: list[dict[Any, Any]]
    attributes: list[dict[str, Any]]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As of `Experts`."""
        if not self._together(hidden_states):
            return super().forward(hidden_states, top_k_index, top_k_weights)
        routing = grouped.sort_by_expert(top_k_index, len(self.numbers))
        out_PH = self._of_pairs(hidden_states, routing.token, routing.start)
        return grouped.combine(out_PH, routing, top_k_weights)

    def _of_pairs(self, x_MK: Tensor, token_P: Tensor | None, start_E: Tensor) -> Tensor:
        """[P, H]: what the experts of pairs make of their tokens."""
        stacks = self.stacks
        assert stacks is not None
        *first, last = stacks
        y_PH = last(self._inner([stack(x_MK, token_P, start_E) for stack in first]), None, start_E)
        return self.post_expert_norm(y_PH) if self.has_post_expert_norm else y_PH

    def _together(self, x: Tensor) -> bool:
        """True where x can be multiplied by all experts together."""
        stacks = self.stacks
        if stacks is None or not stacks[0].serves(x):
            return False
        if is_compiling():  # which knows no more than that
            return True
        if is_calibrating():
            return False
        # Hooks, other forwards (`inference.check.dense_twin`), and other modules (adapters) in place of layers.
        if any(self.hooks) or any(map(HAS_FORWARD, self.attributes)):
            return False
        return self._has_its_layers()

    def _has_its_layers(self) -> bool:
        """True while the layers that were stacked are in their places."""
        return all([held[leaf] for held in inside] == layers for leaf, inside, layers in self.leaf_modules)

    def stack(self) -> None:
        """Make the layers of the experts parts of stacks, where they can be; once more where they no longer are."""
        before, self.stacks = self.stacks, None
        experts = [self.get_submodule(number) for number in self.numbers]
        columns = [[_computing(getattr(expert, leaf)) for expert in experts] for leaf in self.leaves]
        for layer in (layer for each in columns for layer in each if isinstance(layer, QuantLinear)):
            if not runs_on_cpu(layer.device):
                layer.lay_in_rows()
        self.reasons = _why_not(columns)
        if self.reasons:
            return
        if before is not None and self._has_its_layers() and all(stack.is_whole() for stack in before):
            self.stacks = before
            return
        layers = cast(list[list[QuantLinear]], columns)
        *first, last = layers
        if len(first) == 2 and first[0] == first[1]:
            del first[1]  # fused: one layer of the rows of both
        beside = len(first) == 2 and not why_not_fuse([first[0][0], first[1][0]])
        if beside and (not isinstance(first[0][0], PackedLinear) or first[0][0].in_strips):
            stacks = [ExpertStack([*zip(*first, strict=True)])]
        else:
            stacks = [ExpertStack([[layer] for layer in each]) for each in first]
        self.stacks = (*stacks, ExpertStack([[layer] for layer in last]))
        inside = [module for expert in experts for layer in expert.children() for module in layer.modules()]
        self.hooks = [h for module in inside for h in (module._forward_hooks, module._forward_pre_hooks)]
        self.attributes = [module.__dict__ for module in inside]
        held = [expert._modules for expert in experts]
        self.leaf_modules = [
            (leaf, cast(list[dict[str, Any]], held), [getattr(expert, leaf) for expert in experts])
            for leaf in self.leaves
        ]

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles stack their own layers.
        return {name: value for name, value in self.__dict__.items() if name not in self.OF_STACKS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.stacks = None
        self.stack()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.stack()
        return self


class SortedStackedExperts(StackedExperts, SortedExperts):
    """`SortedExperts` that multiply together where they can."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """As of `SortedExperts`."""
        if not self._together(hidden_states):
            return SortedExperts.forward(self, hidden_states)
        experts = len(self.numbers)
        rows = len(hidden_states) // experts
        start = torch.arange(experts + 1, dtype=torch.int32, device=hidden_states.device) * rows
        return self._of_pairs(hidden_states, None, start)


def _computing(layer: nn.Module) -> nn.Module:
    """The layer that multiplies for a module: of a fused one, that of the rows of all."""
    return layer.whole if isinstance(layer, FusedLinear) else layer


def _why_not(columns: Sequence[Sequence[nn.Module]]) -> list[str]:
    """Reasons why experts compute one by one. columns: the layers of all experts, for each of their names."""
    for layers in columns:
        if not all(isinstance(layer, QuantLinear) for layer in layers):
            return ["some of their layers are dense"]
        if reasons := why_not_stack(cast(Sequence[QuantLinear], layers)):
            return reasons
    return []


def one_by_one(
    model: nn.Module,
    known: Mapping[str, tuple[Scheme, tuple[int, int]]],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, list[str]]:
    """{layer of an expert: the reasons why experts of its block compute one by one; empty where they multiply together}
    of a model, without its weights. known: {layer: (scheme, shape)} of those on codes."""
    reasons_by_layer: dict[str, list[str]] = {}
    for name, experts in model.named_modules():
        if not isinstance(experts, Experts):
            continue
        reasons: list[str] = []
        for leaf in experts.leaves:
            layers = [known.get(f"{name}.{i}.{leaf}") for i in experts.numbers]
            coded = [layer for layer in layers if layer is not None]
            if len(coded) < len(layers):
                reasons.append("some of their layers are dense")
            elif len({str(scheme) for scheme, _ in coded}) > 1:
                reasons.append("their schemes differ")
            else:
                reasons += why_not_together(*coded[0], dtype, device)
        reasons = list(dict.fromkeys(reasons))
        reasons_by_layer |= {f"{name}.{i}.{leaf}": reasons for i in experts.numbers for leaf in experts.leaves}
    return reasons_by_layer


def route_among(one: Route, reasons: Sequence[str]) -> Route:
    """The route of a layer of an expert, from that of the layer alone and what is against all of them together."""
    if reasons:
        return Route(f"{one.kernel}, one by one", (*one.why_not, f"experts one by one: {'; '.join(reasons)}"))
    if one.kernel == "dequantize":  # a launch for all has no such path
        return Route("triton, all experts", ())
    return Route(f"{one.kernel}, all experts", one.why_not)


def stack_experts(model: nn.Module) -> None:
    """Make the experts of a loaded model multiply together, where they can. Calling it again takes changes of their
    layers up."""
    for experts in [module for module in model.modules() if isinstance(module, Experts)]:
        if not isinstance(experts, StackedExperts):
            experts.__class__ = SortedStackedExperts if isinstance(experts, SortedExperts) else StackedExperts
            together = cast(StackedExperts, experts)
            together.stacks = None
            together.register_load_state_dict_post_hook(_again)
        cast(StackedExperts, experts).stack()


def _again(experts: Any, _: Any) -> None:
    experts.stack()
