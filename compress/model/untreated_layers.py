"""The weights of a model that no pass treats, with the reasons."""

from collections.abc import Collection

from torch import nn

from compress.model.convolution import is_convolution
from compress.model.experts import GATE, gates
from compress.model.layers import is_fused, is_linear, output_head
from compress.model.splitting.split_layers import ADVICE, is_whole

EMBEDDING, HEAD = "embedding", "output head"
UNASKED_CONVOLUTION = "convolution; --convolutions includes it (in Python convolutions=True)"
UNASKED_EXPERTS = "fused experts: compress.split_experts(model) makes linear layers of those that transformers marks"


def untreated_weights(
    model: nn.Module, treated: Collection[str], convolutions: bool, experts: Collection[str] | None = None
) -> dict[str, str]:
    """{name: reason} of every weight matrix that no pass treats.

    convolutions: whether they are layers of this run. experts: the names of those in one parameter that are, or that
    have reasons of their own; None where nobody asked for them.
    """
    reasons = dict.fromkeys(gates(model), GATE)
    head = output_head(model)
    for name, module in model.named_modules():
        if name in reasons:
            continue
        if is_linear(module) and name not in treated:
            reasons[name] = HEAD if module is head else "outside the blocks"
        elif is_convolution(module):
            if name not in treated:
                reasons[name] = "outside the blocks" if convolutions else UNASKED_CONVOLUTION
        elif isinstance(module, nn.Embedding):
            reasons[name] = EMBEDDING
        elif not is_linear(module):
            for key, parameter in module.named_parameters(recurse=False):
                full = f"{name}.{key}" if name else key
                if is_fused(module, parameter):
                    if experts is None:
                        reasons[full] = UNASKED_EXPERTS
                    elif f"{full}.0" not in experts:
                        reasons[full] = "outside the blocks"
                elif parameter.ndim >= 2:
                    why = ADVICE if is_whole(module) else "not a linear layer"
                    reasons[full] = f"{type(module).__name__}: {why}"
    return reasons
