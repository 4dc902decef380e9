"""Training in somebody else's loop: what is written is what the last forward computed with."""

import copy

import pytest
import torch
import transformers
from combinations import every
from commands import fast_gptq
from models import build, tokens
from places import RANKS
from processes import python
from torch import nn
from trainer_worker import Rows

import compress
from compress.base.errors import CompressError, InputError

DATA = {"calibration": tokens(8), "batch_size": 4}
TWO_BITS = fast_gptq(scheme="w2a16", group_size=16)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=tokens(4, seed=9)).logits.float()


def train(prepared: compress.Prepared, steps: int = 3, *, autocast: bool = False) -> torch.optim.AdamW:
    """A loop written by hand: the next token, on a few samples."""
    optimizer = torch.optim.AdamW(prepared.groups(1e-3, weight_decay=0.1))
    for step in range(steps):
        ids = tokens(4, seed=20 + step)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            prepared.model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


SCHEMES = [
    (TWO_BITS, "learned"),
    (compress.RTN(scheme="w8a8", activations="static", outputs="static"), "learned"),
    ([compress.SparseGPT(pattern="2:4"), fast_gptq(scheme="w4a16", group_size=16, grid="asymmetric")], "fitted"),
    ([compress.Magnitude(sparsity=0.5), compress.KVCache(granularity="head")], "fixed"),
]


@every("case", SCHEMES)
def test_a_loop_by_hand_leaves_what_its_last_forward_saw(tmp_path_factory, case):
    passes, scales = case
    output = tmp_path_factory.mktemp("out") / "out"
    model = build("llama")
    names = list(model.state_dict())
    prepared = compress.prepare_qat(model, passes, scales=scales, **DATA)
    assert prepared.model is model
    assert set(names) <= set(model.state_dict())
    before = logits(model)
    train(prepared)
    seen = logits(model)
    assert not torch.equal(seen, before)
    result = prepared.convert(output, verify=False)
    assert [name for name in model.state_dict() if not name.endswith("_scale")] == names  # of caches
    assert {type(m).__name__ for m in model.modules()} == {type(m).__name__ for m in build("llama").modules()}
    if case in (SCHEMES[1], SCHEMES[3]):  # inputs, or keys and values, are rounded
        torch.testing.assert_close(logits(compress.load(output)), seen, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(logits(compress.load(output, dequantize=True)), seen)
        assert torch.equal(logits(model), seen)
    assert any("a loop of their owner's" in note for note in result.record.notes)


def test_a_model_of_16_bits_by_name_under_autocast_keeps_its_companions(tmp_path):
    build("llama", torch.bfloat16).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    prepared = compress.prepare_qat(tmp_path / "model", TWO_BITS, **DATA)
    assert {p.dtype for p in prepared.model.parameters()} == {torch.float32}
    train(prepared, autocast=True)
    latent = copy.deepcopy({n: p.detach() for n, p in prepared.model.named_parameters() if "quantizer" not in n})
    rounded = {
        n: m.rounded_weight.detach() for n, m in prepared.model.named_modules() if hasattr(m, "weight_quantizer")
    }
    result = prepared.convert(tmp_path / "out", verify=False)
    loaded = compress.load(tmp_path / "out", dequantize=True)
    assert (tmp_path / "out" / "tokenizer_config.json").exists()
    assert {p.dtype for p in (*result.model.parameters(), *loaded.parameters())} == {torch.bfloat16}
    for name, p in loaded.named_parameters():
        seen = rounded.get(name.removesuffix(".weight"), latent[name])
        assert torch.equal(p, seen.bfloat16()), name


def test_training_goes_on_from_a_state_dict(tmp_path):
    prepared = compress.prepare_qat(build("llama"), TWO_BITS, **DATA)
    train(prepared)
    torch.save(prepared.model.state_dict(), tmp_path / "state.pt")
    again = compress.prepare_qat(build("llama"), TWO_BITS, **DATA)
    again.model.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(logits(again.model), logits(prepared.model))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # those of dynamo
@every("kind", ["llama", "gpt2"])
def test_blocks_compile_without_graph_breaks(tmp_path_factory, kind):
    """Of a Llama inputs, the embedding and keys and values are rounded, too."""
    model, codes = build(kind), compress.RTN(scheme="w4a8" if kind == "llama" else "w4a16", group_size=16)
    more = [compress.Embeddings(scheme="w4a16", group_size=16), compress.KVCache(granularity="head")]
    prepared = compress.prepare_qat(model, [codes, *(more if kind == "llama" else ())], **DATA)
    plain = logits(model)
    blocks = model.model.layers if kind == "llama" else model.transformer.h
    for block in blocks[:1]:
        block.compile(fullgraph=True, backend="eager")
    torch.testing.assert_close(logits(model), plain)
    train(prepared, steps=1)
    seen = logits(model)
    prepared.convert(tmp_path_factory.mktemp("out") / "out", verify=False)
    torch.testing.assert_close(logits(model), seen)
    torch._dynamo.reset()


def test_the_trainer_of_transformers_trains_what_is_prepared(tmp_path):
    pytest.importorskip("accelerate")
    prepared = compress.prepare_qat(build("llama"), TWO_BITS, **DATA)
    before = logits(prepared.model)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        max_steps=3,
        per_device_train_batch_size=4,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_steps=2,
        logging_strategy="no",
        dataloader_pin_memory=False,
    )
    optimizer = torch.optim.AdamW(prepared.groups(learning_rate=1e-3))
    transformers.Trainer(prepared.model, arguments, train_dataset=Rows(), optimizers=(optimizer, None)).train()
    seen = logits(prepared.model)
    assert not torch.equal(seen, before)
    prepared.convert(tmp_path / "out", verify=False)
    assert torch.equal(logits(compress.load(tmp_path / "out", dequantize=True)), seen)
    # Its checkpoints hold the quantizers, too: a trainer that resumes finds them.
    resumed = compress.prepare_qat(build("llama"), TWO_BITS, **DATA)
    optimizer = torch.optim.AdamW(resumed.groups(learning_rate=1e-3))
    trainer = transformers.Trainer(resumed.model, arguments, train_dataset=Rows(), optimizers=(optimizer, None))
    trainer.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-2"))
    torch.testing.assert_close(logits(resumed.model), seen, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_trainer_in_two_processes_trains_what_it_trains_in_one(tmp_path):
    """Replicas whose gradients are averaged (DDP, gloo), as `accelerate launch` starts them on several devices, and
    shards (FSDP2)."""
    pytest.importorskip("accelerate")
    for name, processes in (("one", 1), ("two", 2), ("sharded", 2)):
        (tmp_path / name).mkdir()
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", processes] if processes > 1 else []
        done = python(*launch, RANKS / "trainer_worker.py", tmp_path / name, processes, name)
        assert done.returncode == 0, done.stderr
    one, first, second = (torch.load(tmp_path / at) for at in ("one/seen-0.pt", "two/seen-0.pt", "two/seen-1.pt"))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, one, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.load(tmp_path / "sharded/seen-1.pt"), one, rtol=1e-5, atol=1e-5)
    written = compress.load(tmp_path / "sharded/out", dequantize=True)
    torch.testing.assert_close(logits(written), one, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(compress.load(tmp_path / "two" / "out", dequantize=True)), first)


