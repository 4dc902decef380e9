"""Layers of a model that a run may treat, the reasons why it leaves the others alone, and
patterns that match none."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from compress.base.errors import InputError
from compress.engine.layer_versions import RoundInput, RoundOutput
from compress.inference.load.kv_caches import cache_hook
from compress.model.experts import GATE, gates
from compress.model.layers import Layer, is_read_uncalled, layers_of, obstacle, output_head, token_tables
from compress.model.patterns import FORMS, check_quick, matches
from compress.model.sharing import shared_parameters
from compress.model.splitting.split_layers import ADVICE
from compress.model.untreated_layers import untreated_weights
from compress.passes.protocol.base import Pass
from compress.train.rounding.swapped_layers import Quantizing


@dataclass
class Ignored:
    """The layers that are left alone, and why. patterns: what the person wants ignored; matched: those that named
    something."""

    patterns: Sequence[str]
    reasons: dict[str, str] = field(default_factory=dict)
    matched: set[str] = field(default_factory=set)

    def asked_for(self, *names: str) -> bool:
        """True if a pattern matches one of a layer's names; enters the reason under all of them."""
        hits = [pattern for pattern in self.patterns for name in names if matches(name, pattern)]
        self.matched.update(hits)
        if hits:
            self.reasons |= dict.fromkeys(names, f"ignored by {hits[0]!r}")
        return bool(hits)


@dataclass(frozen=True)
class Matching:
    """Layers of a model that may be treated. asked, observed: whether a pass asks for the layer of a name, and whether
    one looks at its input or rounds that. tied: names of tables, which are treated elsewhere."""

    model: nn.Module
    asked: Callable[[str], bool]
    observed: Callable[[str], bool]
    convolutions: bool
    tied: set[str]
    ignored: Ignored
    experts: bool = False

    @cached_property
    def _shared(self) -> set[int]:
        return shared_parameters(self.model)

    @cached_property
    def _gates(self) -> set[nn.Module]:
        return set(gates(self.model).values())

    @cached_property
    def _head(self) -> nn.Module | None:
        return output_head(self.model)

    def layers_of(self, block: nn.Module, block_name: str) -> tuple[Layer, ...]:
        """The layers of a block that nothing speaks against; the others are entered into `ignored`.

        Raises InputError for a layer that a pass wants and cannot treat.
        """
        layers = []
        for layer in layers_of(block, block_name, self.convolutions, self.experts):
            if layer.name in self.tied or self.ignored.asked_for(layer.name):
                continue
            if id(layer.module._parameters.get(layer.key)) in self._shared:
                self.ignored.reasons[layer.name] = "shares its weight with another module"
            elif layer.module in self._gates:
                self.ignored.reasons[layer.name] = GATE
            elif layer.module is not self._head and self._may_be_treated(layer):
                layers.append(layer)
        return tuple(layers)

    def _may_be_treated(self, layer: Layer) -> bool:
        if is_read_uncalled(layer.module) and self.observed(layer.name):
            self.ignored.reasons[layer.name] = f"its MultiheadAttention never calls the layer: {ADVICE}"
            return False
        if not self.asked(layer.name):
            self.ignored.reasons[layer.name] = "no pass asks for it"
        elif problem := obstacle(layer.module, layer.key):
            raise InputError(f"{layer.name} {problem}; or leave it out, ignore={[layer.name]}")
        return True


def adapter_in(model: nn.Module) -> str | None:
    """The name of the first module of peft's in a model ("": the model itself); None where there is none."""
    return next((n for n, m in model.named_modules() if type(m).__module__.split(".")[0] == "peft"), None)


def check_filters(model: nn.Module, passes: Sequence[Pass]) -> None:
    """Raises InputError for patterns of passes, as a recipe has them, that stand still at a name of the model."""
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))]
    check_quick([pattern for p in passes for each in p.where for pattern in each.patterns], names)


def check_untouched(model: nn.Module) -> None:
    """Raises InputError for a model that rounds already, by an earlier run or for training, or that carries adapters,
    which would be rounded as if they were its weights."""
    if (name := adapter_in(model)) is not None:
        raise InputError(
            f"{name or 'the model'} is an adapter of peft, which would be compressed beside the weight that it adds "
            "to; give the model after merge_and_unload() (the adapter becomes part of its weights) or unload()"
        )
    for name, module in model.named_modules():
        if isinstance(module, Quantizing):
            raise InputError(
                f"{name or 'the model'} rounds for training already (prepare_qat); train and convert() what was "
                "prepared, or load the model again"
            )
        if cache_hook(module) is not None:
            raise InputError(
                f"{name} rounds its key-value cache already; give all passes to one run on the original model"
            )
        sides = {"input": module._forward_pre_hooks, "output": module._forward_hooks}
        for side, hooks in sides.items():
            if any(isinstance(hook, RoundInput | RoundOutput) for hook in hooks.values()):
                raise InputError(
                    f"{name} rounds its {side} already, from an earlier run on this model; give all passes to one "
                    "run, or load the model again"
                )


def tied_head(model: nn.Module) -> nn.Parameter | None:
    """The weight of the output head, where the embedding has the same."""
    head = output_head(model)
    weight = None if head is None else head._parameters.get("weight")
    return weight if weight is not None and id(weight) in shared_parameters(model) else None


def remarks_on_patterns(
    model: nn.Module, passes: Sequence[Pass], layers: Sequence[Layer], ignored: Ignored, convolutions: bool
) -> list[str]:
    """Notes about patterns of `ignore` and `but` that only name what no pass would treat. Raises InputError for a
    pattern that names nothing, and for one of `only` that names nothing that its pass could treat."""
    known = [*(layer.name for layer in layers), *ignored.reasons]
    example = next(iter(known), "")
    others = {**{name: type(m).__name__ for name, m in parts_of(model)}, **untreated_weights(model, (), convolutions)}
    notes = []
    for pattern in ignored.patterns:
        if pattern not in ignored.matched:
            name = _other(f"ignore pattern {pattern!r}", pattern, others, example)
            notes.append(f"ignore {pattern!r} changes nothing: no pass treats {name} ({others[name]})")
    for p in passes:
        tables = [table.name for table in token_tables(model)] if p.treats == "embeddings" else None
        names, shown = (known, example) if tables is None else (tables, tables[0])
        for each in p.where:
            for pattern in each.patterns:
                if any(matches(name, pattern) for name in names):
                    continue
                spared = others if each.kind == "but" and tables is None else {}
                name = _other(f"pattern {pattern!r} of `{each.kind}` (pass {p.name!r})", pattern, spared, shown)
                notes.append(f"{p.name}: but {pattern!r} changes nothing: it does not treat {name} ({others[name]})")
    return notes


def _other(what: str, pattern: str, others: Mapping[str, str], example: str) -> str:
    """The first of some names that a pattern matches. Raises InputError where it matches none."""
    found = next((name for name in others if matches(name, pattern)), None)
    if found is None:
        raise InputError(f"{what} matches no layer; a layer is called {example!r}; {FORMS}")
    return found


def parts_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(Name, module) of all modules that hold parameters, and no other modules."""
    for name, module in model.named_modules():
        if module._parameters and next(module.children(), None) is None:
            yield name, module
