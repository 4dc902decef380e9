"""Capture and suspended forward: same numbers as the model itself, one forward per block and micro-batch."""

from collections import namedtuple

import pytest
import torch
from combinations import each, every
from mixtures import made
from models import DECODERS, FAMILIES, build, tokens
from replay_helper import replay
from torch import nn

import compress
from compress.base.collectives import Comm
from compress.base.errors import CompressError
from compress.data.text import batches_of
from compress.engine.layer_versions import Versions
from compress.engine.residency import Local
from compress.engine.walk.capture import capture
from compress.engine.walk.decide import decide
from compress.engine.walk.forward import suspended_forward
from compress.engine.walk.sites import structure_of
from compress.engine.walk.state import Streams
from compress.jobs.forecast import peak_memory
from compress.model.calls import Call, hidden_of, real_tokens, token_mask, without_cache, without_data
from compress.model.layers import find_stacks, layers_of

PLAIN = {"drift": 0.0, "clip": False, "refit": 0, "sweeps": 0}


def captured(model, batches, residency=None):
    residency = residency or Local(torch.device("cpu"))
    (stack,) = find_stacks(model)
    with without_cache(model):
        return stack, capture(model, stack, batches, residency)


@pytest.mark.parametrize("kind", [*DECODERS, "bert"])
def test_chained_blocks_compute_what_the_model_computes(kind):
    model = build(kind)
    batches = batches_of(tokens(), 4)
    stack, calls = captured(model, batches)
    expected: list[torch.Tensor] = []
    last = stack.blocks[-1][1]
    hook = last.register_forward_hook(lambda _, __, out: expected.append(hidden_of(out)))
    with torch.no_grad():
        for batch in batches:
            model(**batch)
        hook.remove()
        for j in range(len(batches)):
            hidden = calls[0][j].hidden
            for i, (_, block) in enumerate(stack.blocks):
                call = calls[i][j].with_hidden(hidden)
                hidden = hidden_of(block(*call.args, **call.kwargs))
            torch.testing.assert_close(hidden, expected[j], rtol=0, atol=0)


def test_sliding_and_full_attention_blocks_keep_their_own_masks():
    # Gemma 2 alternates them; 16 tokens are longer than its window of 4.
    _, calls = captured(build("gemma2"), batches_of(tokens(), 6))
    sliding, full = (of_block[0].kwargs["attention_mask"] for of_block in calls)
    assert sliding is None or full is None or not torch.equal(sliding, full)


def test_capture_leaves_the_model_as_it_was():
    model = build("llama")
    blocks = list(model.model.layers)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    captured(model, batches_of(tokens(), 3))
    assert list(model.model.layers) == blocks
    assert model.config.use_cache is True
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_layers_that_read_one_tensor_form_one_site():
    model = build("llama")
    stack, calls = captured(model, batches_of(tokens(), 6))
    name, block = stack.blocks[0]
    found = structure_of(block, calls[0], layers_of(block, name))
    inside = [[n.rsplit(".", 1)[1] for n in site] for site in found.sites]
    assert inside == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    assert found.traced
    assert found.unreached == ()
    assert found.repeated == ()


class Shared(nn.Module):
    """A block that calls one layer twice, another never, and branches on data."""

    def __init__(self, branch: bool) -> None:
        super().__init__()
        self.twice, self.once, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.branch = branch

    def forward(self, x):
        x = self.once(self.twice(self.twice(x)))
        if self.branch and float(x.sum()) > 1e9:
            return -x
        return x


@pytest.mark.parametrize("branch", [False, True])
def test_structure_names_layers_that_cannot_be_calibrated(branch):
    block = Shared(branch)
    call = Call((torch.randn(2, 3, 8),), {}, 0, None)
    found = structure_of(block, [call], layers_of(block, "b"))
    assert found.sites == (("b.once",),)
    assert found.unreached == ("b.never",)
    assert found.repeated == ("b.twice",)
    assert found.traced is not branch


# An encoder-decoder runs as one block; its calibration needs decoder inputs.
@every(("kind", "drift"), each(sorted(FAMILIES.keys() - {"t5"}), [0.0, 1.0]))
def test_each_stream_runs_each_block_once_per_micro_batch(kind, drift):
    model = build(kind)
    counts: dict[nn.Module, int] = {}
    (stack,) = find_stacks(model)
    for _, block in stack.blocks:
        original = block.forward

        def counting(*args, block=block, original=original, **kwargs):
            hidden = args[0] if args else next(iter(kwargs.values()))
            if type(hidden) is torch.Tensor:  # tracing runs on fake tensors, at no cost
                counts[block] = counts.get(block, 0) + 1
            return original(*args, **kwargs)

        block.forward = counting
    options = {**PLAIN, "drift": drift}
    result = compress.quantize(model, compress.GPTQ(group_size=16, **options), calibration=tokens(6), batch_size=2)
    streams = 2 if drift else 1
    assert list(counts.values()) == [3 * streams] * len(stack.blocks)
    assert result.record.block_forwards == 3 * streams * len(stack.blocks)


