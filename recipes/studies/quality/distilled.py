"""Students with half the layers of their teacher, or a narrower hidden state: as they are cut, trained without it, and
trained on it.

    python recipes/studies/quality/distilled.py --llama MODEL --calibration TOKENS --text TOKENS --encoder MODEL \
        --pairs FOLDER --json OUT.json

A decoder is measured by perplexity and divergence from the teacher on held-out windows; `--cut` names what it loses.
An encoder (which predicts no token that it could learn from alone) is trained on the sentences of FOLDER/dev.jsonl, and
measured on pairs of FOLDER/test.jsonl: Spearman's correlation with people's scores, and the cosine to the teacher's
embeddings.

DistilBERT (Sanh et al. 2019, arXiv 1910.01108) has 40 % fewer parameters than BERT and 97 % of its quality (GLUE).
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoTokenizer

import compress
from compress.evaluation.quality.encoders import evaluate_encoder
from compress.passes.protocol.base import Pass
from compress.passes.train import Train
from compress.recipes.studies.figures import asked, made_by

DISTILBERT = {"parameters": 0.6, "quality": 0.97}
DECODER: dict[str, Any] = {"steps": 60, "rows": 8, "learning_rate": 1e-3, "held_out": 0.0}
ENCODER: dict[str, Any] = {"steps": 60, "rows": 16, "learning_rate": 3e-4, "held_out": 0.0}
INSIDE: dict[str, Any] = {"logits": 0.0, "features": 1.0, "relations": 0.1, "contrastive": 0.1}
TOKENS = 32  # of a sentence, at most
# Of the channels of ts-llama's hidden state: as many parameters go as with half its layers.
NARROWER = 7 / 16


@dataclass(frozen=True)
class Student:
    """Figures of one. parameters: as a share of the teacher's. quality: perplexity of a decoder, Spearman's correlation
    of an encoder; teacher: its teacher's. like: divergence from the teacher of a decoder, cosine to it of an encoder.
    """

    title: str
    parameters: float
    quality: float
    teacher: float
    like: float


def size(model: nn.Module) -> int:
    """The number of parameters; shared ones are counted once."""
    return sum(p.numel() for p in model.parameters())


def made(folder: str, passes: Sequence[Pass], data: Any) -> nn.Module:
    """A student in memory."""
    found = compress.quantize(folder, list(passes), calibration=data, batch_size=16).model
    assert found is not None
    return found


def half_of(folder: str) -> Pass:
    """The pass that removes half of a model's layers: those that change their input least."""
    return compress.Structure(layers=AutoConfig.from_pretrained(folder).num_hidden_layers // 2)


def narrower(folder: str) -> Pass:
    """The pass that removes channels of the hidden state from all layers: those that norms return least of."""
    return compress.Structure(hidden=NARROWER)


# Parts to cut from a decoder: the kind of their rows, and the pass.
CUTS: dict[str, tuple[str, Callable[[str], Pass]]] = {
    "layers": ("decoder", half_of),
    "hidden": ("narrow decoder", narrower),
}


def decoders(folder: str, calibration: Tensor, text: Tensor, cut: Pass) -> list[Student]:
    """Rows of a decoder with a part cut: untrained, trained on the next token alone, trained on its teacher alone."""
    teacher = compress.load(folder)
    ways: dict[str, list[Pass]] = {
        "cut": [cut],
        "trained alone": [cut, Train(**DECODER, teacher="none", logits=0.0, task=1.0)],
        "taught": [cut, Train(**DECODER)],
    }
    rows = []
    for title, passes in ways.items():
        student = made(folder, passes, calibration)
        found = compress.evaluate(student, reference=teacher, text=text)
        figures = [found.texts[0].figures[name].value for name in ("perplexity", "reference_perplexity", "kl_mean")]
        rows.append(Student(title, size(student) / size(teacher), *figures))
    return rows


def encoders(folder: str, pairs: Path, sentences: int = 800, tested: int = 300) -> list[Student]:
    """Rows of an encoder with half of its layers: untrained, and trained on its teacher's hidden layers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    teacher = AutoModel.from_pretrained(folder).eval()
    training, test = (
        [json.loads(line) for line in (pairs / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()]
        for part in ("dev", "test")
    )
    spoken = [pair[key] for pair in training for key in ("sentence1", "sentence2")][:sentences]
    how = {"padding": "max_length", "truncation": True, "max_length": TOKENS, "return_tensors": "pt"}
    data = [dict(tokenizer(spoken[i : i + 16], **how)) for i in range(0, len(spoken), 16)]
    half = half_of(folder)
    ways: dict[str, list[Pass]] = {"cut": [half], "taught": [half, Train(**ENCODER, **INSIDE)]}
    rows = []
    for title, passes in ways.items():
        student = made(folder, passes, data)
        found = evaluate_encoder(student, test[:tested], reference=teacher, tokenizer=tokenizer)
        (measured,) = found.embeddings
        figures = [measured.figures[name].value for name in ("spearman", "reference_spearman", "cosine_mean")]
        rows.append(Student(title, size(student) / size(teacher), *figures))
    return rows


def said(rows: Sequence[Student]) -> None:
    """A line for each."""
    for row in rows:
        print(
            f"| {row.title} | {1 - row.parameters:.0%} | {row.quality:.4f} | {row.teacher:.4f} | {row.like:.4f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--llama", "--calibration", "--text", "--encoder", "--pairs"):
        parser.add_argument(name, help="rows of what is left out stay as the file has them")
    parser.add_argument("--cut", nargs="+", choices=tuple(CUTS), default=[*CUTS], help="of the decoder")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    target: Path = arguments.json
    kinds = json.loads(target.read_text(encoding="utf-8"))["kinds"] if target.exists() else {}
    made: dict[str, Any] = {"command": asked(__file__), **made_by()}
    if arguments.llama is not None:
        calibration, text = (torch.load(p, weights_only=True) for p in (arguments.calibration, arguments.text))
        for cut in arguments.cut:
            kind, of = CUTS[cut]
            rows = decoders(arguments.llama, calibration, text, of(arguments.llama))
            said(rows)
            kinds[kind] = {**made, "training": DECODER, "rows": [asdict(row) for row in rows]}
    if arguments.encoder is not None:
        rows = encoders(arguments.encoder, Path(arguments.pairs))
        said(rows)
        kinds["encoder"] = {**made, "training": {**ENCODER, **INSIDE}, "rows": [asdict(row) for row in rows]}
    target.write_text(json.dumps({"distilbert": DISTILBERT, "kinds": kinds}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
