"""Parameters that several places of a model share: tied weights, and modules that several blocks hold.

A checkpoint holds such a parameter once, under its name in the first block that has it. Readers give it to the other
places: transformers by the keys that a model ties, `load(into=...)` by identity.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from compress.base.errors import InputError
from compress.model.layers import find_stacks

TIED_KEYS = "all_tied_weights_keys"  # of models of transformers: {a tied parameter: the one that it shares}
Blocks = Sequence[tuple[str, nn.Module]]


def shared_parameters(model: nn.Module) -> set[int]:
    """Identities (`id`) of the parameters that several modules have, or several blocks."""
    modules = ([p for p in m._parameters.values() if p is not None] for m in model.modules())
    blocks = (list(block.parameters()) for _, block in _blocks(model))
    return _repeated(modules) | _repeated(blocks)


def _repeated(groups: Iterator[list[nn.Parameter]]) -> set[int]:
    seen: set[int] = set()
    shared: set[int] = set()
    for group in groups:
        own = set(map(id, group))
        shared |= own & seen
        seen |= own
    return shared


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    try:
        return [block for stack in find_stacks(model) for block in stack.blocks]
    except InputError:  # it has no layer
        return []


def check_shardable(model: nn.Module, blocks: Blocks) -> None:
    """Raises InputError for a parameter of a block that lies in another block or outside the blocks, too: a model that
    is sharded block by block would get several of it."""
    prefixes = [f"{name}." for name, _ in blocks if name]
    first: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        before = first.setdefault(id(p), name)
        if before != name and any(before.startswith(prefix) != name.startswith(prefix) for prefix in prefixes):
            raise InputError(
                f"{name} and {before} are one parameter, which lies in more than one block and cannot be sharded with "
                "each; run without --fsdp (in Python fsdp=False)"
            )


def repeated_names(model: nn.Module, blocks: Blocks) -> set[str]:
    """Full names of parameters and buffers of blocks that a checkpoint holds as tensors of earlier ones. A model of
    transformers keeps those that it does not tie, which would not be found otherwise."""
    # {a parameter: the one to which transformers ties it as it loads the model}; None for a model of the caller.
    ties: Mapping[str, str] | None = getattr(model, TIED_KEYS, None)
    first: dict[object, str] = {}
    repeated: set[str] = set()
    for block_name, block in blocks:
        prefix = f"{block_name}." if block_name else ""
        for name, what in _tensors(block):
            kept = first.setdefault(what, prefix + name)
            full = prefix + name
            if kept != full and (ties is None or ties.get(full, full) == ties.get(kept, kept)):
                repeated.add(full)
    return repeated


def _tensors(block: nn.Module) -> Iterator[tuple[str, object]]:
    """(Name, what two names of one tensor have in common) of the parameters and buffers of a block."""
    yield from ((name, id(p)) for name, p in block.named_parameters())
    for name, module in block.named_modules():
        yield from ((f"{name}.{key}" if name else key, (id(module), key)) for key in module._buffers)
