"""An evaluation as JSON: `summary` and `gates` on top, then everything that was measured.

`schemas/evaluation.json` describes it; `evaluation_file.read_evaluation` reads it back. Hashes of single tensors are in
the record of the run alone.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from compress.evaluation.document import Evaluation
from compress.evaluation.quality.gates import GateResult
from compress.evaluation.report.runs import ReportedRun
from compress.evaluation.report.verdict import held_out, smaller, verdict


@dataclass(frozen=True)
class Summary:
    """The headline figures, those of text from the first held-out one. None: not measured.

    verdict: in sentences. kl_mean: KL(original || model), nats per token, with its standard error. bytes: of the weight
    files. bits_per_weight: of compressed layers, scales included. percent_smaller: 100 * (1 - bytes / reference_bytes).
    decode_tokens_per_s: of one sequence.
    """

    verdict: str
    kl_mean: float | None
    kl_mean_error: float | None
    perplexity: float | None
    reference_perplexity: float | None
    bytes: int | None
    reference_bytes: int | None
    percent_smaller: float | None
    bits_per_weight: float | None
    decode_tokens_per_s: float | None
    reference_decode_tokens_per_s: float | None


def summarize(evaluation: Evaluation) -> Summary:
    """The summary of an evaluation."""
    text, speed, times = held_out(evaluation), evaluation.speed, smaller(evaluation)
    figures = {} if text is None else text.figures
    kl, perplexity, reference = map(figures.get, ("kl_mean", "perplexity", "reference_perplexity"))
    theirs = None if speed is None else speed.reference
    return Summary(
        verdict(evaluation),
        None if kl is None else kl.value,
        None if kl is None else kl.error,
        None if perplexity is None else perplexity.value,
        None if reference is None else reference.value,
        evaluation.bytes,
        None if evaluation.reference_size is None else evaluation.reference_size.bytes,
        None if times is None else 100 * (1 - 1 / times),
        evaluation.bits_per_weight,
        None if speed is None else speed.model.decode.value,
        None if theirs is None else theirs.decode.value,
    )


def as_document(evaluation: Evaluation, gates: Sequence[GateResult] = ()) -> dict[str, Any]:
    """The content of `--json`."""
    content = asdict(evaluation)
    on_top = {"format": content.pop("format"), "summary": asdict(summarize(evaluation))}
    return {**on_top, "gates": [asdict(gate) for gate in gates], **content}


def documents(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """The runs of a report, each with its evaluation."""
    return [{"name": run.name, "evaluation": as_document(run.evaluation)} for run in runs]
