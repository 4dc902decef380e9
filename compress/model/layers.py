"""Find what to compress in any model: the lists of blocks, and the layers inside them.

Nothing here knows an architecture by name. A *stack* is an outermost `ModuleList` whose elements all hold linear
layers (decoder layers, encoder layers), or convolutions in a model where no list is of linear layers; a model without
one is a stack of one block, itself.

Convolutions are layers like others in a model that has no stack of linear layers. In a model that has one they are
small, at its edge or between its linear layers, and are treated only where that is asked for.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter
from transformers.pytorch_utils import Conv1D

from compress.base.errors import InputError
from compress.model.convolution import Geometry, geometry_of, is_convolution
from compress.model.splitting.split_layers import ADVICE, is_whole

# (Class with a forward of its own, whether seen on the meta device) -> whether that is a product.
_PRODUCTS: dict[tuple[type[nn.Module], bool], bool] = {}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Layer:
    """A linear map of a model, with its weight seen as [N, K] whatever way it is stored.

    key: the module's parameter that holds the weight. index: the slice of it that is the weight, of a parameter
    [E, N, K] that holds those of E experts; None: all of it. inputs_first: the weight is stored as [K, N].
    Of a convolution, K counts the inputs of one output: those of a group, times the kernel.
    """

    name: str
    module: nn.Module
    key: str = "weight"
    index: int | None = None
    inputs_first: bool = False

    @property
    def is_called(self) -> bool:
        """True where a call of the module is the layer's product. Other products are made inside the module's forward
        (`engine.walk.products`)."""
        return self.key == "weight" and self.index is None

    @property
    def transposed(self) -> bool:
        """True for a weight stored as [K, N], as GPT-2's Conv1D has it."""
        return self.inputs_first or (self.is_called and isinstance(self.module, Conv1D))

    @property
    def geometry(self) -> Geometry | None:
        """The geometry of a convolution; None for a plain linear layer."""
        return geometry_of(self.module) if self.is_called and is_convolution(self.module) else None

    @property
    def channels(self) -> int:
        """The channels of the input: K, or those of all groups of a convolution."""
        geometry = self.geometry
        return self.shape[1] if geometry is None else geometry.groups * self.parameter.shape[1]

    @property
    def has_format(self) -> bool:
        """True for a layer that a checkpoint can hold as codes; others are stored dense."""
        return self.is_called and self.geometry is None

    @property
    def parameter(self) -> nn.Parameter:
        """The whole parameter, of which the weight may be a slice."""
        weight = self.module._parameters[self.key]  # not the attribute, which may be what is made of it
        assert weight is not None
        return weight

    @property
    def weight(self) -> Tensor:
        """[N, K], a view (of a convolution in channels-last format a copy: not to be written to)."""
        return self.matrix(self.parameter.data)

    def part(self, whole: Tensor) -> Tensor:
        """The layer's part of a tensor of the parameter's shape, a view: the slice of an expert, or all of it."""
        return whole if self.index is None else whole[self.index]

    def matrix(self, whole: Tensor) -> Tensor:
        """The layer's part of a tensor of the parameter's shape as [N, K]."""
        stored = self.part(whole)
        return stored.t() if self.transposed else stored.flatten(1)

    @property
    def stored_shape(self) -> torch.Size:
        """The weight's shape as it is stored; also right while the parameter is sharded."""
        shape = self.parameter.shape
        return shape if self.index is None else shape[1:]

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K); also right while the parameter is sharded."""
        shape = self.stored_shape
        first, second = shape[0], shape[1:].numel()
        return (second, first) if self.transposed else (first, second)

    def stored(self, weight_NK: Tensor) -> Tensor:
        """An [N, K] tensor in the orientation in which the module stores its weight, and laid out as a file has it:
        a product with another layout may differ in its last place, between ranks or before and after a file."""
        return (weight_NK.t() if self.transposed else weight_NK.reshape(self.stored_shape)).contiguous()

    def put(self, stored: Tensor) -> Tensor:
        """Gives the layer other values (`stored`); returns those that it had. A slice is overwritten in place."""
        parameter = self.parameter
        if self.index is None:
            before, parameter.data = parameter.data, stored
            return before
        before = self.part(parameter.data).clone()
        self.part(parameter.data).copy_(stored)
        return before


@dataclass(frozen=True)
class Table(Layer):
    """A token embedding [vocabulary, width] as a layer, or an output head with a weight of its own. shared: the other
    modules that have the same weight (a tied head), by name; tied: these modules."""

    shared: tuple[str, ...] = ()
    tied: tuple[nn.Module, ...] = ()


@dataclass(frozen=True)
class Stack:
    """Blocks that run one after the other: the list that holds them (None: the model itself is the only block)."""

    name: str
    container: nn.ModuleList | None
    blocks: tuple[tuple[str, nn.Module], ...]


def is_linear(module: nn.Module) -> bool:
    """True for a module that multiplies its input by its weight, and does nothing else. Routers of experts, say, are
    subclasses that return scores."""
    if not isinstance(module, nn.Linear | Conv1D):
        return False
    weight = module._parameters.get("weight")  # not the attribute, which torch.nn.utils may compute
    if weight is None or isinstance(weight, UninitializedParameter):
        return True
    return weight.ndim == 2 and _is_product(module, weight)


def _is_product(module: nn.Linear | Conv1D, weight: Tensor) -> bool:
    """True for a layer whose own forward, where its class has one, returns what the product with its weight is; on the
    meta device, a tensor of the same shape."""
    kind = type(module)
    if kind.forward in (nn.Linear.forward, Conv1D.forward) or getattr(module, "is_product", False):  # rounds for QAT
        return True
    if (known := _PRODUCTS.get((kind, weight.is_meta))) is not None:
        return known
    inputs = weight.shape[0] if isinstance(module, Conv1D) else weight.shape[1]
    x = torch.linspace(-1, 1, inputs, dtype=weight.dtype, device=weight.device)[None]
    try:
        with torch.no_grad():
            usual = Conv1D.forward if isinstance(module, Conv1D) else nn.Linear.forward
            expected, found = usual(module, x), kind.forward(module, x)
            same = isinstance(found, Tensor) and found.shape == expected.shape
            same = same and (weight.is_meta or torch.allclose(found, expected, rtol=1e-2, atol=1e-2, equal_nan=True))
    except Exception:  # noqa: BLE001 - it does not take what a linear layer takes
        same = False
    _PRODUCTS[kind, weight.is_meta] = same
    return same


def transposed_weights(model: nn.Module) -> set[str]:
    """Names of the weights of linear layers that a model stores as [K, N]."""
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}


def as_stored(weight_NK: Tensor, transposed: bool) -> Tensor:
    """A weight as a model stores it: [K, N] where it is transposed there."""
    return weight_NK.t().contiguous() if transposed else weight_NK


def is_layer(module: nn.Module) -> bool:
    return is_linear(module) or is_convolution(module)


def is_read_uncalled(module: nn.Module) -> bool:
    """True for a linear layer whose weight the module around it reads without calling the layer: torch has a class for
    those of its MultiheadAttention."""
    return isinstance(module, NonDynamicallyQuantizableLinear)


def obstacle(module: nn.Module, key: str = "weight") -> str | None:
    """The reason why a layer's weight, the parameter of this name, cannot be compressed, and what to do about it; None
    where it can."""
    weight = module._parameters.get(key)
    if weight is None:
        return (
            "computes its weight from other tensors (weight_norm, spectral_norm, pruning); make it permanent: "
            "torch.nn.utils.parametrize.remove_parametrizations, remove_weight_norm, remove_spectral_norm or "
            "prune.remove"
        )
    if isinstance(weight, UninitializedParameter):
        return "has a weight without a shape; run the model once"
    if weight.dtype not in FLOATS:
        return f"has weights of {weight.dtype}; allowed: {', '.join(map(str, FLOATS))}"
    return None if weight.numel() else f"has an empty weight, {list(weight.shape)}"


def check_tensors(model: nn.Module) -> None:
    """Raises InputError for a parameter or buffer that no run can work with, whether or not it is to be compressed."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, UninitializedParameter):
            continue  # `obstacle`, where it is to be compressed
        problem = None
        if tensor.is_meta:
            problem = "has no values (it is on the meta device); load the model's weights first"
        elif isinstance(tensor, nn.Parameter) and tensor.layout is not torch.strided:
            problem = f"is sparse ({tensor.layout}); make it dense (to_dense)"
        elif tensor.is_inference():
            problem = "was made under torch.inference_mode and cannot be changed; make or load the model outside of it"
        if problem is not None:
            raise InputError(f"{name} {problem}")


