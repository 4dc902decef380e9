"""Operators: what goes around torch's Python layers gives the same, and what needs them gets them."""

import pytest
import torch
from sums import entries_of, planar_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import CustomOpDef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from compress.base.errors import InputError
from compress.kernels.cpu import direct
from compress.kernels.operators import sparse
from compress.kernels.operators import words as ops
from compress.kernels.operators.register import needs_dispatch


def arguments(dtype=torch.bfloat16):
    weight = planar_of(48, 256, 4, 64, True, dtype)
    x = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    return x, *weight[:3], torch.ones(48), 4, 64


@pytest.fixture(autouse=True)
def by_python(monkeypatch):
    """Leaves nothing to the operators of C++."""
    monkeypatch.setattr(direct, "product", lambda *_: None)


@pytest.fixture
def dispatched(monkeypatch):
    """Names of the operators that torch has called."""
    called = []
    through = CustomOpDef.__call__
    monkeypatch.setattr(CustomOpDef, "__call__", lambda op, *a, **k: called.append(op._name) or through(op, *a, **k))
    return called


class Plain(torch.Tensor):
    """A subclass that adds nothing."""


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_eager_calls_without_gradient_are_the_same_bit_for_bit(dispatched):
    given, entries = arguments(), entries_of(48, 256, 0.1, torch.bfloat16)[0]
    for op, words in (
        (ops.words_linear, given),
        (ops.words_linear, (*given, -1)),
        (sparse.sparse_linear, (given[0], *entries, None, 256)),
        (ops.words_linear, (*given, None, False, None, False, *entries)),
    ):
        direct = op(*words)
        assert not dispatched
        registered = op.registered(*words)
        assert torch.equal(direct, registered)
        assert (direct.grad_fn, direct.requires_grad, direct._is_view()) == (None, False, registered._is_view())
        dispatched.clear()


def test_a_recorded_gradient_passes_the_dispatcher(dispatched):
    x, *weight = arguments(torch.float32)
    out = ops.words_linear(x.requires_grad_(), *weight)
    assert out.grad_fn is not None
    assert len(dispatched) == 1
    with torch.no_grad():
        assert torch.equal(ops.words_linear(x, *weight), out)
    with torch.inference_mode():
        assert ops.words_linear(x, *weight).is_inference()
    assert len(dispatched) == 1
    # What is not recorded can be written to, and recorded then.
    changed = ops.words_linear(x.detach(), *weight)
    changed += x.sum()
    changed.sum().backward()
    assert (x.grad == changed.numel()).all()


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning")
def test_whatever_looks_at_operators_sees_them(dispatched):
    given = arguments(torch.float32)
    with Seen() as seen:
        ops.words_linear(*given)
    assert seen.names == ["compress::words_linear"]
    with torch.profiler.profile(acc_events=True) as profile:
        ops.words_linear(*given)
    assert "compress::words_linear" in {event.key for event in profile.key_averages()}
    traced = torch.jit.trace(lambda x: ops.words_linear(x, *given[1:]), given[0], check_trace=False)
    assert torch.equal(traced(given[0] + 1), ops.words_linear(given[0] + 1, *given[1:]))
    with FakeTensorMode() as mode:
        fake = ops.words_linear(*(mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in given))
    assert (type(fake).__name__, fake.shape) == ("FakeTensor", (2, 3, 48))


def test_what_needs_the_dispatcher():
    given = arguments(torch.float32)
    assert not needs_dispatch(given)
    assert needs_dispatch((given[0].as_subclass(Plain), *given[1:]))
    assert needs_dispatch((given[0], "words"))
    assert torch.equal(ops.words_linear(given[0]._neg_view(), *given[1:]), ops.words_linear(-given[0], *given[1:]))
    with Functions():
        assert needs_dispatch(given)
    with torch.autograd.forward_ad.dual_level():
        assert needs_dispatch(given)
    inside = []
    torch.func.vmap(lambda x: inside.append(needs_dispatch((x, *given[1:]))) or x)(given[0])
    assert inside == [True]
    assert not needs_dispatch(given)


def test_refusals_are_the_same(dispatched):
    x, *weight = arguments()
    for op in (ops.words_linear, ops.words_linear.registered):
        with pytest.raises(InputError, match="x has 100 columns"):
            op(x[..., :100], *weight)
