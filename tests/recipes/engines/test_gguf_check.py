"""llama.cpp's roundings of inputs, as the study emulates them, and its arguments."""

import pytest
import torch

from compress.recipes.studies.engines import random_models
from compress.recipes.studies.engines.gguf_check import parse, rounded, rounded_whole


def test_inputs_are_rounded_in_blocks_of_32():
    """quantize_row_q8_0 of ggml-quants.c, in loops."""
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    x[1, :32] = 0
    found = rounded(x)
    for row in range(2):
        for start in (0, 32):
            block = x[row, start : start + 32]
            d = torch.tensor(float(block.abs().max()) / 127).half().float()
            for j, value in enumerate(block):
                step = float(block.abs().max()) / 127
                code = round(float(value) / step) if step else 0
                assert float(found[row, start + j]) == pytest.approx(code * float(d), abs=1e-6)


def test_inputs_of_super_blocks_are_rounded_in_blocks_of_256():
    """quantize_row_q8_K: the largest magnitude is code -127, and its scale is float32."""
    x = torch.randn(1, 256, generator=torch.Generator().manual_seed(0))
    found = rounded_whole(x)[0]
    place = int(x.abs().argmax())
    assert float(found[place]) == pytest.approx(float(x[0, place]), rel=1e-6)
    step = float(x.abs().max()) / 127
    assert float((found - x[0]).abs().max()) <= step / 2 * 1.0001
    assert torch.equal(rounded_whole(torch.zeros(1, 256)), torch.zeros(1, 256))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["demo"], "no python with xllamacpp"),
        (["demo", "--llama-python", "p", "--random", "mamba"], "unknown family 'mamba'"),
        (["demo", "--llama-python", "p", "--only", "nothing"], "no scheme has nothing in its name"),
    ],
)
def test_bad_arguments_are_a_line(words, says, capsys, monkeypatch):
    monkeypatch.delenv("COMPRESS_LLAMA_PYTHON", raising=False)
    with pytest.raises(SystemExit, match="2"):
        parse(words)
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_families_of_the_study_are_those_that_are_written_without_a_template():
    from compress.checkpoint.gguf.architectures import FAMILIES

    kinds = {type(make()).__name__ for make in random_models.FAMILIES.values()}
    assert kinds == set(FAMILIES)
