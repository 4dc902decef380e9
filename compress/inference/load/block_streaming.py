"""Runs a forward in the memory of one block: layers hold their weights only while the block around them runs.

    run_by_block(model, {layer: context to enter around its use}, forward)

The block of a layer is the outermost element of a `ModuleList` around it, or the model for a layer in none. A model
that reads a layer without calling its block finds no weight; it is run again with the weights of all layers.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

from torch import nn

from compress.base.memory import give_back

Opening = Callable[[], AbstractContextManager[object]]
T = TypeVar("T")


def blocks_around(model: nn.Module) -> dict[str, nn.Module]:
    """{module name: the block around it}, not counting the module itself."""
    blocks: dict[str, nn.Module] = {}

    def walk(name: str, module: nn.Module, block: nn.Module | None, listed: bool) -> None:
        blocks[name] = block or model
        inside = block or (module if listed else None)
        for child_name, child in module.named_children():
            walk(f"{name}.{child_name}" if name else child_name, child, inside, isinstance(module, nn.ModuleList))

    walk("", model, None, False)
    return blocks


@contextmanager
def open_by_block(model: nn.Module, openings: Mapping[str, Opening]) -> Iterator[None]:
    """Installs hooks for the body that enter the openings of a block's layers while the block runs. openings: {layer:
    function that makes its context}."""
    blocks = blocks_around(model)
    by_block: dict[nn.Module, list[Opening]] = {}
    for name, opening in openings.items():
        by_block.setdefault(blocks[name], []).append(opening)
    with ExitStack() as undo:
        for block, wanted in by_block.items():
            entered = undo.enter_context(ExitStack())

            def enter(*_: Any, entered: ExitStack = entered, wanted: list[Opening] = wanted) -> None:
                for opening in wanted:
                    entered.enter_context(opening())

            def leave(*_: Any, entered: ExitStack = entered) -> None:
                entered.close()
                give_back()

            undo.callback(block.register_forward_pre_hook(enter, prepend=True).remove)
            undo.callback(block.register_forward_hook(leave, always_call=True).remove)
        yield


def run_by_block(model: nn.Module, openings: Mapping[str, Opening], run: Callable[[], T]) -> T:
    """The result of `run`, with the layers of one block open at a time, or all of them where that fails."""
    if not openings:
        return run()
    try:
        with open_by_block(model, openings):
            return run()
    except Exception:  # noqa: BLE001 - an error of the model itself is raised again below
        with ExitStack() as held:
            for opening in openings.values():
                held.enter_context(opening())
            return run()