def test_a_conversion_that_fails_can_be_tried_again(tmp_path, monkeypatch):
    model = build("llama", torch.bfloat16)
    prepared = compress.prepare_qat(model, TWO_BITS, **DATA)
    train(prepared)
    state, seen = copy.deepcopy(model.state_dict()), logits(model)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("compress.checkpoint.write.writer.write_beside", full)
        with pytest.raises(CompressError, match="no space left"):
            prepared.convert(tmp_path / "out", verify=False)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(logits(model), seen)
    prepared.convert(tmp_path / "out", verify=False, overwrite=True)
    with pytest.raises(InputError, match="converted already"):
        prepared.convert()


def test_what_is_refused_leaves_the_model_as_it_was():
    model = build("llama")
    before = copy.deepcopy(model.state_dict())
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(InputError, match="of which nothing is trained; quantize it by another pass"):
        compress.prepare_qat(model, compress.LowRank(share=0.9), **DATA)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.state_dict().keys() == before.keys()
    assert [type(m) for m in model.modules()] == kinds
    prepared = compress.prepare_qat(model, TWO_BITS, **DATA)
    with pytest.raises(InputError, match=r"a weight is torch.bfloat16, .* under torch.autocast"):
        prepared.model.to(torch.bfloat16)(input_ids=tokens())


def test_what_requires_no_gradient_stays_as_it_is():
    """A layer's scales, of its weight and of what it is given, with its weight."""
    model = build("llama")
    model.model.layers[0].requires_grad_(False)
    passes = [
        compress.RTN(scheme="w8a8", activations="static", outputs="static"),
        compress.Embeddings(scheme="w4a16", group_size=16),
    ]
    prepared = compress.prepare_qat(model, passes, **DATA)
    before = copy.deepcopy(model.state_dict())
    train(prepared)
    same = {
        name.startswith("model.layers.0.") for name, value in model.state_dict().items() if value.equal(before[name])
    }
    changed = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
    assert True in same
    assert not [name for name in changed if name.startswith("model.layers.0.")]
    for part in ("weight", "weight_quantizer.log_factor", "input_quantizer.log_factor"):
        assert f"model.layers.1.mlp.up_proj.{part}" in changed


def test_a_layer_that_nothing_calls_is_named():
    """A module that reads the weights of others, as a fused loss does, reads those that are trained."""

    class Reading(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, input):
            return nn.functional.linear(self.one(input), self.two.weight)

    prepared = compress.prepare_qat(Reading(), compress.RTN(group_size=16))
    assert prepared.model.two.weight is prepared.model.get_parameter("two.weight")
    prepared.model(torch.ones(1, 16))
    notes = prepared.convert().record.notes
    assert next(note for note in notes if "never called" in note).startswith("two: never called since prepare_qat")
