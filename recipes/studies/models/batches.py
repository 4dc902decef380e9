"""Batches of random inputs for a model of a task: the forms that models of transformers take."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

TEXT = (2, 100)  # ids: first, first of special tokens
SAMPLES = 4
SHORT = 24  # tokens
SOUND = 4000  # samples of a waveform
FRAMES = 200
SIDES = (64, 32, 224)
PLACES = ("image_token_id", "image_token_index")
IN_TEXT = (16, 17, 4, 1, 15, 64, 65)  # tokens of an image
ROWS = 4  # of patches, in a batch of these

Batch = dict[str, Tensor]


class Normal:
    """Random numbers, the same for every model."""

    def __init__(self) -> None:
        self.source = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.source)


def batches_of(model: Any, task: str) -> Iterator[Batch]:
    """Batches that a model of a task may take, the likeliest first."""
    normal, config, main = Normal(), model.config, model.main_input_name
    ids = torch.randint(*TEXT, (SAMPLES, SHORT), generator=normal.source)
    if task == "vision" and main != "input_ids":
        for batch in images(config, normal):
            yield {main if name == "pixel_values" else name: value for name, value in batch.items()}
        return
    if task in ("audio", "speech"):
        answer = {"decoder_input_ids": ids[:2]} if task == "speech" else {}
        for sound in sounds(main, config, normal):
            yield sound | answer
            yield sound | {"input_ids": ids[:2]}
    words = {"input_ids": ids, "decoder_input_ids": ids} if task == "seq2seq" else {"input_ids": ids}
    yield words
    takes = inspect.signature(model.forward).parameters
    if "pixel_values" in takes:
        yield from (words | batch for batch in images_in_text(config, normal, ids))
    if "encoder_hidden_states" in takes:  # the decoder of an encoder-decoder
        for name in ("cross_attention_hidden_size", "hidden_size", "d_model"):
            if isinstance(width := getattr(config, name, None), int):
                yield words | {"encoder_hidden_states": normal(SAMPLES, SHORT, width)}


def images_in_text(config: Any, normal: Normal, ids: Tensor) -> Iterator[Batch]:
    """Batches of an image to a text, whose place is held by tokens of its own, as many as the image becomes."""
    place = next((found for name in PLACES if isinstance(found := getattr(config, name, None), int)), None)
    for batch in images(config, normal):
        if place is None:
            yield batch
            continue
        for count in IN_TEXT:
            yield batch | {"input_ids": torch.cat([ids.new_full((SAMPLES, count), place), ids], 1)}


def sounds(main: str, config: Any, normal: Normal) -> Iterator[Batch]:
    """Batches of sounds: waveforms, and frames of features in both orders."""
    inner = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None) or config
    if main == "input_features":
        sizes = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "input_dim", "d_model")
        for bins in [size for name in sizes if (size := getattr(inner, name, None))]:
            for length in (FRAMES, 2 * getattr(inner, "max_source_positions", FRAMES)):
                yield {main: normal(2, bins, length)}
                yield {main: normal(2, length, bins)}
    else:
        yield {main: normal(2, SOUND)}
        yield {main: normal(2, 1, SOUND)}
        yield {main: normal(2, getattr(inner, "max_length", 1), getattr(inner, "num_mel_bins", 1))}


def images(config: Any, normal: Normal) -> Iterator[Batch]:
    """Batches of images: of the configuration's size, and as patches."""
    vision = getattr(config, "vision_config", None) or config
    channels = getattr(vision, "num_channels", 3)
    own = getattr(vision, "image_size", None)
    for side in (own, *SIDES):
        if side:
            sides = (side, side) if isinstance(side, int) else tuple(side)
            yield {"pixel_values": normal(SAMPLES, channels, *sides)}
    patch = getattr(vision, "patch_size", None)
    if isinstance(patch, int):
        yield {
            "pixel_values": normal(SAMPLES, ROWS * ROWS, channels * patch * patch),
            "pixel_attention_mask": torch.ones(SAMPLES, ROWS * ROWS, dtype=torch.long),
            "spatial_shapes": torch.full((SAMPLES, 2), ROWS),
        }