def layers_of(block: nn.Module, block_name: str, convolutions: bool = False, experts: bool = False) -> list[Layer]:
    """The linear layers of a block (its convolutions, each expert of fused ones), under their full names, in
    registration order."""
    prefix = f"{block_name}." if block_name else ""
    wanted = is_layer if convolutions else is_linear
    result: list[Layer] = []
    for name, module in block.named_modules():
        if wanted(module):
            result.append(Layer(prefix + name, module))
        elif experts:
            result += experts_of(module, prefix + name)
    return result


def experts_of(module: nn.Module, name: str) -> list[Layer]:
    """Each expert of a module's fused ones as a layer `NAME.PARAMETER.INDEX`. The weights are [E, N, K], or [E, K, N]
    where the module says `is_transposed`, as those of transformers do."""
    prefix, inputs_first = f"{name}." if name else "", bool(getattr(module, "is_transposed", False))
    return [
        Layer(f"{prefix}{key}.{i}", module, key, i, inputs_first)
        for key, parameter in module._parameters.items()
        if parameter is not None and is_fused(module, parameter)
        for i in range(len(parameter))
    ]


def is_fused(module: nn.Module, parameter: nn.Parameter) -> bool:
    """True for a parameter that may hold the weights of several experts. [1, T, C] are embeddings of positions; a
    transposed convolution is not a stack of matrices."""
    if isinstance(parameter, UninitializedParameter):
        return False
    of_torch = any(k.__module__.startswith("torch.nn.") for k in type(module).__mro__ if k is not nn.Module)
    return parameter.ndim == 3 and len(parameter) > 1 and not of_torch


