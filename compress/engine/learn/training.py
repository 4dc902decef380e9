"""Training in the middle of a run: what passes have decided so far is what is trained, and what comes of it is decided.

walk over the blocks with the passes before -> quantizers on the layers -> train -> walk that begins with the outcome
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.base.memory import keeping_freed
from compress.checkpoint.write.writer import InMemory
from compress.engine.learn.on_policy import written_by
from compress.engine.learn.trained_decisions import TrainedCaches, begin, trained_decisions
from compress.engine.plan.existing_zeros import decisions_on_zeros
from compress.engine.residency import widened
from compress.engine.walk.state import Run
from compress.kernels.cpu.processor import cpu_flags
from compress.model.layers import Layer
from compress.passes.protocol.base import Pass
from compress.passes.protocol.stages import Learn
from compress.train.inputs.fsdp_shards import reshard
from compress.train.inputs.teacher_predictions import TopKRows
from compress.train.learning_rate import RangeTest, range_test_once
from compress.train.loop.loop import History, Training, little_gain, train, unchanged, untouched
from compress.train.loop.optimizer import Learned
from compress.train.loop.train_checkpoints import fixed_of
from compress.train.objective.objective import Objective
from compress.train.objective.outputs import eager_attention
from compress.train.options import TrainingOptions
from compress.train.rounding.penalties import Penalties, penalized_weights
from compress.train.rounding.pruning import Prunable, Pruning, last_pruning
from compress.train.rounding.quantizers import ScaledCodes
from compress.train.rounding.sparsity_options import SparsityOptions
from compress.train.rounding.swapped_layers import (
    PARTS,
    parameters_in,
    quantizers_of,
    requiring,
    rounding,
    scales_in,
    weights_outside,
)
from compress.weights.decision import Decision
from compress.weights.formats.dense import dense
from compress.weights.grid import Quantized

CHECKPOINT = "_gradient_checkpointing_func"  # in transformers, of a block
# Instructions of which a CPU needs one: for 16-bit products that are not many times as slow as those of float32 (as
# oneDNN checks), and for faster ones. bf16 is of ARM.
TOLERABLE_BFLOAT16 = frozenset({"avx512bw", "avx_ne_convert", "bf16"})
FAST_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def train_model(run: Run, at: int, before: InMemory, teachers: Mapping[str, nn.Module | TopKRows]) -> Run:
    """The run that is left behind the training at a place among the passes. before: what those before it decided;
    teachers: by their names."""
    p, plan = run.plan.passes[at], run.plan
    learn = learn_stage(p, run.comm, run.residency.device)
    wanted = plan.treated_layers
    mine = [layer for layer in wanted if p.wants(layer.name)]
    undecided = [layer for layer in mine if layer.name not in before.decisions]
    known = {**decisions_on_zeros(plan, run.residency, undecided), **before.decisions}
    start = {**known, **(_all_kept(mine, known) if learn.sparsity.prunes else {})}
    treated = [*wanted, *plan.tables]
    learning = rounding([each for each in treated if p.wants(each.name)], start, learn.options.scales)
    still = rounding([each for each in treated if not p.wants(each.name)], start, "fixed")
    caches = TrainedCaches(run.model, before.caches).rounding()
    with widened(run.residency, run.model), learning as some, still as others, caches:
        begin(run.model, plan, run.residency, start, before.places)
        history, tested = _train(run, p, learn, teachers.get(learn.options.teacher), [*some, *others], mine)
        made = trained_decisions(run.model, plan, run.residency, start)
    rate: dict[str, Any] = {} if tested is None else {"learning_rate": tested.learning_rate}
    rate |= {"steps": history.resumed + len(history.steps)} if learn.options.minutes else {}
    about = {"options": options_record(learn) | rate, "range_test": None if tested is None else asdict(tested)}
    run.record.training.append({**asdict(history), **about})
    left = replace(plan, passes=plan.passes[at + 1 :], trained=made)
    return replace(run, plan=left, earlier=before.blocks, phase="after training, ")


def teachers_of(run: Run) -> dict[str, nn.Module | TopKRows]:
    """{name: teacher} of all trainings of a run: before anything is changed, for the original may be one."""
    found: dict[str, nn.Module | TopKRows] = {}
    for learn in (stage for p in run.plan.passes if (stage := p.stage(Learn)) is not None):
        if learn.options.taught and learn.options.teacher not in found:
            assert run.lessons is not None
            found[learn.options.teacher] = run.lessons.teacher(learn.options.teacher)
    return found


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Makes modules run uncompiled inside the context, without what `Module.compile` made of them."""
    before = [(m, m._compiled_call_impl) for m in model.modules() if m._compiled_call_impl is not None]
    try:
        for m, _ in before:
            m._compiled_call_impl = None
        yield
    finally:
        for m, compiled in before:
            m._compiled_call_impl = compiled


