"""The data of a run: what its model is calibrated on, what it is trained on, and what files hold of its teachers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.base.errors import InputError
from compress.checkpoint.files import checksum, fingerprint
from compress.checkpoint.portable_names import portable
from compress.checkpoint.read.pretrained import generates, main_input, modalities, processor_of, tokenizer_of
from compress.data.documents import TOKEN_FORMATS, read_batches
from compress.data.images import Sample, check_pillow, samples_of
from compress.data.processor_batches import Pictures, process
from compress.data.teacher_file import read_cached
from compress.data.text import batches_of, load_tokens
from compress.data.tokens import Tokens
from compress.engine.learn.on_policy import check_on_policy
from compress.engine.plan.batches import named_batches
from compress.jobs.model_source import FoundModel
from compress.jobs.own_text import OWN, own_tokens
from compress.jobs.request import Calibration, Request
from compress.model.calls import Batch
from compress.passes.protocol.base import Pass
from compress.passes.protocol.stages import Learn
from compress.train.inputs.samples import Rows, rows_of
from compress.train.inputs.teacher_predictions import TopKRows
from compress.train.options import TrainingOptions

WINDOWS = 128  # of calibration text, where nobody says how many
TOKENS = "input_ids"


@dataclass(frozen=True)
class RunData:
    """Data that a model is shown.

    tokens: calibration data, where it is text or token ids. pictures: where it is images.
    batches: calibration data, in micro-batches, of all ranks.
    rows: all samples that the model is trained on, if it is.
    cached: what files hold of teachers, by their names.
    file: the file that the batches are from.
    remarks: on its tokens and those of teachers.
    """

    tokens: Tokens | None
    batches: list[Batch]
    rows: Rows | None = None
    cached: Mapping[str, TopKRows] = field(default_factory=dict)
    pictures: Pictures | None = None
    file: str | None = None
    remarks: Sequence[str] = ()

    @property
    def notes(self) -> Sequence[str]:
        """Remarks on how the calibration data was read."""
        read = [note for data in (self.tokens, self.pictures) if data is not None for note in data.notes]
        return [*read, *self.remarks]

    def described(self) -> dict[str, Any] | None:
        """The entry about the calibration data in the record of a run; None for ready-made batches."""
        if self.file is not None:
            return {"source": portable(self.file), "batches": len(self.batches), "sha256": self.fingerprint()}
        data = self.pictures if self.tokens is None else self.tokens
        return None if data is None else data.described()

    def fingerprint(self) -> str:
        """The fingerprint of the calibration data."""
        if self.tokens is not None:
            return self.tokens.fingerprint()
        named = enumerate(self.batches)
        return fingerprint({str(i): {k: checksum(v) for k, v in b.items() if isinstance(v, Tensor)} for i, b in named})


def read_data(request: Request, found: FoundModel, ranks: int) -> RunData:
    """Data that the passes show a model. Raises InputError for data that is missing, unread, or of another kind than
    the model takes."""
    passes = request.passes
    calibrated = _calibration(request, found)
    learning = training_options(passes)
    rows = training_rows(request, found) if learning else None
    if rows is not None and any(o.on_policy for o in learning):
        check_on_policy(rows, generates(found.source, found.given))
    cached = {} if rows is None else {o.teacher: read_cached(o.teacher, rows, o) for o in learning if o.offline}
    if len(calibrated.batches) < ranks and any(p.calibrated for p in passes):
        raise InputError(
            f"{len(calibrated.batches)} micro-batches for {ranks} ranks; give more samples or a smaller batch size"
        )
    return replace(calibrated, rows=rows, cached=cached)


def training_options(passes: Sequence[Pass]) -> list[TrainingOptions]:
    """The options of passes that train."""
    return [stage.options for p in passes if (stage := p.stage(Learn)) is not None]


def calibration_data(request: Request, found: FoundModel, who: str) -> RunData:
    """Calibration data alone; of text as many windows as is usual, unless told. who: needs it."""
    calibration = request.calibration
    if calibration is None:
        raise InputError(f"{who} needs calibration data; {_what_to_show(found)}")
    rows = isinstance(calibration, Tensor) or str(calibration).endswith(TOKEN_FORMATS)  # all of them, unless told
    samples = WINDOWS if request.samples is None and not rows else request.samples
    return _in_batches(request, found, calibration, samples)


def training_rows(request: Request, found: FoundModel) -> Rows:
    """Samples to train the model on: all training data that was given, or else all calibration data."""
    given = request.calibration if request.training is None else request.training
    if given is None:
        raise InputError(f"train needs data to train on (training, or calibration); {_what_to_show(found)}")
    shown = _in_batches(request, found, given, None)
    if shown.tokens is not None and shown.tokens.start is not None:
        raise InputError(
            "an encoder-decoder is trained on pairs; give batches with input_ids, decoder_input_ids and labels, in "
            "Python or in a .pt file"
        )
    return rows_of(shown.batches)


def _calibration(request: Request, found: FoundModel) -> RunData:
    """Data to calibrate the passes on; empty where no pass is calibrated."""
    needing = next((p for p in request.passes if p.calibrated), None)
    trains = bool(training_options(request.passes))
    if needing is None:
        if trains and request.samples is not None:
            raise InputError("samples are of calibration data, which no pass uses; all that is given is trained on")
        asked = (request.samples, request.length, request.bos)
        if any(each is not None for each in asked) and not trains and request.calibration is None:
            raise InputError("samples, length and bos are of calibration data, which no pass uses; leave them out")
        return RunData(None, [])
    if request.calibration is None and request.training is not None and trains:
        return _first_of_training(request, found, request.training)  # `prepare.remarks` says so
    return calibration_data(request, found, needing.name)


def _first_of_training(request: Request, found: FoundModel, training: Calibration) -> RunData:
    """As many samples of the training data as calibration takes by default, or is told to."""
    samples = WINDOWS if request.samples is None else request.samples
    if isinstance(training, str | Path | Tensor):
        return _in_batches(request, found, training, samples)
    whole = _in_batches(request, found, training, None)
    return RunData(whole.tokens, whole.batches[: -(-samples // request.batch_size)])


def _in_batches(request: Request, found: FoundModel, given: Calibration, samples: int | None) -> RunData:
    """The given data, in micro-batches."""
    if isinstance(given, str) and given == OWN:
        tokens = own_tokens(found, WINDOWS if samples is None else samples, request.length, request.bos)
        return RunData(tokens, tokens.batches(request.batch_size))
    file = str(given) if isinstance(given, str | Path) else None
    if file is not None and (stored := read_batches(file)) is not None:
        return replace(_in_batches(request, found, stored, None), file=file)
    if not isinstance(given, str | Path | Tensor):
        if any(each is not None for each in (request.samples, request.length, request.bos)):
            raise InputError("samples, length and bos do not apply to ready-made batches; leave them out")
        given = given if found.given is None or isinstance(given, Mapping) else named_batches(found.given, given)
        return RunData(None, batches_of(given, request.batch_size, getattr(found.config, "vocab_size", None)))
    if not isinstance(given, Tensor) and _reads_images(found) and (seen := samples_of(str(given))) is not None:
        return _pictures(request, found, str(given), seen, samples)
    if _main_input(found) != TOKENS:
        said = "a tensor" if isinstance(given, Tensor) else repr(str(given))
        raise InputError(f"{said} holds no inputs of this model; {_what_to_show(found)}")
    tokenizer = partial(tokenizer_of, found.source)
    text = given if isinstance(given, Tensor) else str(given)
    words: dict[str, Any] = {"length": request.length, "samples": samples, "bos": request.bos}
    tokens = load_tokens(text, tokenizer, found.config, what="calibration", packing=True, **words)
    if getattr(found.config, "is_encoder_decoder", False):
        tokens = _pair_with_decoder(tokens, found.config)
    return RunData(tokens, tokens.batches(request.batch_size))


def _pair_with_decoder(tokens: Tokens, config: Any) -> Tokens:
    """Tokens for an encoder and for a decoder. Raises InputError for padding, which two masks would have to tell apart,
    and for a configuration without a token to begin with."""
    if tokens.mask is not None:
        raise InputError(
            f"{tokens.source} makes samples with padding; an encoder-decoder is calibrated on samples of one length: "
            "give a text file, or batches with input_ids and decoder_input_ids (Python)"
        )
    words = ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
    held = [getattr(each, word, None) for word in words for each in (config, getattr(config, "decoder", None))]
    start = next((token for token in held if isinstance(token, int)), None)
    if start is None:
        raise InputError(
            "config.json names no token with which the decoder begins (decoder_start_token_id): add it, or give "
            "batches with input_ids and decoder_input_ids (Python)"
        )
    note = "the decoder is calibrated on the encoder's text, a token later; give batches in Python for other pairs"
    return replace(tokens, start=start, notes=(*tokens.notes, note))


def _pictures(request: Request, found: FoundModel, given: str, seen: list[Sample], samples: int | None) -> RunData:
    """Images, and texts with them, as the model's processor makes inputs of them."""
    assert found.source is not None
    check_pillow()
    if (name := next((name for name in ("length", "bos") if getattr(request, name) is not None), None)) is not None:
        raise InputError(f"{name} is of windows of text, and this is images; leave it out")
    if getattr(found.config, "is_encoder_decoder", False):
        raise InputError(
            f"an encoder-decoder is calibrated on pairs; give batches with {_main_input(found)} and decoder_input_ids "
            "(Python)"
        )
    texts = "text" in modalities(found.source)
    processor = processor_of(found.source, texts=texts)
    made = process(seen, processor, given, texts=texts, count=samples, size=request.batch_size)
    return RunData(None, [*made.batches], pictures=made)


def _main_input(found: FoundModel) -> str:
    """The name of what the model is given: token ids, unless transformers says otherwise."""
    return main_input(found.source, found.given) or TOKENS


def _what_to_show(found: FoundModel) -> str:
    """Advice where data is missing, or of another kind than the model takes."""
    taken = _main_input(found)
    images = "a folder of images, or " if _reads_images(found) else ""
    if taken == TOKENS:
        return f"give {images}text, token ids or 'demo', or 'self', what the model itself writes"
    return (
        f"the model takes {taken}: give {images}batches in Python (compress.quantize(..., calibration=[{{'{taken}': "
        "tensor}, ...])) or such a list in a .pt file (torch.save), or use a method that needs no data, like rtn"
    )


def _reads_images(found: FoundModel) -> bool:
    return found.source is not None and "image" in modalities(found.source)
