"""Replaces the compressed layers of a loaded model by dense ones."""

from typing import Any, cast

from torch import Tensor, nn

from compress.base.errors import InputError
from compress.inference.layers.compressed_layers import compressed_layers, layers_on_codes
from compress.inference.layers.embedding import QuantEmbedding, TiedLinear, give_back
from compress.inference.layers.fused import FusedLinear
from compress.inference.layers.linear import PackedLinear, QuantLinear
from compress.inference.load.assembly import TIED
from compress.model.attention import attentions, hold_scales
from compress.weights.kv_cache_codes import SCALES
from compress.weights.rotations.hadamard import for_plain_inputs


def densify(model: nn.Module) -> None:
    """Turn layers on codes into dense ones, in place and one after the other: exactly the values of the codes, in the
    dtype of each layer, tied where layers shared a table. Weights train if the rest of the model does. Those of layers
    that rotate their input are rotated back, and rounded to their dtype once more. Caches still keep codes.

    Raises InputError, and leaves the model as it was, where a layer also rounds its input or output, which dense
    weights would leave out.
    """
    rounding = [(name, layer.scheme) for name, layer in compressed_layers(model) if layer.scheme.inputs is not None]
    if rounding:
        name, scheme = rounding[0]
        both = "input" if scheme.outputs is None else "input and output"
        raise InputError(
            f"{type(model).__name__} quantizes the {both} of {name} ({len(rounding)} layers in all), which dense "
            "weights would leave out; it has to stay compressed"
        )
    ours = {p for m in model.modules() if isinstance(m, QuantLinear) for p in m.parameters()}
    trains = all(p.requires_grad for p in model.parameters() if p not in ours)
    tables: dict[PackedLinear, nn.Parameter] = {}
    for module in [module for module in model.modules() if isinstance(module, QuantEmbedding)]:
        if module.table not in tables:
            tables[module.table] = nn.Parameter(module.dequantize(), trains)
        give_back(module, tables[module.table])
    own = [(n, m) for n, m in model.named_modules() if isinstance(m, FusedLinear)] + list(layers_on_codes(model))
    names = [n for n, m in own if isinstance(m, FusedLinear) or not m.spoken_for]
    del own
    for name in names:
        layer = model.get_submodule(name)
        if isinstance(layer, TiedLinear):
            weight, bias = tables[layer.table], layer.bias
        elif isinstance(layer, FusedLinear):
            whole = layer.whole.bias
            weight = nn.Parameter(layer.weight.clone())
            bias = None if whole is None else nn.Parameter(whole.detach()[layer.rows].clone())
        else:
            assert isinstance(layer, QuantLinear)
            weight, bias = nn.Parameter(for_plain_inputs(layer.dequantize(), layer.scheme.rotation)), layer.bias
        linear = nn.Linear(layer.in_features, layer.out_features, device="meta")
        linear.weight, linear.bias = weight, cast(nn.Parameter, bias)
        model.set_submodule(name, linear.requires_grad_(trains).train(layer.training))
    for attention in attentions(model).values():
        scales = [getattr(attention, name, None) for name in SCALES]
        if all(scale is not None for scale in scales):
            hold_scales(attention, cast(list[Tensor], scales), persistent=False)
    _tie(model)


def _tie(model: nn.Module) -> None:
    """Inverse of `_untie`, for modules that share one weight again."""
    own: Any = model
    for part in model.modules():
        if TIED in part.__dict__:
            cast(Any, part)._tied_weights_keys = part.__dict__.pop(TIED)
    if hasattr(model, "all_tied_weights_keys"):
        keys = own.get_expanded_tied_weights_keys(all_submodels=True)
        own.all_tied_weights_keys = {k: v for k, v in keys.items() if own.get_parameter(k) is own.get_parameter(v)}
