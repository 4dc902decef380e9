"""A run on a model in memory that fails leaves the model as it was, bit for bit, or says what it has changed."""

import errno

import pytest
import torch
from commands import fast_gptq
from models import build, tokens

import compress
from compress.base.errors import CompressError, InputError
from compress.base.progress import Silent
from compress.checkpoint.write import writer
from compress.checkpoint.write.writer import Writer
from compress.engine.restore import HOOKS
from compress.passes.gptq import GPTQ
from compress.passes.smoothquant import SmoothQuant

FOLDS = (compress.AWQ(group_size=16, rounding="none"), fast_gptq(group_size=16))
# Tables, folds, hooks on inputs and outputs, scales of caches.
EVERYTHING = (
    compress.Embeddings(scheme="w4a16"),
    SmoothQuant(activations="static", outputs="static"),
    compress.KVCache(granularity="head"),
)


class FailsAt(Silent):
    """Raises when so many steps are done."""

    def __init__(self, done: int, error: BaseException) -> None:
        self.done, self.error = done, error

    def step(self, done: int, total: int, what: str) -> None:
        if done == self.done:
            raise self.error


def failing(method, after: int, error: BaseException):
    """A method that raises at a later call."""
    calls = []

    def wrapped(*args, **kwargs):
        calls.append(1)
        if len(calls) > after:
            raise error
        return method(*args, **kwargs)

    return wrapped


def small():
    """A Llama in a mixed training mode, with gradients of its own, and a buffer that its forward changes in place."""
    model = build("llama").train()
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    model.model.layers[1].eval()
    model.register_buffer("seen", torch.zeros(()), persistent=False)
    model.model.layers[0].register_forward_pre_hook(lambda *_: model.seen.add_(1) and None)
    return model


def state(model):
    """All that a run may change, by place."""
    found = {f"parameter {n}": (p.detach().clone(), p.data_ptr()) for n, p in model.named_parameters()}
    found |= {f"gradient {n}": (p.grad.clone(), id(p.grad)) for n, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {n}": (b.clone(), id(b)) for n, b in model.named_buffers()}
    for name, module in model.named_modules():
        hooks = {key: list(getattr(module, key).items()) for key in HOOKS}
        found[f"module {name}"] = (hooks, set(module._non_persistent_buffers_set), module.training)
    return {**found, "use_cache": model.config.use_cache}


def assert_same(before, after):
    assert before.keys() == after.keys()
    for place, (value, *rest) in ((k, v if isinstance(v, tuple) else (v,)) for k, v in before.items()):
        now = after[place] if isinstance(after[place], tuple) else (after[place],)
        same = torch.equal(value, now[0]) if isinstance(value, torch.Tensor) else value == now[0]
        assert (same, tuple(rest)) == (True, now[1:]), place


@pytest.mark.first
@pytest.mark.parametrize("passes", [FOLDS, EVERYTHING], ids=["folds", "everything"])
def test_whatever_is_raised_the_model_is_as_it_was(passes, tmp_path, monkeypatch):
    rounding = GPTQ if passes is FOLDS else SmoothQuant
    tables = 2 if passes is EVERYTHING else 0
    memory = torch.OutOfMemoryError("out of memory")
    full = OSError(errno.ENOSPC, "No space left on device")
    cases = {
        "interrupted after the tables": {"reporter": FailsAt(tables or 1, KeyboardInterrupt())},
        "interrupted after the last block": {"reporter": FailsAt(tables + 2, KeyboardInterrupt())},
        "out of memory in the second block": {rounding: ("apply", 6, memory)},
        "a full disk at the second block": {Writer: ("_save", tables + 1, full)},
        "a full disk at the end": {writer: ("write_beside", 0, full)},
    }
    for what, failure in cases.items():
        model = small()
        before = state(model)
        output = tmp_path / what if failure.keys() & {Writer, writer} else None
        with monkeypatch.context() as patch:
            for kind, (name, after, error) in ((k, v) for k, v in failure.items() if k != "reporter"):
                patch.setattr(kind, name, failing(getattr(kind, name), after, error))
            expected = CompressError if output else KeyboardInterrupt if "reporter" in failure else type(memory)
            with pytest.raises(expected):
                compress.quantize(
                    model, passes, calibration=tokens(), output=output, verify=False, reporter=failure.get("reporter")
                )
        assert_same(before, state(model))
        compress.quantize(model, compress.RTN(group_size=16))  # nothing of the failed run is in the way


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_training_that_fails_leaves_the_gradients_of_its_caller(dtype):
    rounding, few = compress.RTN(group_size=16), {"rows": 2, "learning_rate": 1e-3, "held_out": 0.0}
    alone = compress.Train(**few, steps=9, teacher="none", logits=0.0, task=1.0)
    cases = {
        9: [compress.Structure(channels=0.25), alone],
        3: [rounding, compress.Train(**few, steps=3)],  # more than the blocks that are rounded first
        2: [rounding, compress.Reconstruct(steps=1, rows=2)],  # both blocks
    }
    for last, passes in cases.items():
        model = small().to(dtype)
        before = state(model)
        with pytest.raises(KeyboardInterrupt):
            compress.quantize(model, passes, calibration=tokens(), reporter=FailsAt(last, KeyboardInterrupt()))
        after = state(model)
        if passes[1] is alone:  # forwards before a cut leave their buffers
            before.pop("buffer seen"), after.pop("buffer seen")
        assert_same(before, after)


def test_gradients_of_the_caller_have_no_part_in_a_training():
    passes = [compress.RTN(scheme="w2a16", group_size=16), compress.Train(steps=1, learning_rate=1e-3, rows=2)]
    models = [build("llama"), build("llama")]
    for p in models[0].parameters():
        p.grad = torch.full_like(p, 1e3)
    for model in models:
        compress.quantize(model, passes, calibration=tokens())
    assert all(torch.equal(a, b) for a, b in zip(*(m.state_dict().values() for m in models), strict=True))


def test_without_restoring_the_exception_says_which_blocks_are_changed(monkeypatch):
    model = build("llama")
    before = state(model)
    with pytest.raises(KeyboardInterrupt) as stopped:
        compress.quantize(
            model, EVERYTHING[1:], calibration=tokens(), restore=False, reporter=FailsAt(1, KeyboardInterrupt())
        )
    assert stopped.value.__notes__ == ["the model is compressed in part and stays so, in model.layers.0: load it again"]
    model = build("llama")
    before = state(model)
    monkeypatch.setattr(SmoothQuant, "apply", failing(SmoothQuant.apply, 6, CompressError("it broke")))
    with pytest.raises(CompressError, match=r"^it broke; the model is compressed in part .* in model.layers.0: load"):
        compress.quantize(model, EVERYTHING[1:], calibration=tokens(), restore=False)
    after = state(model)
    # The block in which it broke is whole, hooks included.
    parts = [{k: v for k, v in found.items() if "layers.1" in k} for found in (before, after)]
    assert_same(*parts)
    up = "parameter model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(before[up][0], after[up][0])


def test_input_that_is_refused_while_it_runs_changes_nothing():
    model = small()
    before = state(model)
    wrong = [{"input_ids": tokens(), "position_ids": torch.full((6, 3), 2)}]
    with pytest.raises(InputError, match="cannot run calibration batch 1"):
        compress.quantize(model, EVERYTHING, calibration=wrong)
    assert_same(before, state(model))
