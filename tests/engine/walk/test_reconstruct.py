"""Block reconstruction: a block returns more of what the original returned, and the checkpoint is what was trained."""

import pytest
import torch
from combinations import every
from commands import fast_gptq, make_llama
from models import strong, tokens

import compress
from compress.base.errors import CompressError, InputError

DATA = {"calibration": tokens(48), "batch_size": 8}
FEW = compress.Reconstruct(steps=24, rows=16, checks=2)
CODES = compress.Reconstruct(steps=24, rows=16, checks=2, rate=0.02)


def losses(result, key: str) -> list[float]:
    """Of each block."""
    found = [layer.figures[key] for layer in result.record.layers if layer.method == "reconstruct"]
    assert len(found) == 14
    return [found[0], found[-1]]


@pytest.mark.full
@every(
    "passes",
    [
        [compress.RTN(scheme="w2a16", group_size=16), CODES],
        [compress.RTN(scheme="w4a4", group_size=16), FEW],
        [compress.SparseGPT(pattern="2:4"), fast_gptq(scheme="w3a16", group_size=16, grid="asymmetric"), FEW],
        [compress.RTN(scheme="w8a8", activations="static", outputs="static"), FEW],
    ],
)
def test_a_block_returns_more_of_what_the_original_returned(tmp_path_factory, passes):
    folder = tmp_path_factory.mktemp("reconstruct")
    strong().save_pretrained(folder / "model")
    result = compress.quantize(folder / "model", passes, output=folder / "out", verify=False, **DATA)
    before, after = losses(result, "block_loss_before"), losses(result, "block_loss")
    assert all(b <= a for a, b in zip(before, after, strict=True))
    if "w2a16" in str(passes) or "w4a4" in str(passes):  # of the others there is little to be gained
        assert after[0] < 0.97 * before[0]
    model = compress.load(folder / "out")
    in_memory = compress.quantize(strong(), passes, **DATA).model
    with torch.no_grad():
        one, other = (m(input_ids=tokens(4, seed=9)).logits for m in (model, in_memory))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    if passes[0].name == "sparsegpt":
        for name, p in in_memory.named_parameters():
            if "proj" in name:
                assert ((p != 0).unflatten(1, (-1, 4)).sum(-1) <= 2).all(), name


def test_the_loss_is_the_error_of_the_block_over_what_the_original_returns():
    model, original = strong(), strong()
    result = compress.quantize(model, [compress.RTN(scheme="w2a16", group_size=16), FEW], **DATA)
    with torch.no_grad():
        seen = [m(input_ids=DATA["calibration"], output_hidden_states=True).hidden_states[1] for m in (model, original)]
    expected = (seen[0] - seen[1]).square().sum() / seen[1].square().sum()
    assert losses(result, "block_loss")[0] == pytest.approx(float(expected), rel=1e-4)


def test_a_rate_that_does_harm_keeps_what_was_there():
    passes = [fast_gptq(scheme="w2a16", group_size=16), compress.Reconstruct(steps=4, rows=16, rate=1e4)]
    alone = compress.quantize(strong(), passes[:1], **DATA).model
    model = compress.quantize(strong(), passes, **DATA).model
    for name, p in model.named_parameters():
        assert torch.equal(p, alone.get_parameter(name)), name
        assert p.requires_grad


def test_what_it_needs_is_said():
    with pytest.raises(InputError, match="reconstruct needs calibration data"):
        compress.quantize(strong(), [compress.RTN(group_size=16), FEW])
    with pytest.raises(CompressError, match="reconstruct compressed nothing"):
        compress.quantize(strong(), [FEW], **DATA)
    wide = make_llama(hidden_size=256, intermediate_size=256)
    with pytest.raises(InputError, match="scales of q2_k stay as they are; give reconstruct a rate"):
        compress.quantize(wide, [compress.KQuants(scheme="q2_k", rounding="nearest"), FEW], calibration=tokens(8))