def treats_convolutions(model: nn.Module) -> bool:
    """True where convolutions are layers of this model by default: it has no stack of linear layers."""
    return not any(_candidates(model, "", is_linear))


def _candidates(
    module: nn.Module, name: str, is_layer: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.ModuleList]]:
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        holds_blocks = (
            isinstance(child, nn.ModuleList)
            and len(child) > 0
            and all(not is_layer(element) and any(is_layer(m) for m in element.modules()) for element in child)
        )
        if holds_blocks:
            assert isinstance(child, nn.ModuleList)
            yield full, child
        else:
            yield from _candidates(child, full, is_layer)


def find_stacks(model: nn.Module, convolutions: bool | None = None) -> list[Stack]:
    """The stacks of a model in registration order (an encoder before its decoder). Raises InputError if no layer.

    convolutions: whether they are layers; None: where no stack is of linear layers.
    """
    if convolutions is None:
        convolutions = treats_convolutions(model)
    if not any(is_layer(module) if convolutions else is_linear(module) for module in model.modules()):
        what = "linear layer or convolution" if convolutions else "linear layer"
        whole = next(
            (f"; {name} is an {type(m).__name__}: {ADVICE}" for name, m in model.named_modules() if is_whole(m)), ""
        )
        raise InputError(f"{type(model).__name__} has no {what} to compress{whole}")
    lists = list(_candidates(model, "", is_linear))
    if not lists and convolutions:
        lists = list(_candidates(model, "", is_layer))
    stacks = [
        Stack(name, container, tuple((f"{name}.{i}", block) for i, block in enumerate(container)))
        for name, container in lists
    ]
    return stacks or [whole_model(model)]


def lies_in(model: nn.Module, stacks: Sequence[Stack]) -> bool:
    """True where all linear layers of a model but its output head lie in these stacks."""
    inside = {id(m) for stack in stacks for _, block in stack.blocks for m in block.modules()}
    outside = (m for m in model.modules() if id(m) not in inside and is_linear(m))
    return all(m is output_head(model) for m in outside)


def whole_model(model: nn.Module) -> Stack:
    """The model as one block."""
    return Stack("", None, (("", model),))


def output_head(model: nn.Module) -> nn.Module | None:
    """The layer that computes logits from hidden states; None where the model has none."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    return head if isinstance(head, nn.Module) else None


def token_embedding(model: nn.Module) -> nn.Embedding | None:
    """The table of token embeddings; None where the model has none."""
    get = getattr(model, "get_input_embeddings", None)
    try:
        found = get() if callable(get) else None
    except NotImplementedError:
        return None
    return found if isinstance(found, nn.Embedding) else None


def token_tables(model: nn.Module) -> list[Table]:
    """The token embedding, then the output head where it is a linear layer with a weight of its own. Of a model that
    does not say which one that is (a module of the caller) every embedding. Raises InputError for one whose weight is
    more than a table."""
    embedding, head = token_embedding(model), output_head(model)
    own = [] if callable(getattr(model, "get_input_embeddings", None)) else _embeddings(model)
    if embedding is None and not own:
        return []
    tables = []
    names = {module: name for name, module in model.named_modules()}
    for module in own or (embedding, head):
        weight = None if module is None or module not in names else module._parameters.get("weight")
        if module is None or weight is None or (module is head and not isinstance(head, nn.Linear)):
            continue
        others = [(n, m) for m, n in names.items() if m is not module and m._parameters.get("weight") is weight]
        if module is head and any(m is embedding for _, m in others):
            continue
        if odd := [(n, m) for n, m in others if not isinstance(m, nn.Linear | nn.Embedding)]:
            raise InputError(
                f"{odd[0][0]} ({type(odd[0][1]).__name__}) shares the weight of {names[module]} and is neither an "
                "embedding nor a linear layer; leave the embeddings pass out"
            )
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            raise InputError(f"{names[module]} renormalizes its rows (max_norm); leave the embeddings pass out")
        shared, tied = tuple(n for n, _ in others), tuple(m for _, m in others)
        tables.append(Table(names[module], module, shared=shared, tied=tied))
    return tables


def _embeddings(model: nn.Module) -> list[nn.Module]:
    """The embeddings of a model, one for each weight."""
    found: dict[int, nn.Module] = {}
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            found.setdefault(id(module._parameters.get("weight")), module)
    return list(found.values())
