"""K-quants by GPTQ: against the algorithm in loops that share no code with it, and from words to a checkpoint."""

import json
from itertools import pairwise, product

import pytest
import torch
from commands import command, make_llama, save
from published import mean_square, realistic_layer, row_losses
from torch import Tensor

import compress
from compress.base.errors import InputError
from compress.kernels.layouts.k_quants import BLOCK, K_QUANTS, unpack_blocks
from compress.passes.k_quants import FALLBACKS, KQuants
from compress.passes.options.k_mixes import K_SCHEMES, blocks_of_names, takes_more, type_in, types_of
from compress.passes.protocol.recipe import describe, make_pass, parse_recipe
from compress.solvers.k_quants.solve import k_quant, nearest_blocks
from compress.weights.formats.k_quants import KBlocks, KQuant
from compress.weights.levels import IQ4_NL

WEIGHT, X = realistic_layer(12, 2 * BLOCK, seed=3)
H = mean_square(X)


def swept_codes(term: KBlocks, weight: Tensor, hessian: Tensor, damp: float) -> list[list[int]]:
    """The codes of GPTQ (arXiv 2210.17323, algorithm 1) in the scales, minima and steps that a term has, row by row:
    every column is rounded, and the inverse of H spreads its error over the columns that are left."""
    layout, zero = term.format.layout, term.format.zero
    fields = unpack_blocks(term.blocks.view(len(weight), -1, layout.size), layout)
    values = torch.stack([_levels(fields, term.format, group) for group in range(weight.shape[1] // layout.group)], 1)
    assert values.shape[2] == 2**layout.bits > zero
    whole = hessian + damp * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=hessian.dtype)
    upper = torch.linalg.cholesky(torch.linalg.inv(whole), upper=True)
    left, codes = weight.clone(), torch.zeros(weight.shape, dtype=torch.int64)
    for j in range(weight.shape[1]):
        levels = values[:, j // layout.group]
        codes[:, j] = (levels - left[:, j : j + 1]).abs().argmin(1)
        error = (left[:, j] - levels.gather(1, codes[:, j : j + 1])[:, 0]) / upper[j, j]
        left[:, j:] -= error.unsqueeze(1) * upper[j, j:]
    return codes.tolist()


def _levels(fields, format_: KQuant, group: int) -> Tensor:
    """[N, 2^bits] what the codes of a group stand for, in float64."""
    block, inside = divmod(group, format_.layout.groups)
    codes = torch.arange(2**format_.layout.bits, dtype=torch.float64)
    scale = fields.scales[:, block, inside]
    if format_.type == "q6_k":
        scale = scale.view(torch.int8).double()
    elif format_.type in ("q3_k", "iq4_xs"):
        scale = scale.double() - 32
    if format_.type == "iq4_xs":
        codes = torch.tensor(IQ4_NL.values, dtype=torch.float64)
    step = fields.d[:, block].double() * scale.double()
    offset = 0.0
    if fields.minima is not None:
        offset = (fields.dmin[:, block].double() * fields.minima[:, block, inside].double()).unsqueeze(1)
    return step.unsqueeze(1) * (codes - format_.zero) - offset


@pytest.mark.parametrize("name", K_QUANTS)
def test_a_sweep_is_gptqs_in_the_scales_that_it_fits(name):
    found = k_quant(WEIGHT, H, format_=KQuant(type=name))
    assert isinstance(found.weight, KBlocks)
    codes = unpack_blocks(found.weight.blocks.view(len(WEIGHT), -1, K_QUANTS[name].size), K_QUANTS[name]).codes
    assert codes.flatten(1).tolist() == swept_codes(found.weight, WEIGHT, H, damp=0.01)
    error = WEIGHT - found.weight.dequantize(torch.float64)
    damped = H + 0.01 * H.diagonal().mean() * torch.eye(len(H), dtype=H.dtype)
    torch.testing.assert_close(found.loss_N, row_losses(error, damped), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["q3_k", "q4_k", "iq4_xs"])
def test_every_step_after_the_sweep_lowers_the_loss_of_every_row(name):
    how = {"format_": KQuant(type=name), "polish_damp": 0.01}
    damped = H + 0.01 * H.diagonal().mean() * torch.eye(len(H), dtype=H.dtype)
    losses = [
        row_losses(WEIGHT - found.weight.dequantize(torch.float64), damped)
        for found in (k_quant(WEIGHT, H, **how, refit=r, sweeps=s) for r, s in ((0, 0), (1, 0), (1, 1), (2, 2)))
    ]
    for before, after in pairwise(losses):
        assert torch.all(after <= before * (1 + 1e-6))
    nearest = nearest_blocks(WEIGHT.float(), KQuant(type=name)).dequantize(torch.float64)
    assert losses[-1].sum() < 0.5 * row_losses(WEIGHT - nearest, H).sum()


def test_refits_leave_few_scales_that_another_code_would_better():
    """Where weights have one sign, a scale and a minimum would do nearly the same, and q3_k has no minimum."""
    weight, format_ = WEIGHT.abs() + WEIGHT.abs().mean(), KQuant(type="q3_k")
    damped = H + 0.01 * H.diagonal().mean() * torch.eye(len(H), dtype=H.dtype)
    found = k_quant(weight, H, format_=format_, refit=3, polish_damp=0.01).weight
    values = found.dequantize(torch.float64)
    fields = unpack_blocks(found.blocks.view(len(weight), -1, format_.layout.size), format_.layout)
    losses, better = row_losses(weight - values, damped), 0
    for block, group in product(range(2), range(format_.layout.groups)):
        columns = slice(group * format_.layout.group, (group + 1) * format_.layout.group)
        codes = fields.codes[:, block, columns].double() - format_.zero
        lower = torch.zeros(len(weight), dtype=torch.bool)
        for code in range(-32, 32):
            other = values.clone()
            other[:, block * BLOCK :][:, columns] = fields.d[:, block : block + 1].double() * code * codes
            lower |= row_losses(weight - other, damped) < losses * (1 - 1e-6)
        better += int(lower.sum())
    assert better < 0.02 * 2 * format_.layout.groups * len(weight)


@pytest.mark.parametrize("name", ["q4_k", "iq4_xs"])
def test_float32_decides_about_as_well(name):
    """By the compiled loops, where the tests above took those of torch."""
    found = [
        k_quant(w, h, format_=KQuant(type=name), refit=2, sweeps=2)
        for w, h in ((WEIGHT, H), (WEIGHT.float(), H.float()))
    ]
    losses = [row_losses(WEIGHT - one.weight.dequantize(torch.float64), H) for one in found]
    assert losses[1].sum() < 1.05 * losses[0].sum()


# --- from words to a checkpoint ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    """A Llama of two blocks whose MLP has 256 inputs, and attention and the way down 288: no multiple."""
    made = make_llama(hidden_size=BLOCK, intermediate_size=288, num_attention_heads=4, vocab_size=2048)
    return save(made.bfloat16(), tmp_path_factory.mktemp("wide"))


def test_gptq_and_rtn_of_a_type_are_this_pass():
    assert make_pass("gptq", {"scheme": "q4_k"}) == KQuants()
    assert make_pass("gptq", {"scheme": "Q4_K_M", "damp": 0.02}) == KQuants(scheme="q4_k_m", damp=0.02)
    assert make_pass("rtn", {"scheme": "q6_k"}) == KQuants(scheme="q6_k", rounding="nearest")
    assert {type(make_pass("gptq", {"scheme": name.upper()})) for name in K_SCHEMES} == {KQuants}
    assert {KQuants(scheme="iq4_xs", rounding=rounding).fallback.scheme for rounding in ("gptq", "nearest")} == {
        "iq4_nl"
    }
    assert parse_recipe(describe([KQuants(scheme="q3_k_m", blocks=4)]), "here") == (KQuants(scheme="q3_k_m", blocks=4),)


@pytest.mark.parametrize(
    "words", [["rtn", "--scheme", "q4_k_m"], ["gptq", "--scheme", "q4_k", "--effort", "fast", "--length", 128]]
)
def test_a_plan_gives_no_option_that_nobody_gave(model, words, tmp_path):
    """Its time is that of a layer that is rounded on the spot."""
    done = command("plan", model, "--method", *words, "--json", tmp_path / "plan.json")
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "plan.json").read_text())["seconds"] > 0


def test_words_become_super_blocks_that_verify(model, tmp_path):
    tokens = tmp_path / "tokens.pt"
    torch.save(torch.randint(2048, (6, 48), generator=torch.Generator().manual_seed(0)), tokens)
    for method, more in (("gptq", ["--calibration", tokens, "--set", "sweeps=0"]), ("rtn", [])):
        words = ["--method", method, "--scheme", "q4_k_m", "--output", tmp_path / method, "--no-verify"]
        done = command("quantize", model, *words, *more)
        assert done.code == 0, done.err
        assert "down_proj has 288 inputs, no multiple of 256" in done.err
        assert "q4_k becomes w5a16, q6_k becomes w8a16, in groups of 32" in done.err
        assert compress.verify(tmp_path / method)["layers"] == 14
    loaded = compress.load(tmp_path / "rtn")
    schemes = {
        name.rpartition(".")[2] + name[13]: str(layer.scheme)
        for name, layer in loaded.named_modules()
        if hasattr(layer, "scheme")
    }
    assert schemes["q_proj0"] == schemes["up_proj1"] == "q4_k"
    assert schemes["v_proj0"] == "q4_k"
    assert schemes["v_proj1"] == "q6_k"
    assert schemes["down_proj0"] == "w5a16 g32 symmetric"
    assert schemes["down_proj1"] == "w8a16 g32 symmetric"
    dense = compress.load(tmp_path / "rtn").dequantize()
    ids = torch.randint(2048, (1, 16), generator=torch.Generator().manual_seed(1))
    ours, theirs = loaded(ids).logits.float(), dense(ids).logits.float()
    assert (ours - theirs).norm() < 0.01 * theirs.norm()  # bfloat16 has two to three digits


def test_mixes_are_llama_cpps():
    """n = 16: an eighth is 2 blocks, and of the 12 between every third has more."""
    names = [f"model.layers.{block}.mlp.down_proj" for block in range(16)]
    assert [block for block in range(16) if takes_more(block, 16)] == [0, 1, 4, 7, 10, 13, 14, 15]
    assert [type_in("q4_k_m", name, 16) for name in names].count("q6_k") == 8
    assert [type_in("q4_k_s", name, 16) for name in names] == ["q5_k"] * 2 + ["q4_k"] * 14
    assert [type_in("q3_k_m", name, 16) for name in names] == ["q5_k"] + ["q4_k"] * 15
    assert {type_in("q3_k_l", name, 16) for name in names} == {"q5_k"}
    assert {type_in("q5_k_m", f"model.layers.{block}.mlp.up_proj", 16) for block in range(16)} == {"q5_k"}
    assert types_of("q3_k_m") == ["q3_k", "q4_k", "q5_k"]
    assert types_of("q6_k") == ["q6_k"]
    assert blocks_of_names("q4_k_m", [*names, "lm_head"]) == 16
    with pytest.raises(InputError, match=r"a layer is called 'encoder\.query'; give q4_k to all"):
        blocks_of_names("q4_k_m", ["encoder.query"])
    assert set(FALLBACKS) == set(K_QUANTS)
