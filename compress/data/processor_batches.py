"""Batches for models that read images: what a model's processor makes of images, and of the texts with them.

Samples share a batch where all their inputs have the same shapes. So there is no padding, which statistics of a vision
tower and of a decoder could not tell apart by one mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compress.base.errors import InputError, first_line
from compress.checkpoint.portable_names import portable
from compress.checkpoint.read.tokenizer_check import tokenizing
from compress.data.chat import Template, template_of
from compress.data.images import MOST_PIXELS, Sample, read_image, spread
from compress.data.tokens import Origin
from compress.model.calls import Batch

QUESTION = "Describe this image."  # goes with an image in models that need a text
IDS = "input_ids"
SIZES = ("size", "crop_size", "pad_size")  # of images, in the settings of a processor


@dataclass(frozen=True)
class Pictures:
    """Batches of a processor's outputs, and what is said about them. tokens: of text, 0 for images alone."""

    source: str
    samples: int
    images: int
    batches: tuple[Batch, ...]
    origin: Origin
    notes: tuple[str, ...]

    def described(self) -> dict[str, Any]:
        """The entry about these images in the record of a run."""
        return {
            "source": portable(self.source),
            "samples": self.samples,
            "images": self.images,
            "files": [self.origin.described()],
        }


def process(
    samples: Sequence[Sample], processor: Any, source: str, *, texts: bool, count: int | None, size: int
) -> Pictures:
    """Micro-batches of at most `size` samples. processor: of transformers. texts: whether the model reads them beside
    images. Raises InputError, which names the sample."""
    _check_sizes(processor, source)
    picked = spread(samples, count)
    template = template_of(processor) if texts and getattr(processor, "chat_template", None) else None
    words = [_text(sample, processor, template) if texts else None for sample in picked]
    with tokenizing(getattr(processor, "tokenizer", processor), source, [each for each in words if each is not None]):
        made = [_inputs(sample, processor, text) for sample, text in zip(picked, words, strict=True)]
    batches = _batches(made, size)
    images = sum(len(sample.images) or sample.image is not None for sample in picked)
    tokens = sum(inputs[IDS].numel() for inputs in made if IDS in inputs)
    spare = {"not needed for so many samples": len(samples) - len(picked)} if len(samples) > len(picked) else {}
    origin = Origin(source, len(samples), len(picked), tokens, dropped=spare)
    said = f"{images} images and {tokens} tokens" if texts else f"{images} images"
    notes = [f"calibration {source!r}: {said} of {len(picked)} of {len(samples)} samples, without padding"]
    asked = sum(sample.image is not None and not sample.text for sample in picked)
    if texts and asked:
        notes.append(f"{asked} images without a text are shown with {QUESTION!r}")
    if not texts and any(sample.text or sample.messages for sample in picked):
        notes.append("the model reads images alone: their texts are left out")
    return Pictures(source, len(picked), images, tuple(batches), origin, tuple(notes))


def _check_sizes(processor: Any, source: str) -> None:
    """Raises InputError for a processor that makes images far larger than any is read."""
    made = getattr(processor, "image_processor", processor)
    for name in SIZES:
        size = getattr(made, name, None)
        edges = {"shortest_edge": size} if isinstance(size, int) else dict(size or {})
        height, width = (edges.get(edge) or edges.get("shortest_edge") or 0 for edge in ("height", "width"))
        # Some give the number of pixels for an edge, and both ends of it.
        pixels = max(height, width) if "longest_edge" in edges else height * width
        if pixels > MOST_PIXELS:
            raise InputError(
                f"{source}: the model's processor makes images of {pixels:,} pixels ({name}); allowed: {MOST_PIXELS:,}"
            )


def _inputs(sample: Sample, processor: Any, text: str | None) -> dict[str, Any]:
    """The inputs of one sample, tensors whose first dimension is 1 or counts its patches. text: what goes with it; None
    for a model that reads images alone."""
    places = sample.images if sample.image is None else (sample.image,)
    images = [read_image(place, sample.where) for place in places]
    arguments: dict[str, Any] = {"images": images} if images else {}
    if text is not None:
        arguments["text"] = [text]
        bos = getattr(getattr(processor, "tokenizer", None), "bos_token", None)
        if bos and text.startswith(bos):
            arguments["add_special_tokens"] = False
    elif not images:
        raise InputError(f"{sample.where} shows no image, and the model reads images alone; leave it out")
    elif hasattr(processor, "tokenizer"):
        processor = processor.image_processor
    try:
        return dict(processor(**arguments, return_tensors="pt"))
    except Exception as error:  # noqa: BLE001 - whatever a processor finds wrong
        raise InputError(f"{sample.where}: the model's processor makes no inputs of it: {first_line(error)}") from None


def _text(sample: Sample, processor: Any, template: Template | None) -> str:
    """The text that goes with images: as the chat template writes it, or else the plain text."""
    if template is not None:
        messages = sample.messages or _asked(sample)
        try:
            return template(([*messages], None))
        except InputError as error:
            roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
            raise InputError(
                f"{sample.where}: the processor's chat template cannot write it (roles {roles}): {first_line(error)}"
            ) from None
    if sample.messages:
        raise InputError(
            f"{sample.where} holds chat messages, and the model's processor has no chat template; give a folder of "
            "images with texts"
        )
    token = getattr(processor, "image_token", None)
    return f"{token if isinstance(token, str) else ''}{sample.text or QUESTION}"


def _asked(sample: Sample) -> list[dict[str, Any]]:
    """A conversation about one image: a question, and the image's text for an answer."""
    question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": sample.text}]}
    return [question, answer] if sample.text else [question]


def _batches(made: Sequence[dict[str, Any]], size: int) -> list[Batch]:
    """Samples together whose inputs have the same shapes, in the order in which the first of them come."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for number, inputs in enumerate(made):
        alike = all(isinstance(value, Tensor) and value.ndim for value in inputs.values())
        shapes = tuple((name, tuple(value.shape)) for name, value in inputs.items()) if alike else number
        groups.setdefault(shapes, []).append(inputs)
    parts = [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]
    return [part[0] if len(part) == 1 else {n: torch.cat([p[n] for p in part]) for n in part[0]} for part in parts]