@pytest.mark.parametrize("drift", [0.0, 1.0])
def test_suspended_forward_decides_the_codes_of_a_replay_in_a_fraction_of_the_forwards(drift):
    p = compress.GPTQ(group_size=16, statistics="float64", **{**PLAIN, "drift": drift})
    batches = batches_of(tokens(), 2)
    model = build("llama")
    expected, replayed = replay(model, p, batches)
    ours = build("llama")
    result = compress.quantize(ours, p, calibration=tokens(), batch_size=2)
    for name, codes in expected.items():
        scheme = ours.get_submodule(name).weight
        assert torch.equal(scheme, model.get_submodule(name).weight), name
        assert codes.shape == scheme.shape
    assert replayed == 5 * result.record.block_forwards


@pytest.mark.first
@pytest.mark.parametrize(
    ("make", "p"),
    [
        (lambda: build("llama"), compress.GPTQ(group_size=16)),
        (lambda: build("llama"), compress.SmoothQuant()),
        (lambda: build("llama"), (compress.Rotation(online=True), compress.GPTQ(scheme="w4a4", group_size=16))),
        (lambda: made("deepseek-v3"), compress.GPTQ(group_size=16, sweeps=0)),
    ],
    ids=["drift", "folded, inputs rounded", "rotated online", "experts"],
)
def test_forwards_that_are_repeated_for_lack_of_memory_give_the_same_values(make, p, monkeypatch):
    kept, repeated = make(), make()
    asked = {"calibration": tokens(6), "batch_size": 2}
    before = compress.quantize(kept, p, **asked).record
    monkeypatch.setattr(peak_memory, "available_bytes", lambda _: 0)
    after = compress.quantize(repeated, p, **asked).record
    (note,) = [note for note in after.notes if note not in before.notes]
    assert note.startswith("memory: to keep all forwards of a block would take ")
    assert after.block_forwards > 2 * before.block_forwards
    assert [each.figures.get("loss") for each in after.layers] == [each.figures.get("loss") for each in before.layers]
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), repeated.parameters(), strict=True))


