"""`on_codes`: a model that was quantized in memory computes on the codes of its layers from now on."""

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from torch import nn

from compress.base.errors import InputError
from compress.inference.layers.compressed_layers import lay_in_strips
from compress.inference.layers.embedding import TiedLinear, take_over
from compress.inference.layers.linear import PackedLinear, QuantLinear
from compress.jobs.job import Result
from compress.model.layers import Layer, is_linear
from compress.model.online_rotation import input_rotation
from compress.weights.decision import Decision


def on_codes(result: Result) -> nn.Module:
    """Replace the layers that a run has decided about, in place, by layers that hold and multiply packed codes. Returns
    the model. Values, and how inputs are rounded, are those that the run decided; pruned layers without codes stay.

    result: of `quantize` with `keep_codes`, of a model in memory.

    Raises InputError, and leaves the model as it was, for a result without codes and for a layer that cannot compute on
    them.
    """
    if result.model is None or result.codes is None:
        raise InputError("the result holds no codes; give keep_codes=True to quantize, or load its output")
    model = result.model
    coded = {name: decision for name, decision in result.codes.items() if not decision.dense}
    made = _layers_on_codes(model, coded)
    for name, layer in made.items():
        _put(model, name, layer)
    lay_in_strips(model)
    return model


def _layers_on_codes(model: nn.Module, coded: Mapping[str, Decision]) -> dict[str, QuantLinear]:
    """{layer: the layer on its codes}. Raises InputError for one that has none."""
    modules = dict(model.named_modules())
    layers: dict[str, QuantLinear] = {}
    for name, decision in coded.items():
        module = modules.get(name)
        table = isinstance(module, nn.Embedding)
        if module is None or not (table or is_linear(module)):
            what = "an expert in a parameter of several" if module is None else f"a {type(module).__name__}"
            raise InputError(
                f"{name} is {what}, which cannot compute on codes; ignore the layer, or leave on_codes out"
            )
        layer = Layer(name, module)
        scheme = replace(decision.scheme(table), rotation=input_rotation(module))
        parts = {key: part.to(layer.parameter.device) for key, part in decision.parts(table).items()}
        bias = None if table else cast(nn.Linear, module).bias
        found = QuantLinear.from_parts(parts, scheme, layer.shape, bias)
        if table and not isinstance(found, PackedLinear):
            raise InputError(f"{name} is an embedding with {scheme}, which cannot be looked up; ignore it")
        layers[name] = found.to(layer.parameter.device, layer.parameter.dtype).train(module.training)
    return layers


def _put(model: nn.Module, name: str, layer: QuantLinear) -> None:
    """Put a layer on codes into the place of a module, and of others that share its weight."""
    module = model.get_submodule(name)
    weight = module._parameters["weight"]
    others = [(n, m) for n, m in model.named_modules() if m is not module and m._parameters.get("weight") is weight]
    if not isinstance(module, nn.Embedding):
        model.set_submodule(name, layer)
        return
    assert isinstance(layer, PackedLinear)
    take_over(module, layer)
    for other_name, other in others:
        if isinstance(other, nn.Embedding):
            take_over(other, layer, twin=True)
        else:
            model.set_submodule(other_name, TiedLinear(layer, cast(nn.Linear, other).bias).to(layer.device))