def options_record(learn: Learn) -> dict[str, object]:
    """The options, for the record."""
    of_training = {name: getattr(learn.options, name) for name in TrainingOptions.__dataclass_fields__}
    return of_training | {name: getattr(learn.sparsity, name) for name in SparsityOptions.__dataclass_fields__}


def _all_kept(layers: Sequence[Layer], decisions: Mapping[str, Decision]) -> dict[str, Decision]:
    """Decisions about layers that are to be pruned, with masks of their own: they begin with what earlier passes have
    left, or with everything. Raises InputError for a weight in which there can be no zeros."""
    masked_decisions = {}
    for layer in layers:
        decided = decisions.get(layer.name, Decision(dense(layer.weight)))
        first, *others = decided.weight.terms
        if others or (isinstance(first, Quantized) and first.grid.signs):
            why = "in terms that make no zero together" if others else "as signs, none of which is zero"
            raise InputError(
                f"{layer.name} is stored {why}, and train prunes it; leave sparsity out or the layer (`but`)"
            )
        kept = torch.ones(layer.shape, dtype=torch.bool) if decided.kept is None else decided.kept.clone()
        masked_decisions[layer.name] = replace(decided, kept=kept)
    return masked_decisions


def _train(
    run: Run,
    p: Pass,
    learn: Learn,
    teacher: nn.Module | TopKRows | None,
    layers: Sequence[Layer],
    mine: Sequence[Layer],
) -> tuple[History, RangeTest | None]:
    """Trains; returns the measurements, and the test that chose the rate if nobody gave one. p: the pass, which leaves
    the layers that it does not want as they are; layers: those that round; mine: those that it wants."""
    inside = parameters_in(quantizers_of(layers))
    others = [each for each in run.model.parameters() if id(each) not in inside]  # quantizers know it themselves
    known = [*run.plan.tables, *(layer for block in run.plan.layers.values() for layer in block)]
    left = [layer for layer in known if not p.wants(layer.name)]
    with requiring(others, _trains(learn.options.trains, layers, left)), _mapping(run, learn.options, teacher):
        training = _training(run, learn, teacher, layers, mine)
        with _blocks(run, learn.options), keeping_freed():
            return _train_at_rate(run, learn, training)


def _trains(what: str, layers: Sequence[Layer], left: Sequence[Layer]) -> Callable[[nn.Parameter], bool]:
    """A test of parameters outside quantizers: they learn. what: the option `trains`; layers: those that round; left:
    those that stay as they are."""
    latent = {id(layer.parameter) for layer in layers}
    fixed = {id(layer.parameter) for layer in layers if isinstance(layer.module._modules[PARTS[0]], ScaledCodes)}
    fixed |= {id(layer.parameter) for layer in left}

    def learns(p: nn.Parameter) -> bool:
        if not p.is_floating_point() or id(p) in fixed:
            return False
        return what == "all" or (what == "layers" and id(p) in latent)

    return learns


