"""Experts that go: the smaller model is the original with these experts masked out in the router."""

import json

import pytest
import torch
import transformers
from commands import command
from mixtures import FAMILIES, SIZES, made, tokens

import compress
from compress.base.errors import InputError
from compress.model.edits.changes import undo
from compress.model.edits.keep_experts import KeepExperts, mixtures_of, routers_of
from compress.passes.whole_model.experts import RouterChoice, experts_left

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
EIGHT = {
    "deepseek-v3": {"n_routed_experts": 8},
    **{family: {"num_experts": 8} for family in ("qwen3-moe", "qwen2-moe", "olmoe")},
    **{family: {"num_local_experts": 8} for family in ("mixtral", "granite", "gpt-oss", "llama4")},
}


def logits(model, x=None):
    with torch.no_grad():
        return model(tokens(2, seed=3) if x is None else x).logits


def masked(model, gone, monkeypatch):
    """Make routers of a model give nothing to some experts. gone: {name of the module around them: their numbers}."""
    routers = {}
    for around, own, experts in mixtures_of(model):
        block = model.get_submodule(around)
        assert own == "experts"
        routers |= {id(router.weight): gone[around] for router in routers_of(block, experts)}
    linear = torch.nn.functional.linear

    def scores(x, weight, bias=None):
        found = linear(x, weight, bias)
        if id(weight) in routers:
            found[..., routers[id(weight)]] = -torch.inf
        return found

    monkeypatch.setattr(torch.nn.functional, "linear", scores)


@pytest.mark.first
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_left_is_the_original_with_experts_masked_out(family, tmp_path, monkeypatch):
    made(family, **EIGHT[family]).save_pretrained(tmp_path / "model")
    out = tmp_path / "out"
    given = {"calibration": tokens(16), "verify": False, "output": out}
    record = compress.quantize(tmp_path / "model", compress.Structure(experts=0.25), **given).record
    edits = record.structure["edits"]
    gone = {edit["module"]: edit["removed"] for edit in edits}
    assert {len(each) for each in gone.values()} == {2}
    if family == "deepseek-v3":  # two groups of four
        assert all(sum(i < 4 for i in each) == 1 for each in gone.values())
    else:
        for edit in edits:
            scores = torch.tensor(edit["scores"])
            assert scores[edit["removed"]].max() <= scores[edit["kept"]].min()
            assert sum(edit["tokens"]) == 16 * 16 * SIZES["num_experts_per_tok"] // (2 if family == "llama4" else 1)
    for around, each in gone.items():
        assert any(f"{around} goes on without 2 of 8 experts: {each[0]}, {each[1]}" in note for note in record.notes)
    config = json.loads((out / "config.json").read_text())
    assert [config[count] for count in COUNTS if count in config] == [6]
    small, original = compress.load(out), made(family, **EIGHT[family])
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in original.parameters())
    compress.split_experts(original)
    found = logits(small)
    unmasked = logits(original)
    masked(original, gone, monkeypatch)
    expected = logits(original)
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.allclose(found, unmasked, atol=1e-2)


@pytest.mark.full
def test_steps_behind_it_see_the_smaller_model(tmp_path):
    made("qwen3-moe", **EIGHT["qwen3-moe"]).save_pretrained(tmp_path / "model")
    passes = [
        compress.Structure(experts=0.5),
        compress.GPTQ(scheme="w4a16", group_size=-1),
        compress.Train(steps=2, learning_rate=1e-4),
    ]
    out = tmp_path / "out"
    given = {"calibration": tokens(16), "output": out, "verify": False}
    record = compress.quantize(tmp_path / "model", passes, **given).record
    assert len({layer.name for layer in record.layers}) == 2 * (4 + 3 * 4)
    assert compress.verify(out)["transformers"] == "compared"
    assert compress.load(out).config.num_experts == 4
    resumed = compress.quantize(tmp_path / "model", passes, **{**given, "output": tmp_path / "again"})
    assert resumed.record.structure["edits"] == record.structure["edits"]


def test_the_command_says_which_experts_go(tmp_path):
    made("mixtral", **EIGHT["mixtral"]).save_pretrained(tmp_path / "model")
    torch.save(tokens(8), tmp_path / "tokens.pt")
    words = ["--calibration", tmp_path / "tokens.pt", "--output", tmp_path / "out"]
    ran = command("prune", tmp_path / "model", "--structure", "experts", *words)
    assert ran.code == 0, ran.err
    assert "model.layers.1.mlp goes on without 2 of 8 experts: " in ran.err
    # Plain files, with the names of the hub: transformers reads them.
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.num_local_experts == 6
    assert torch.allclose(logits(model), logits(compress.load(tmp_path / "out")), atol=1e-5)


