"""Modules that stand for one of torch that held weights without layers: its attributes, and layers with its weights."""

from torch import Tensor, nn


def take_attributes(stand_in: nn.Module, module: nn.Module) -> None:
    """Give a stand-in the plain attributes and hooks of a module, but those that are parameters of the stand-in."""
    attributes = {key: value for key, value in module.__dict__.items() if not key.startswith("_") or "hooks" in key}
    stand_in.__dict__.update({k: value for k, value in attributes.items() if k not in stand_in._parameters})


def linear_of(weight_NK: Tensor, bias_N: Tensor | None, trained: bool | None = None) -> nn.Linear:
    """A linear layer with these parameters, or with views of tensors. trained: whether these take gradients, unless
    they say it themselves."""
    layer = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(layer)  # without values that would be made for nothing, of each of many experts
    layer.out_features, layer.in_features = weight_NK.shape
    layer.weight = _parameter(weight_NK, trained)
    layer.register_parameter("bias", None if bias_N is None else _parameter(bias_N, trained))
    return layer


def _parameter(tensor: Tensor, trained: bool | None) -> nn.Parameter:
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor.detach(), tensor.requires_grad if trained is None else trained)
