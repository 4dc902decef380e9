"""Plan of a run: the passes of each layer, found and checked before any weight is touched."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from torch import nn

from compress.base.errors import InputError
from compress.checkpoint.read.unplaced_tensors import KeptTensor, matrices
from compress.checkpoint.write.coverage import Coverage, run_coverage
from compress.engine.plan.treatable_layers import Ignored, Matching, check_filters, check_untouched, remarks_on_patterns
from compress.model.attention import attentions, head_sizes
from compress.model.layers import (
    Layer,
    Stack,
    Table,
    check_tensors,
    find_stacks,
    lies_in,
    obstacle,
    token_tables,
    treats_convolutions,
    whole_model,
)
from compress.model.untreated_layers import untreated_weights
from compress.passes.protocol.base import Pass
from compress.passes.protocol.stages import (
    Decide,
    Fix,
    Gradients,
    Learn,
    Reorder,
    Restructure,
    Rewrite,
)
from compress.weights.decision import Decision
from compress.weights.kv_cache_codes import CacheScheme, group_in
from compress.weights.masks import Earlier


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The work of a run, checked before any weight is touched: stacks, layers by block, and the passes that treat them.

    passes: those that treat layers inside the blocks, in their order. embeddings: the pass that treats `tables`. kv:
    the one that treats key-value caches. recipe: all passes as given, with options settled that they left open.
    notes: remarks for the user about that. convolutions, experts: whether they are layers. earlier: the pruning that
    the model comes with. beside: tensors of its checkpoint that it has no place for, which are kept. trained: what a
    training has made of layers and tables; `passes` come after it. A plan without anything to decide is of a recipe
    that edits the whole model and does no more: the model is written as it is.
    """

    stacks: tuple[Stack, ...]
    layers: Mapping[str, tuple[Layer, ...]]
    passes: tuple[Pass, ...] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)
    convolutions: bool = False
    experts: bool = False
    embeddings: Pass | None = None
    tables: tuple[Table, ...] = ()
    kv: Pass | None = None
    recipe: tuple[Pass, ...] = ()
    notes: tuple[str, ...] = ()
    earlier: Earlier = field(default_factory=Earlier)
    beside: Mapping[str, KeptTensor] = field(default_factory=dict)
    trained: Mapping[str, Decision] = field(default_factory=dict)

    @property
    def calibrated(self) -> bool:
        return self.needing is not None

    @property
    def decides(self) -> bool:
        """True if anything is decided about layers, tables or caches."""
        return bool(self.passes or self.trained or self.tables) or self.kv is not None

    @property
    def only_trains(self) -> bool:
        """True where nothing is to be rounded or pruned."""
        return self.decides and all(trains_dense(p) for p in self.passes) and not self.tables and self.kv is None

    @property
    def cache_scheme(self) -> CacheScheme | None:
        """The scheme of key-value caches; None where they stay as they are."""
        return None if self.kv is None else self.kv.cache_scheme

    @cached_property
    def needing(self) -> Pass | None:
        """The first pass that needs calibration data."""
        everyone = (*self.passes, *([] if self.kv is None else [self.kv]))
        return next((p for p in everyone if p.calibrated), None)

    @cached_property
    def compares(self) -> bool:
        """True if hidden states of the original model flow beside those of the compressed one."""
        return _compares(self.passes)

    @property
    def blocks(self) -> set[nn.Module]:
        """The blocks of all stacks; modules outside them belong to the root."""
        return {block for stack in self.stacks for _, block in stack.blocks}

    @cached_property
    def all_layers(self) -> list[Layer]:
        """The layers of all blocks."""
        return [layer for layers in self.layers.values() for layer in layers]

    @cached_property
    def treated_layers(self) -> list[Layer]:
        """The layers that a pass is about, or that were trained."""
        return [n for n in self.all_layers if n.name in self.trained or any(p.wants(n.name) for p in self.passes)]

    @cached_property
    def treated(self) -> set[str]:
        return {layer.name for layer in self.treated_layers}

    def left_alone(self, model: nn.Module) -> dict[str, str]:
        """{name: reason} of the weights that no pass treats."""
        tables = {name for table in self.tables for name in (table.name, *table.shared)}
        treated = self.treated
        experts = {*treated, *self.ignored} if self.experts else None
        found = {
            **untreated_weights(model, treated, self.convolutions, experts),
            **self.ignored,
            **matrices(self.beside),
        }
        return {name: why for name, why in found.items() if name not in tables}

    @property
    def halved(self) -> frozenset[str]:
        """Layers that a pass prunes, to be stored without their zeros."""
        storing = [p for p in self.passes if p.halves]
        return frozenset(n.name for n in self.all_layers if any(p.wants(n.name) for p in storing))


