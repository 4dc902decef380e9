"""Fisher information of layers' outputs: against derivatives of all logits by all outputs, and against the KL of models
whose layers are changed."""

import copy
import math

import pytest
import torch
from models import strong, tokens
from sensitivities import measure_sensitivity
from torch.func import jacfwd

import compress
import compress.search.fisher as fisher
import compress.search.layer_costs as layer_costs
from compress.checkpoint.sensitivity import Sensitivity
from compress.engine.plan.batches import ChainBrokenError
from compress.engine.walk import output_gradients, stacks
from compress.search.candidate import Candidate

CALIBRATION, HELD_OUT = tokens(40, 24), tokens(8, 24, seed=7)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path / "cache"))


def rounding(bits: int) -> Candidate:
    return Candidate(f"w{bits}", (compress.RTN(scheme=f"w{bits}a16", group_size=16),))


def table(model: torch.nn.Module, *bits: int, **data: object) -> Sensitivity:
    how = {"calibration": CALIBRATION, "text": HELD_OUT, **data}
    return measure_sensitivity(model, [rounding(b) for b in bits], **how)


def log_probs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=HELD_OUT).logits[:, :-1].double().log_softmax(-1)


def seen(monkeypatch: pytest.MonkeyPatch, draws: int = 1) -> list[fisher.Fisher]:
    """The Fisher information as measurements make it, from so many draws."""
    made: list[fisher.Fisher] = []
    usual = fisher.Fisher

    def drawn(*given: object) -> fisher.Fisher:
        for seed in range(draws):
            monkeypatch.setattr(output_gradients, "SEED", seed)
            made.append(usual(*given))
        return made[-1]

    monkeypatch.setattr(layer_costs, "Fisher", drawn)
    return made


def exact(model: torch.nn.Module, layer: str, ids: torch.Tensor) -> torch.Tensor:
    """[T, N]: the diagonal of J^T (diag(p) - p p^T) J for each output of each token, summed over all predictions, J
    being the derivatives of all logits by it."""
    module = model.get_submodule(layer)
    with torch.no_grad():
        p = model(input_ids=ids).logits[0, :-1].double().softmax(-1)

    def logits(added: torch.Tensor) -> torch.Tensor:
        handle = module.register_forward_hook(lambda _m, _a, y: y + added)
        out = model(input_ids=ids).logits[0, :-1]
        handle.remove()
        return out

    j_TVtn = jacfwd(logits)(torch.zeros(ids.shape[1], len(module.weight))).double()
    mean = torch.einsum("av,avtn->atn", p, j_TVtn)
    return (torch.einsum("av,avtn->atn", p, j_TVtn.square()) - mean.square()).sum(0)


EXACT = ("model.layers.0.self_attn.v_proj", "model.layers.1.self_attn.k_proj")
ROWS = 4  # of the first micro-batch


def eager() -> torch.nn.Module:
    """A model whose attention has derivatives for many directions at once."""
    model = strong()
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    """{layer: [rows, T, N]}."""
    model = eager()
    return {n: torch.stack([exact(model, n, ids) for ids in CALIBRATION[:ROWS].split(1)]).detach() for n in EXACT}


@pytest.mark.first
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # by torch's own derivatives
@pytest.mark.parametrize("one_block", [False, True])
def test_squared_gradients_are_the_diagonal_of_the_fisher_information(monkeypatch, expected, one_block):
    made = seen(monkeypatch, draws=12)
    if one_block:  # as for a model whose blocks hand on more than the hidden state
        monkeypatch.setattr(stacks, "check_hidden_alone", broken)
    table(eager(), 4)
    assert all((each.stack.container is None) == one_block for each in made)
    for layer, exactly in expected.items():
        drawn = sum(each.found[layer].of_tokens[0][: exactly[..., 0].numel()].double() for each in made) / len(made)
        # Draws differ from their mean: by little in a sum over tokens, by more for each of them.
        assert float(drawn.sum()) == pytest.approx(float(exactly.sum()), rel=0.25)
        assert float(torch.corrcoef(torch.stack([drawn, exactly.sum(-1).flatten()]))[0, 1]) > 0.9


def broken(_: object) -> None:
    """A check of blocks that fails."""
    raise ChainBrokenError("a block's second output feeds the next block")


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_a_small_change_costs_as_much_as_is_estimated(kind):
    model, ratios = strong(kind), []
    expected = log_probs(model)
    for unit in table(model, 5, 6).units:
        for bits in (5, 6):
            alone = compress.only(rounding(bits).passes[0], *unit.layers)
            other = log_probs(compress.quantize(copy.deepcopy(model), alone).model)
            kl = float((expected.exp() * (expected - other)).sum(-1).mean())
            ratios.append(math.log(unit.tried[f"w{bits}"].fisher / kl))
    assert len(ratios) == 16
    assert max(map(abs, ratios)) < math.log(3.5)
    assert abs(sum(ratios) / len(ratios)) < math.log(1.3)


def test_padding_counts_nowhere():
    model, rows = strong(), CALIBRATION[:16]
    whole = table(model, 4, calibration=[{"input_ids": rows}])
    padded = torch.cat([rows, torch.full((16, 8), 3)], 1)
    mask = torch.cat([torch.ones(16, 24), torch.zeros(16, 8)], 1).long()
    with_padding = table(model, 4, calibration=[{"input_ids": padded, "attention_mask": mask}])
    for plain, other in zip(whole.units, with_padding.units, strict=True):
        # Draws differ: they are made for rows of another length.
        assert other.tried["w4"].fisher == pytest.approx(plain.tried["w4"].fisher, rel=0.4), plain.name


def test_only_the_first_micro_batches_are_differentiated(monkeypatch):
    monkeypatch.setattr(fisher, "TOKENS", 300)
    made = seen(monkeypatch)
    table(strong(), 4)
    assert [len(each.batches) for each in made] == [2]  # of 8 samples of 24 tokens
    assert made[0].predicted == 16 * 23


def test_a_unit_that_no_gradient_reaches_has_what_others_have_by_their_loss(monkeypatch, tmp_path):
    weighted = fisher.Fisher.weighted
    left_out = "model.layers.1.mlp.down_proj"

    def forgetful(self, site, arrivals):
        return {name: w for name, w in weighted(self, site, arrivals).items() if name != left_out}

    usual = {unit.name: unit.tried["w3"] for unit in table(strong(), 3).units}
    monkeypatch.setattr(fisher.Fisher, "weighted", forgetful)
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path / "other"))
    measured = table(strong(), 3)
    assert any(f"no gradient of predictions reached {left_out} (1 units in all)" in note for note in measured.notes)
    found = {unit.name: unit.tried["w3"] for unit in measured.units}
    others = [usual[name] for name in usual if name != left_out]
    rate = sum(t.fisher for t in others) / sum(t.relative_loss for t in others)
    assert found[left_out].fisher == pytest.approx(rate * usual[left_out].relative_loss, rel=0.35)
    assert found[left_out].fisher != pytest.approx(usual[left_out].fisher, rel=0.01)


def test_no_gradient_stays_and_no_weight_changes():
    model = strong()
    before = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        p.requires_grad_(False)
    table(model, 4)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())
