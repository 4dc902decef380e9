"""The token embedding and the output head, for which no data is needed."""

from compress.base.errors import CompressError
from compress.checkpoint.write.record import Finished
from compress.engine.layer_versions import Versions
from compress.engine.walk.decide import decide
from compress.engine.walk.remarks import layer_record
from compress.engine.walk.state import Run
from compress.model.layers import Table
from compress.model.open_block import Opened
from compress.passes.protocol.base import Pass
from compress.train.rounding.latents import places_of


def round_tables(run: Run) -> None:
    """Round the tables of a plan: before the blocks run, so that they are calibrated on what they will be given."""
    plan, p = run.plan, run.plan.embeddings
    if p is None:
        return
    # The blocks' calibration reads it again, so the edits have to stay.
    keep = run.residency.keep or plan.calibrated
    with run.residency.open(run.model, plan.blocks - {run.model}, keep) as opened:
        for table in plan.tables:
            _round_table(run, p, table, opened.inside(table.module))
    run.record.changed += [table.name for table in plan.tables]


def _round_table(run: Run, p: Pass, table: Table, opened: Opened) -> None:
    """One table, by what an earlier run or training has decided about it, or else by what the pass does."""
    finished, trained = run.sink.finished(table.name), run.plan.trained.get(table.name)
    if finished is not None:
        Versions().install(table, finished.decided[table.name])
    else:
        decision = trained or decide(p, [table], opened, run.comm)[table.name]
        if decision.scheme(table=True).codes is None:
            raise CompressError(
                f"{p.name} decides something else than codes for {table.name}; a token embedding is looked up in codes"
            )
        if run.places is not None:
            places = places_of(decision, table.weight)
            run.places.update({} if places is None else {table.name: places.cpu()})
        Versions().install(table, decision)
        described = layer_record(table, decision, None if trained else p)
        if table.shared:
            described.figures["shared_with"] = ", ".join(table.shared)
        finished = Finished({table.name: decision}, [described], {})
        run.sink.write(table.name, opened, {table.name: table}, finished)
    run.record.take(finished)
    run.steps.finish(table.name, usual=False)  # tables take less time than blocks