def plan(
    model: nn.Module,
    passes: Sequence[Pass],
    ignore: Sequence[str] = (),
    one_block: bool = False,
    convolutions: bool | None = None,
    valued: bool = True,
    experts: bool = False,
) -> Plan:
    """Match passes with layers. Raises InputError for an impossible order, shape, or a pattern that matches nothing.

    one_block: the model as a whole. Calibrated passes see a model of several stacks (an encoder and a decoder) so where
    they look at more than a block, or where linear layers lie between the stacks, as those that project images.
    convolutions: whether they are layers; None: in models without a stack of linear layers (`architecture`). valued:
    whether tensors have values, which are then checked. experts: whether each of fused ones is a layer.
    """
    check_filters(model, passes)
    if valued:
        check_tensors(model)
        check_untouched(model)
    structural, passes = restructuring_of(passes)
    kv = _cache_pass(model, passes)
    if convolutions is None:
        convolutions = treats_convolutions(model)
    stacks = [whole_model(model)] if one_block else _stacks(model, passes, convolutions)
    if not passes:
        nothing: dict[str, tuple[Layer, ...]] = {name: () for stack in stacks for name, _ in stack.blocks}
        return Plan(stacks=tuple(stacks), layers=nothing, recipe=structural, convolutions=convolutions, experts=experts)
    ignored = Ignored(ignore)
    blocks = tuple(f"{name}." for stack in stacks for name, _ in stack.blocks if name)
    tables = _tables(model, [p for p in passes if p.treats == "embeddings"], ignored, blocks)
    tied = {name for table in tables for name in (table.name, *table.shared)}

    def asked(name: str) -> bool:
        return any(p.treats == "layers" and p.wants(name) for p in passes)

    def observed(name: str) -> bool:
        return any((p.calibrated or p.rounds_inputs) and p.wants(name) for p in passes)

    matching = Matching(model, asked, observed, convolutions, tied, ignored, experts)
    layers = {name: matching.layers_of(block, name) for stack in stacks for name, block in stack.blocks}
    everything = [layer for of_block in layers.values() for layer in of_block]
    notes = remarks_on_patterns(model, passes, everything, ignored, convolutions)
    treated = {"layers": everything, "embeddings": tables, "caches": ()}
    recipe = tuple(_fit(p, treated[p.treats], notes) for p in passes)
    result = Plan(
        stacks=tuple(stacks),
        layers=layers,
        passes=tuple(p for p in recipe if p.treats == "layers"),
        embeddings=next((p for p in recipe if p.treats == "embeddings"), None),
        tables=tables,
        kv=kv,
        recipe=(*structural, *recipe),
        ignored=ignored.reasons,
        notes=tuple(notes),
        convolutions=convolutions,
        experts=experts,
    )
    _check(result)
    return result


def _stacks(model: nn.Module, passes: Sequence[Pass], convolutions: bool) -> list[Stack]:
    """The stacks of a model as these passes see them."""
    stacks = find_stacks(model, convolutions)
    if len(stacks) == 1 or not any(p.calibrated for p in passes):
        return stacks
    beyond = any(stage.beyond_block for p in passes for stage in p.stages)
    rounded_before = _compares(passes) and any(p.treats == "embeddings" for p in passes)
    return stacks if lies_in(model, stacks) and not beyond and not rounded_before else [whole_model(model)]


def _compares(passes: Sequence[Pass]) -> bool:
    return any(stage.compares for p in passes for stage in p.stages)


def restructuring_of(passes: Sequence[Pass]) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
    """(The passes that edit the whole model; the others.) Raises InputError where these are not the first of them, or
    for some layers only, and for a second one that removes shares."""
    pass_stages = [(p, stage) for p in passes if (stage := p.stage(Restructure)) is not None]
    structural = tuple(p for p, _ in pass_stages)
    rest = tuple(p for p in passes if p not in structural)
    removing = [p.name for p, stage in pass_stages if stage.shares]
    if len(removing) > 1:
        raise InputError(f"one {removing[0]} pass removes heads, channels and layers together; give one")
    for p in structural:
        p.check({})
    for before, p in pairwise(passes):
        if p in structural and before not in structural:
            raise InputError(
                f"{p.name} changes the shapes of the layers that other passes decide about; put it first"
                if p.removes
                else f"{p.name} changes the weights that other passes decide about; put it first"
            )
    for p, stage in pass_stages:
        if p.where:
            why = "takes as much from every block, which is all that a configuration can say"
            raise InputError(f"{p.name} {why if stage.shares else 'edits the whole model'}; leave `only` and `but` out")
    return structural, rest


