"""Bytes that a run saves: its first line, and its end where it saves next to nothing.

Runs that store weights smaller are held to `LEAST`. Others are not: masks are stored with their zeros, caches and
prepared layers take what they took, and `compress prune --structure` removes the amount that its user names.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from compress.base.errors import InputError
from compress.cli.exit_codes import fail, leave
from compress.cli.options import given

if TYPE_CHECKING:
    from compress.checkpoint.byte_savings import Saving
    from compress.checkpoint.export.write import Exported
    from compress.checkpoint.write.record import RunRecord
    from compress.passes.protocol.base import Pass

LEAST = 0.05  # of the bytes before
MOST = 0.5  # of the parameters
LARGE = 0.2  # of the bytes after
MIB = 2**20
EMBEDDINGS = "--embeddings w8a16 rounds the token embedding and the output head"
ELSEWHERE = "`compress prune --structure` or `compress distill` makes a smaller model of it"
# What a person can do about parameters that stay as large as they were, by how the reason begins (`Coverage.rest`).
WAYS = {
    "embedding": EMBEDDINGS,
    "output head": EMBEDDINGS,
    "ignored": "--ignore names less",
    "no pass asks for it": "a pass of the recipe takes them (`only`, `but`)",
    "outside the blocks": "--one-block takes in what lies outside the blocks",
    "never called": "--calibration shows data that calls every layer",
    "fused experts": "transformers does not mark how their class holds them",
    "convolution": "no format holds a convolution as codes",
    "Conv": "no format holds a convolution as codes",
    "pruned, stored dense": "--store 2:4 leaves out the zeros of layers that are pruned to 2:4",
}
ZEROS = (
    "a zero takes the space of another number. --store 2:4 or `compress export --to sparse24` leaves out the zeros of "
    "2:4 layers, and a recipe like w4a16-24 rounds what is not zero"
)
CODES = "fewer bits (--bits) or more inputs to a scale (--group-size) make smaller codes"


def promises(task: str, passes: Sequence["Pass"], store: str | None) -> bool:
    """True for a run that is to store a model smaller. task: of `run`."""
    if store is not None or any(getattr(p, "store", "") for p in passes):
        return True
    smaller = any(p.writes == "quantized weight" or p.treats == "embeddings" or p.removes for p in passes)
    return smaller and task != "prune"


def check_allowed(promised: bool, who: str) -> None:
    """Refuse --allow-little of a run that is not held to a saving."""
    if given("allow_little") and not promised:
        raise InputError(f"{who} stores no weights smaller, and is not refused for that; drop --allow-little")


def headline(record: "RunRecord", model: str, output: str) -> str:
    """The bytes of a model before and after, in a line."""
    saving = record.saving
    assert saving is not None
    unchanged = saving.after == saving.before
    return f"{model} -> {output}: {change(saving)}{as_before(record) if unchanged else ''}"


def change(saving: "Saving") -> str:
    """Two sizes, and how the second differs from the first."""
    before, after = (f"{count / MIB:.2f}" for count in (saving.before, saving.after))
    if saving.after == saving.before:
        return f"{before} MiB of weights, as before"
    size = "smaller" if saving.share > 0 else "larger"
    return f"{before} -> {after} MiB of weights, {abs(saving.share):.{digits(saving.share)}%} {size}"


def embedding_line(tables: int, after: int, engine: str | None) -> Iterator[str]:
    """A line about an embedding and head that stay as they were and are much of the result, with the option that
    shrinks them, if the engine reads what it writes. tables, after: bytes of these and of the result."""
    from compress.jobs.target_engines import engine_named

    if tables < LARGE * after:
        return
    shrunk = engine is None or engine_named(engine).tables
    way = "--embeddings w8a16 rounds it to 8 bits" if shrunk else f"{engine} reads no smaller one"
    yield f"embedding as it was: {tables / MIB:,.2f} of {after / MIB:,.2f} MiB ({tables / after:.0%}); {way}"


def as_before(record: "RunRecord") -> str:
    """The reason why a run that promises no smaller model has changed no size."""
    if any("sparsity" in layer.figures for layer in record.layers):
        return f": {ZEROS}"
    return ": a smaller cache is made at run time" if record.caches and not record.layers else ""


def digits(share: float) -> int:
    """Digits of a share in percent: one more where it is small."""
    return 0 if abs(share) >= 0.1 else 1


def end(record: "RunRecord", output: str, *, promised: bool, allowed: bool, first: bool = True) -> None:
    """Leave with 1 where a run that promised a saving has saved less than `LEAST`, which is not allowed. first: whether
    this is the process that says so."""
    saving = record.saving
    assert saving is not None
    if not promised or allowed or saving.share >= LEAST:
        return
    if not first:
        leave(1)
    too_little(saving, output, why(record))


def end_of_export(exported: "Exported", kind: str, output: str) -> None:
    """Leave with 1 where an export that is to save bytes has saved less than `LEAST`. kind: of the exporter."""
    from compress.checkpoint.byte_savings import Saving

    saving = Saving(exported.bytes_before, exported.bytes)
    if saving.share < LEAST:
        too_little(saving, output, f"{exported.layers} layers are {kind}, and the others are stored as they were")


def too_little(saving: "Saving", output: str, reason: str) -> None:
    """Say how little was saved, and leave with 1."""
    fail(
        f"{output} saves {max(0.0, saving.share):.1%} of the model's bytes, less than {LEAST:.0%}: {reason}. It is "
        "complete and kept; --allow-little ends such a run with exit code 0",
        1,
    )


def why(record: "RunRecord") -> str:
    """The reasons why a run saved little, and the ways out."""
    from compress.checkpoint.write.record import ROUNDED

    covered = record.coverage
    if any(ROUNDED in note for note in record.notes):
        return "the model came in codes already, and these take as many bytes or more"
    if covered is None or (record.structure is not None and not covered.compressed_parameters):
        return "a larger share or more blocks have to go"
    rest = [(reason, count / covered.parameters) for reason, count in covered.rest.items()]
    large = [(reason, share) for reason, share in rest if share >= LEAST]
    stays = ", ".join(f"{reason} ({share:.0%} of the parameters)" for reason, share in large)
    ways = list(dict.fromkeys(ways_out([reason for reason, _ in large])))
    if covered.share >= MOST:
        ways.append(CODES)
    return "; ".join([f"as large as before are {stays}" if stays else "its codes are large", *ways])


def ways_out(reasons: Sequence[str]) -> Iterator[str]:
    """The ways out, for each reason that has one."""
    for reason in reasons:
        yield from [way for start, way in WAYS.items() if reason.startswith(start)][:1]