def _training(
    run: Run, learn: Learn, teacher: nn.Module | TopKRows | None, layers: Sequence[Layer], mine: Sequence[Layer]
) -> Training:
    """Everything that `train` needs. Raises InputError where nothing would learn."""
    lessons, options, quantizers = run.lessons, learn.options, quantizers_of(layers)
    assert lessons is not None
    # First of all: a root of FSDP that has run has its full parameters in the place of the shards that are trained.
    weights = weights_outside(run.model, parameters_in(quantizers))
    rows, micro = lessons.rows.numbered(), min(lessons.micro, -(-options.rows // run.comm.world))
    objective = Objective(options, run.model, teacher)
    seen, _ = rows.split(options.held_out)
    objective.begin(seen)
    reshard(run.model)  # a root that has run would not see what a checkpoint brings
    for note in (*objective.notes, *slow_products(options, run.residency.device)):
        run.record.note(run.reporter, note)
    scales = scales_in(quantizers) | {f"objective.{name}": p for name, p in objective.named_parameters()}
    if not weights and not scales:
        raise InputError(f"trains={options.trains} leaves nothing to train in this model")
    before, after = _thinning(run, learn, mine)
    return Training(
        options=options,
        objective=objective,
        learned=Learned(weights, scales),
        fixed=fixed_of(quantizers),
        rows=rows,
        micro=micro,
        comm=run.comm,
        reporter=run.reporter,
        place=None if lessons.place is None else lessons.place / str(len(run.record.training)),
        resume=lessons.resume,
        before=before,
        after=after,
        written=lambda batch, step: written_by(run.model, batch, options.seed + step, run.comm),
        best_since=_best_since(learn),
    )


def learn_stage(p: Pass, comm: Comm, device: torch.device) -> Learn:
    """The training that a pass asks for, in the precision that is best here where it says auto. A collective."""
    learn = p.stage(Learn)
    assert learn is not None
    options = learn.options
    if options.precision != "auto":
        return learn
    fast = bool(options.minutes) and all(comm.gather_objects(has_fast_bfloat16(device)))
    return replace(learn, options=replace(options, precision="bfloat16" if fast else "full"))


def has_fast_bfloat16(device: torch.device) -> bool:
    """True for a device whose 16-bit products are faster than those of float32."""
    if device.type == "cpu":
        return bool(cpu_flags() & FAST_BFLOAT16)
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def slow_products(options: TrainingOptions, device: torch.device) -> tuple[str, ...]:
    """A note where products of 16 bits are asked for on a processor without instructions for them; empty elsewhere."""
    if options.precision != "bfloat16" or device.type != "cpu" or cpu_flags() & TOLERABLE_BFLOAT16:
        return ()
    return (
        f"precision={options.precision}: this processor has no instructions for it, so that a step takes many times as "
        "long; give precision=full",
    )


def _train_at_rate(run: Run, learn: Learn, this: Training) -> tuple[History, RangeTest | None]:
    """Choose a rate, where nobody gave one, and train."""
    tested = None
    if not this.options.learning_rate and this.learned.weights:
        tested = range_test_once(this)
        run.record.note(run.reporter, str(tested))
        known: dict[str, Any] = {"learning_rate": tested.learning_rate}
        if minutes := this.options.minutes:
            known |= {"minutes": 0.0, "steps": tested.steps_in(minutes)}
            run.record.note(run.reporter, f"steps of training that fit into {60 * minutes:,.0f} s: {known['steps']}")
            this = replace(this, seconds=60 * minutes - tested.seconds)
        this = replace(this, options=replace(this.options, **known))
    history = train(this)
    said = None if learn.sparsity.prunes else little_gain(history, this)
    if said is not None:
        run.record.note(run.reporter, said)
    return history, tested


def _best_since(learn: Learn) -> int | None:
    """The first step whose parameters may be written instead of the last ones; None: none."""
    sparsity = learn.sparsity
    if learn.options.keep == "last" or sparsity.shrinks:
        return None
    return last_pruning(learn.options.steps, sparsity) + 1 if sparsity.prunes else 0


def _thinning(
    run: Run, learn: Learn, layers: Sequence[Layer]
) -> tuple[Callable[[int], Mapping[str, float]], Callable[[float], None]]:
    """Two functions: of a step's number, before it (pruning), and of its rate, after it (penalties). Both hold the
    layers' parameters as they are now, before a root of FSDP has run."""
    sparsity = learn.sparsity
    before: Callable[[int], Mapping[str, float]] = unchanged
    after: Callable[[float], None] = untouched
    if sparsity.prunes:
        masks = {layer.name: layer.module._modules[PARTS[0]] for layer in layers}
        found = {layer.name: Prunable(layer, layer.parameter, masks[layer.name].kept) for layer in layers}  # type: ignore
        before = Pruning(found, learn.options.steps, sparsity, run.comm)
    if sparsity.shrinks:
        shrunk = penalized_weights([layer for layer in layers if layer.parameter.requires_grad], sparsity.lasso_groups)
        after = Penalties(shrunk, sparsity.l1, sparsity.group_lasso, run.comm)
    return before, after


@contextmanager
def _mapping(run: Run, options: TrainingOptions, teacher: nn.Module | TopKRows | None) -> Iterator[None]:
    """Makes models give attention maps inside the context, where these are compared."""
    models = [each for each in (run.model, teacher) if options.attention and isinstance(each, nn.Module)]
    with eager_attention(models) as changed:
        for note in sorted(set(changed)):
            run.record.note(run.reporter, note)
        yield


@contextmanager
def _blocks(run: Run, options: TrainingOptions) -> Iterator[None]:
    """Compiles blocks, and makes them compute activations again, inside the context, where that is asked for."""
    blocks = [block for stack in run.plan.stacks for _, block in stack.blocks]
    model: Any = run.model
    # It has had two names in transformers.
    name = next((n for n in ("activation", "gradient") if hasattr(model, f"{n}_checkpointing_enable")), None)
    if options.compile:
        for block in blocks:
            block.compile()
    on = getattr(model, f"is_{name}_checkpointing", False)
    if options.checkpointing and not on:
        getattr(model, f"{name}_checkpointing_enable")()
    before = [(block, getattr(block, CHECKPOINT, None)) for block in blocks if options.checkpointing]
    for block, _ in before:
        block.training = True
        setattr(block, CHECKPOINT, _again(block))
    try:
        yield
    finally:
        if options.checkpointing and not on:
            getattr(model, f"{name}_checkpointing_disable")()
        for block, own in before:
            block.training = False
            setattr(block, CHECKPOINT, own)
        for block in blocks if options.compile else ():
            block._compiled_call_impl = None


def _again(block: nn.Module) -> Callable[..., Any]:
    """A function that calls a block's forward, and once more in the backward pass, with the flag off by which a block
    drops values out."""

    def undropped(forward: Callable[..., Any], *args: Any) -> Any:
        block.training = False
        try:
            return forward(*args)
        finally:
            block.training = True

    return lambda forward, *args: checkpoint(partial(undropped, forward), *args, use_reentrant=False)