def _fit(p: Pass, everything: Sequence[Layer], notes: list[str]) -> Pass:
    """The pass with one group size for those of the layers that are its, where it left that open. Where no size suits
    them all it stays open, and each layer has its own (`Pass.fitted`). A size that is not the usual one is entered into
    `notes`."""
    p = p.placed([layer.name for layer in everything])
    layers = [layer for layer in everything if p.wants(layer.name)]
    widths = {layer.shape[1] for layer in layers}
    found, usual = p.fitted(widths) if widths else p, p.usual_size
    odd = next((layer for layer in layers if usual is not None and layer.shape[1] % usual), None)
    if usual is None or odd is None:
        return found
    example = f"{odd.name} has {odd.shape[1]} inputs"
    sized, note = p.sized(widths, example)
    notes += [] if note is None else [note]
    return sized


def _cache_pass(model: nn.Module, passes: Sequence[Pass]) -> Pass | None:
    """The pass for key-value caches. Raises InputError where there is none to round, or it is not the last pass."""
    cache_passes = [p for p in passes if p.treats == "caches"]
    if not cache_passes:
        return None
    if len(cache_passes) > 1 or cache_passes[0].where:
        raise InputError("one kv-cache pass rounds the caches of all attentions; give one, without `only` or `but`")
    if passes[-1] is not cache_passes[0]:
        raise InputError("kv-cache rounds what the compressed layers compute; put it last")
    generates = getattr(model, "can_generate", None)
    if generates is None or not generates() or getattr(model.config, "is_encoder_decoder", False):
        raise InputError(
            f"{type(model).__name__} has no key-value cache that kv-cache could round; it is for decoders that generate"
        )
    if not attentions(model):
        raise InputError(f"no attention of {type(model).__name__} takes a cache; kv-cache has nothing to round")
    scheme = cache_passes[0].cache_scheme
    if scheme is not None and scheme.group is not None:
        for size in head_sizes(model):
            group_in(size, scheme.group)
    return cache_passes[0]


def _tables(model: nn.Module, passes: Sequence[Pass], ignored: Ignored, blocks: tuple[str, ...]) -> tuple[Table, ...]:
    """The tables that the pass about embeddings treats; enters the others into `ignored`. blocks: prefixes of names
    inside blocks.

    A tied head goes with its embedding, by whose name it is asked for; ignoring either leaves both alone.
    """
    if not passes:
        return ()
    if len(passes) > 1:
        raise InputError(f"{len(passes)} passes are about the embeddings; give one")
    (p,) = passes
    tables = token_tables(model)
    if not tables:
        raise InputError(f"{type(model).__name__} has no token embedding; leave the embeddings pass out")
    treated_tables = []
    for table in tables:
        if ignored.asked_for(table.name, *table.shared):
            continue
        if (isinstance(table.module, nn.Embedding) or p.treats_heads) and p.wants(table.name):
            treated_tables.append(table)
    if not treated_tables:
        raise InputError(f"pass {p.name!r} is left without a table; the embedding is called {tables[0].name!r}")
    for table in treated_tables:
        if problem := obstacle(table.module):
            raise InputError(f"{table.name} {problem}; or leave the embeddings pass out")
        if inside := next((other for other in table.shared if other.startswith(blocks)), None):
            raise InputError(f"{inside}, in a block, has the weight of {table.name}; leave the embeddings pass out")
    p.check({table.name: table.shape for table in treated_tables})
    return tuple(treated_tables)


