"""The layers of a model that passes could treat, where it is still open which ones will."""

from collections.abc import Sequence

from torch import nn

from compress.base.errors import InputError
from compress.engine.plan.plan import Plan
from compress.engine.plan.treatable_layers import Ignored, Matching, check_untouched, remarks_on_patterns
from compress.model.layers import check_tensors, find_stacks, treats_convolutions, whole_model


def treatable(model: nn.Module, ignore: Sequence[str] = (), one_block: bool = False) -> Plan:
    """A plan without passes: one stack of blocks with all layers that a pass could decide about by their inputs. Raises
    InputError where there is none, and for a pattern that matches nothing.

    one_block: the model as a whole; one of several stacks (an encoder and a decoder) is in any case.
    """
    check_tensors(model)
    check_untouched(model)
    convolutions = treats_convolutions(model)
    stacks = find_stacks(model, convolutions)
    if one_block or len(stacks) > 1:
        stacks = [whole_model(model)]
    ignored = Ignored(ignore)
    matching = Matching(model, any_layer, any_layer, convolutions, set(), ignored)
    layers = {name: matching.layers_of(block, name) for stack in stacks for name, block in stack.blocks}
    everything = [layer for of_block in layers.values() for layer in of_block]
    notes = remarks_on_patterns(model, (), everything, ignored, convolutions)
    if not everything:
        raise InputError("no layer is left to compress; ignore less")
    return Plan(
        stacks=tuple(stacks), layers=layers, ignored=ignored.reasons, convolutions=convolutions, notes=tuple(notes)
    )


def any_layer(name: str) -> bool:
    """True: no layer is excluded by its name."""
    return True