def test_an_edit_of_experts_is_undone_to_the_bit():
    model = made("deepseek-v3")
    compress.split_experts(model)
    around = "model.layers.1.mlp"
    block, before = model.get_submodule(around), {k: v.clone() for k, v in model.state_dict().items()}
    expected = logits(model)
    done = KeepExperts("experts", (0, 3)).apply(block)
    assert block.experts.numbers == ["0", "1"]
    assert block.gate.weight.shape[0] == len(block.gate.e_score_correction_bias) == block.gate.num_experts == 2
    undo(done)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(logits(model), expected)
    for kept in ((), (1, 0), (1, 1), (0, 4)):
        with pytest.raises(InputError, match="it has 4: give at least one"):
            KeepExperts("experts", kept).apply(block)
    del block.gate
    with pytest.raises(InputError, match="no router beside experts"):
        KeepExperts("experts", (0,)).apply(block)


def test_as_many_stay_as_a_token_is_sent_to():
    assert [RouterChoice(8, 2).staying(share) for share in (0.05, 0.13, 0.25, 0.9)] == [8, 7, 6, 2]
    grouped = RouterChoice(16, 4, groups=4, chosen_groups=2)
    assert [grouped.staying(share) for share in (0.1, 0.25, 0.9)] == [16, 12, 8]
    assert experts_left(torch.tensor([0.1, 3, 2, 2, 5, 0, 7, 6.0]), RouterChoice(8, 1, 2, 1), 4) == [1, 2, 6, 7]
    assert experts_left(torch.tensor([1.0, 2, 2, 0]), RouterChoice(4, 1), 2) == [1, 2]


def test_what_cannot_go_is_refused(tmp_path):
    model = made("mixtral")
    with pytest.raises(InputError, match=r"split_experts\(model\) on a model in memory"):
        compress.quantize(model, compress.Structure(experts=0.25), calibration=tokens())
    compress.split_experts(model)
    with pytest.raises(InputError, match=r"experts 0.1 of 4 in model.layers.0.mlp is none: 2 have to stay; give 0.25"):
        compress.quantize(model, compress.Structure(experts=0.1), calibration=tokens())
    with pytest.raises(InputError, match="a step of their own"):
        compress.Structure(experts=0.25, channels=0.25)
    with pytest.raises(InputError, match=r"experts 1\.0; allowed: a share"):
        compress.Structure(experts=1.0)


# Sequences in which each token is followed by one of two, by a rule of eight: experts have something to share out.
def sequences(rows, seed):
    g = torch.Generator().manual_seed(seed)
    found = torch.empty(rows, 32, dtype=torch.long)
    found[:, 0] = torch.randint(1, 128, (rows,), generator=g)
    for t in range(1, 32):
        before = found[:, t - 1]
        choice = torch.randint(2, (rows,), generator=g)
        found[:, t] = (before * (3 + 2 * (before % 8)) + 11 * choice + before // 8) % 127 + 1
    return found


@pytest.mark.full
def test_on_a_trained_mixture_the_least_go_better_than_any_others():
    torch.manual_seed(0)
    model = made("qwen3-moe", **EIGHT["qwen3-moe"])
    model.config.output_router_logits = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(200):
        x = sequences(32, seed=step)
        loss = model.train()(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    compress.split_experts(model)
    x = sequences(16, seed=1000)
    reference = logits(model, x).log_softmax(-1)

    def divergence():
        return float((reference.exp() * (reference - logits(model, x).log_softmax(-1))).sum(-1).mean())

    blocks = [model.get_submodule(around) for around, _, _ in mixtures_of(model)]
    random = []
    for seed in range(12):
        g = torch.Generator().manual_seed(seed)
        kept = [tuple(torch.randperm(8, generator=g)[:5].sort().values.tolist()) for _ in blocks]
        done = [KeepExperts("experts", own).apply(block) for block, own in zip(blocks, kept, strict=True)]
        random.append(divergence())
        for each in reversed(done):
            undo(each)
    assert divergence() == 0
    compress.quantize(model, compress.Structure(experts=0.375), calibration=sequences(64, seed=2000))
    least = divergence()
    assert model.config.num_experts == 5
    assert 0 < least <= sorted(random)[len(random) // 4], (least, sorted(random))