def _check(plan: Plan) -> None:
    everything = plan.all_layers
    if not everything:
        raise InputError("no layer is left to compress; ignore less")
    quantized_by: dict[str, Pass] = {}
    pruned_by: dict[str, Pass] = {}
    _check_order_of_gradients(plan)
    rounded_by: dict[str, Pass] = {}  # whose decision says how a layer's input or output is rounded
    for p in plan.passes:
        wanted = [layer for layer in everything if p.wants(layer.name)]
        if not wanted:
            named = f"pass {p.name!r}"
            if p.where:
                named += f" ({p.where[-1]})"
            raise InputError(f"{named} matches no layer; a layer is called {everything[0].name!r}")
        p.check({layer.name: layer.shape for layer in wanted})
        _check_grouped(p, wanted)
        _check_called(p, wanted)
        decides, rounds = p.stage(Decide) and not p.stage(Learn), p.rounds_inputs or p.stage(Fix)
        for layer in wanted:
            earlier = quantized_by.get(layer.name)
            if earlier is not None and p.reads == "dense weight":
                names = [q.name for q in (p, earlier)]
                advice = "give them different layers (`only`, `but`)"
                if p.writes != "quantized weight":
                    advice = f"put {names[0]!r} first or {advice}"
                raise InputError(
                    f"{names[0]!r} needs the dense weight of {layer.name}, which {names[1]!r} has "
                    f"quantized before it; {advice}"
                )
            pruning = pruned_by.get(layer.name)
            if pruning is not None and not p.keeps_zeros:
                first = "" if p.name == pruning.name else f"put {p.name!r} first or "
                raise InputError(
                    f"{p.name!r} does not keep the zeros of {layer.name}, which {pruning.name!r} has pruned before it; "
                    f"{first}give them different layers (`only`, `but`)"
                )
            rounding = rounded_by.get(layer.name)
            if rounding is not None and decides:
                raise InputError(
                    f"{rounding.name!r} rounds the input or output of {layer.name}, about which {p.name!r} decides "
                    "after it; leave that to the last pass on a layer"
                )
            if rounds:
                rounded_by[layer.name] = p
            if p.writes == "mask":
                pruned_by[layer.name] = p
            if p.writes == "quantized weight":
                quantized_by[layer.name] = p


def _check_order_of_gradients(plan: Plan) -> None:
    """Refuse a pass that has seen gradients in their places behind one that moves weights."""
    moving: Pass | None = None
    scaling: Pass | None = None
    for p in plan.passes:
        if scaling is not None and p.asks_curvature:
            raise InputError(
                f"{scaling.name!r} changes channels whose gradients {p.name!r} has seen before; leave it or "
                "objective=loss out"
            )
        if moving is not None and p.stage(Gradients):
            raise InputError(
                f"{moving.name!r} permutes weights whose gradients {p.name!r} sees in their places before; put "
                f"{p.name!r} first, or leave permute out"
            )
        moving = p if p.stage(Reorder) else moving
        scaling = p if p.stage(Reorder) or p.stage(Rewrite) else scaling


def _check_called(p: Pass, layers: Sequence[Layer]) -> None:
    """Refuse layers that no module is, for a pass that makes of them what only a module can become."""
    needs_module = p.rounds_inputs or any(stage.of_calls for stage in p.stages)
    layer = next((layer for layer in layers if not layer.is_called), None)
    if needs_module and layer is not None:
        raise InputError(
            f"{p.name} rounds inputs or outputs, or trains, which it can where a module's call is the product; "
            f"{layer.name} is multiplied inside a {type(layer.module).__name__}: give it weights only (`but`, "
            "ignore), or leave experts out"
        )


def _check_grouped(p: Pass, layers: Sequence[Layer]) -> None:
    """Refuse a grouped convolution, whose groups are decided about one by one, where they would have to share."""
    per_tensor = p.shares_scale and set(p.needs()) - {"range"}
    for layer in layers:
        groups = 1 if layer.geometry is None else layer.geometry.groups
        if groups > 1 and not p.by_rows:
            raise InputError(
                f"{p.name} decides about a layer as a whole, and {layer.name} is a convolution of {groups} groups; "
                "ignore it or use another method for it"
            )
        if groups > 1 and per_tensor:
            raise InputError(
                f"{p.name} decides about the {groups} groups of {layer.name} one by one, so "
                "they cannot share the one scale of per_tensor; leave it out, ignore the layer or use rtn"
            )


def planned_coverage(model: nn.Module, plan: Plan, stored: bool, halved: Collection[str]) -> Coverage:
    """The coverage that a plan will achieve. stored: compressed layers need a format. halved: names of layers stored as
    2:4, a format for dense ones, too."""
    treated, layers = plan.treated, plan.treated_layers
    quantized = {n.name for n in layers for p in plan.passes if p.writes == "quantized weight" and p.wants(n.name)}
    formed = quantized.union(halved)
    dense = {layer.name for layer in layers if stored and (not layer.has_format or layer.name not in formed)}
    reasons = plan.left_alone(model)
    trained = {name for name in treated if all(trains_dense(p) for p in plan.passes if p.wants(name))}
    return run_coverage(model, [*treated, *(table.name for table in plan.tables)], dense, reasons, trained, plan.beside)


def trains_dense(p: Pass) -> bool:
    """True for a pass that trains what it finds and prunes nothing."""
    learn = p.stage(Learn)
    return learn is not None and not learn.sparsity.prunes
