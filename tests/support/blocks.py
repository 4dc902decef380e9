"""Blocks of the tiny models with the calls they get, to probe and edit."""

import torch
from models import build, tokens

from compress.model.calls import Call, without_cache
from compress.model.layers import find_stacks


def inputs(kind, samples=3, length=20):
    ids = tokens(samples, length)
    if kind == "t5":
        return {"input_ids": ids, "decoder_input_ids": tokens(samples, 18, seed=2), "use_cache": False}
    return {"input_ids": ids}


def livelier(model):
    """Norms and biases as training leaves them, not all alike."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def block_calls(model, batch):
    """The call of every block in a forward of the model."""
    found = {}

    def note(name):
        def hook(_, args, kwargs):
            found[name] = Call(args, kwargs, 0 if args else "hidden_states", None)

        return hook

    hooks = [
        block.register_forward_pre_hook(note(name), with_kwargs=True)
        for stack in find_stacks(model)
        for name, block in stack.blocks
    ]
    with torch.no_grad(), without_cache(model):
        model(**batch)
    for hook in hooks:
        hook.remove()
    return found


def answer(model, batch):
    with torch.no_grad():
        out = model(**batch)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def first_block(kind, model=None, batch=None):
    model = model or livelier(build(kind))
    ((name, block), *_) = find_stacks(model)[0].blocks
    return block, block_calls(model, batch or inputs(kind))[name]