class Waiting:
    """A block of two layers, the first with a hook of its own, and two micro-batches on their way into it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.block[0].register_forward_pre_hook(lambda _, args: (args[0] + 1,))
        self.layers = layers_of(self.block, "")
        self.calls = [Call((torch.randn(2, 3, 16),), {}, 0, None) for _ in range(2)]
        self.versions = Versions()

    def hooks(self) -> list[int]:
        return [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in self.block]

    @torch.no_grad()
    def forward(self, visit, reference=(), repeats=False):
        sites = [[layer] for layer in self.layers]
        return suspended_forward(self.block, self.calls, sites, visit, reference, self.versions, repeats=repeats)

    @torch.no_grad()
    def plain(self) -> list[torch.Tensor]:
        return [self.block(*call.args) for call in self.calls]

    def round(self, layer) -> None:
        p = compress.RTN(scheme="w8a8", group_size=-1)
        with Local(torch.device("cpu")).open(self.block) as opened:
            self.versions.install(layer, decide(p, [layer], opened, Comm())[layer.name])


def same(some, others):
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("repeats", [False, True])
def test_rounding_that_is_decided_while_forwards_wait_acts_when_they_go_on(repeats):
    waiting = Waiting()
    before = waiting.plain()
    seen = {}

    def visit(site, arrivals):
        seen[site[0].name] = [arrival.x_MK for arrival in arrivals]
        waiting.round(site[0])
        assert same(seen[site[0].name], [arrival.x_MK for arrival in arrivals])

    outputs, others, begun = waiting.forward(visit, waiting.calls, repeats)
    # Of two streams and micro-batches: one each; or two for each of two sites, and one for the outputs.
    assert begun == (2 * 2 * 5 if repeats else 2 * 2)
    assert same(outputs, waiting.plain())
    assert not same(outputs, before)
    assert same(others, before)
    # What is collected is what the layer's own hook makes of its input, before it is rounded.
    assert same(seen["0"], [call.hidden.flatten(0, 1) + 1 for call in waiting.calls])
    with waiting.versions.original():
        assert same(waiting.plain(), before)


def test_layers_that_are_not_rounded_have_no_hooks_afterwards():
    waiting = Waiting()
    waiting.forward(lambda site, _: waiting.round(site[0]) if site[0].name == "2" else None)
    assert waiting.hooks() == [1, 0, 1]

    def fail(site, arrivals):
        list(arrivals)
        raise CompressError("it broke")

    waiting = Waiting()
    with pytest.raises(CompressError, match="it broke"):
        waiting.forward(fail)
    assert waiting.hooks() == [1, 0, 0]


def test_streams_hand_hidden_states_on_and_leave_a_whole_model_alone():
    old, new = torch.zeros(1, 2, 4), torch.ones(1, 2, 4)
    own = Call((old,), {"mask": 7}, 0, None)
    streams = Streams([Call((old,), {"mask": 1}, 0, None)], []).after([(new, "rest")], []).called_as([own])
    assert streams.calls[0].hidden is new
    assert streams.calls[0].kwargs == {"mask": 7}
    assert not streams.reference
    whole = Streams([Call((), {"input_ids": old}, None, None)], [])
    assert whole.end
    assert whole.after([None], []).called_as([own]) is whole


def test_pad_tokens_never_count():
    ids, extra = tokens(4, 12), 5
    padded = torch.cat([ids, torch.zeros(4, extra, dtype=torch.int64)], 1)
    mask = torch.cat([torch.ones(4, 12), torch.zeros(4, extra)], 1).to(torch.int64)
    p = compress.GPTQ(group_size=16, statistics="float64", **{**PLAIN, "drift": 1.0})
    short, long = build("llama").double(), build("llama").double()
    one = compress.quantize(short, p, calibration=[{"input_ids": ids}])
    two = compress.quantize(long, p, calibration=[{"input_ids": padded, "attention_mask": mask}])
    assert [r.figures["tokens"] for r in two.record.layers] == [48] * 14
    assert [r.figures["loss"] for r in one.record.layers] == pytest.approx(
        [r.figures["loss"] for r in two.record.layers], rel=1e-6
    )
    for (name, a), b in zip(short.named_parameters(), long.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=name)


def test_padding_that_cannot_be_matched_is_refused():
    call = Call((), {}, 0, token_mask({"attention_mask": torch.tensor([[1, 0]])}))
    with pytest.raises(CompressError, match="padding mask"):
        real_tokens(torch.zeros(3, 4), call)


def test_a_model_that_changes_the_hidden_state_between_blocks_runs_as_one_block():
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x) + 1
            return x

    torch.manual_seed(0)
    model, x = Between(), torch.randn(64, 8)
    expected = model(x)
    p = compress.GPTQ(scheme="w8a16", group_size=-1)
    result = compress.quantize(model, p, calibration=[{"x": x}])
    assert any("one block" in note for note in result.record.notes)
    assert len(result.record.layers) == 2
    assert (model(x) - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("kind", ["dictionary", "named tuple"])
def test_a_model_that_reads_what_its_blocks_return_by_name_runs_as_one_block(kind):
    """SqueezeBERT's blocks return dictionaries, Reformer's named tuples."""
    Named = namedtuple("Named", ["inner"])

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            found = torch.relu(self.linear(x))
            return {"inner": found} if kind == "dictionary" else Named(found)

    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)["inner"] if kind == "dictionary" else layer(x).inner
            return x

    torch.manual_seed(0)
    model, x = ByName(), torch.randn(64, 8)
    expected = model(x)
    result = compress.quantize(model, compress.GPTQ(scheme="w8a16", group_size=-1), calibration=[{"x": x}])
    assert any("one block" in note for note in result.record.notes)
    assert len(result.record.layers) == 2
    assert (model(x) - expected).norm() < 0.02 * expected.norm()


def test_what_a_block_keeps_of_a_call_without_data_is_forgotten():
    """LeViT's attention keeps its biases for the next call."""

    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.bias = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
            self.kept, self.calls = {}, [0]

        def forward(self, x):
            self.latest = self.kept.setdefault("bias", 2 * self.bias)
            self.calls.append(len(x))
            return x + self.linear(x) + self.latest

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Keeping() for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    torch.manual_seed(0)
    model, x = Model(), torch.randn(64, 8)
    with without_data(model) as mode:
        model(mode.from_tensor(x))
    assert all((block.kept, block.calls, hasattr(block, "latest")) == ({}, [0], False) for block in model.layers)
    result = compress.quantize(model, compress.GPTQ(scheme="w8a16", group_size=-1), calibration=[{"x": x}])
    assert len(result.record.layers) == 2
    assert torch.isfinite(model(x)).all()


def test_a_block_that_tells_the_sizes_it_has_made_is_not_stood_in_for():
    """The stages of Swin halve the image, and tell the next one its height and width."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 8)

        def forward(self, x, size):
            halved = self.linear(x.view(len(x), size // 2, 16))
            return halved, size // 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Stage() for _ in range(3))

        def forward(self, x):
            size = x.shape[1]
            for layer in self.layers:
                x, size = layer(x, size)
            return x

    torch.manual_seed(0)
    result = compress.quantize(Model(), compress.GPTQ(group_size=-1), calibration=[{"x": torch.randn(16, 8, 8)}])
    assert len(result.record.layers) == 3
    assert any("one block" in note for note in result.record.notes)


def test_blocks_that_are_lists_of_modules_are_called_one_by_one_by_the_model():
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(2))

        def forward(self, x):
            for stage in self.stages:
                for layer in stage:
                    x = torch.relu(layer(x))
            return x

    torch.manual_seed(0)
    made = compress.quantize(Lists(), compress.GPTQ(group_size=-1), calibration=[{"x": torch.randn(64, 8)}])
    assert len(made.record.layers) == 4


def test_comm_of_one_process_changes_nothing():
    comm, x = Comm(), torch.arange(6.0).view(3, 2)
    assert comm.all_reduce(x.clone()).equal(x)
    assert comm.gather_rows(x, [3]).equal(x)
    assert comm.rows_of(3) == slice(0, 3)
    assert comm.assign({"a": 1.0, "b": 2.0}) == {"a": 0, "b": 0}
