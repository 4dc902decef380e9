"""Steps of generating on a CPU: which attention takes them, whose models, and what compiled ones say."""

import copy

import pytest
import torch
from models import build, tokens
from transformers import AutoModelForCausalLM

import compress
from compress.base.errors import InputError
from compress.inference.load import steps
from compress.kernels.cpu import direct


def write(tmp_path):
    compress.quantize(build("llama"), compress.RTN(group_size=16), output=tmp_path / "out", verify=False)
    return tmp_path / "out"


@pytest.fixture(autouse=True)
def operator():
    if direct.why_not():
        pytest.skip("; ".join(direct.why_not()))


@pytest.fixture
def taken(monkeypatch):
    """Where our loop takes a step, one entry."""
    found, attention = [], direct.attention
    monkeypatch.setattr(direct, "attention", lambda *a: found.append(1) or attention(*a))
    return found


def answer(model, **options):
    ids = tokens(2, 5)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0  # the second prompt is shorter
    said = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, **options}
    found = model.generate(ids, attention_mask=mask, min_new_tokens=6, output_logits=True, **said)
    return found.sequences, torch.stack(found.logits)


def test_a_loaded_model_takes_it_and_says_the_same(tmp_path, taken):
    out = write(tmp_path)
    model = compress.load(out).eval()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(direct, "attends", lambda *_: False)
        expected, logits = answer(model)
    assert not taken
    for cache in ("dynamic", "static"):
        said, found = answer(model, cache_implementation=cache)
        assert len(taken) == 5 * model.config.num_hidden_layers
        taken.clear()
        assert torch.equal(said, expected)
        torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)


def test_other_models_of_the_process_and_gradients_do_not(tmp_path, taken):
    model = compress.load(write(tmp_path))
    build("llama").save_pretrained(tmp_path / "dense")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert other.config._attn_implementation == steps.SDPA
    answer(other.eval())
    model.get_input_embeddings().weight.requires_grad_()
    model(tokens(1, 1)).logits.sum().backward()
    assert not taken
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_steps_say_the_same(tmp_path):
    model = compress.load(write(tmp_path)).eval()
    expected, logits = answer(model)
    torch._dynamo.utils.counters.clear()
    compress.compile_steps(model)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch._dynamo.config, "error_on_recompile", True)
        said, found = answer(model)
    assert torch.equal(said, expected)
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


def test_compiling_stays_with_the_object(tmp_path, monkeypatch):
    """It is not saved, a copy compiles its own steps, and who brings a cache keeps it."""
    model = compress.load(write(tmp_path)).eval()
    seen = []
    compress.compile_steps(model)
    monkeypatch.setattr(type(model), "generate", lambda self, ids, **asked: seen.append((self, asked)))
    other = copy.deepcopy(model)
    other.generate(tokens(1, 3))
    model.generate(tokens(1, 3), prompt_lookup_num_tokens=2)
    assert [each[0] for each in seen] == [other, model]
    assert seen[0][1]["cache_implementation"] == "static"
    assert seen[1][1] == {"prompt_lookup_num_tokens": 2}
    model.save_pretrained(tmp_path / "saved")
    assert compress.load(tmp_path / "saved").generation_config.cache_implementation is None


def test_what_cannot_be_compiled(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="Linear does not generate text"):
        compress.compile_steps(torch.nn.Linear(2, 2))
    model = compress.load(write(tmp_path))
    monkeypatch.setattr(steps, "compilers", list)
    with pytest.raises(InputError, match=r"no C\+\+ compiler"):
        compress.compile_steps(model)
