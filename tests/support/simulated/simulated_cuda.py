"""A simulated CUDA device, whose tensors have their values on the CPU.

An operation fails as on a real device where its tensors are on two devices, and where CUDA has no kernel for it
(products of integers, say). Our own operators compute as on the CPU. Not simulated: graphs, streams, times, memory.

As a plugin of pytest (`-p simulated_cuda`) it is the default device of all tests of the process. The library of
`simulated_cuda.cpp` has to be loaded before torch is: LD_PRELOAD names it.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch
import torch._dynamo  # noqa: F401 - before anything is replaced
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE, CPU = torch.device("cuda", 0), torch.device("cpu")
# Too old for Triton's kernels: what takes their place computes here.
CAPABILITY = (7, 0)
MEMORY = 80 * 2**30
aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
OF_FLOATS = {getattr(aten, name).default for name in ("mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm")}
IN_PLACE_SHAPES = {f"aten::{name}_" for name in ("t", "transpose", "squeeze", "unsqueeze", "resize", "set", "swapaxes")}
NEW_PARAMETER = torch.nn.Parameter.__new__
NATIVE = {name: getattr(Tensor, name) for name in ("__repr__", "__reduce_ex__", "__deepcopy__", "numpy")}
DATA = torch._C.TensorBase.__dict__["data"]
RUN_OF_THREADS = threading.Thread.run


class _Wrapper(Tensor):
    """A tensor without values. It has this class only while it is made: torch's own modes know only Tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("a wrapper is an ordinary tensor by now")


def there(values: Tensor) -> Tensor:
    """A tensor on the device."""
    wrapper = Tensor._make_wrapper_subclass(
        _Wrapper,
        values.size(),
        strides=values.stride(),
        storage_offset=values.storage_offset(),
        dtype=values.dtype,
        layout=values.layout,
        device=DEVICE,
        requires_grad=values.requires_grad,
    )
    wrapper._values = values
    wrapper.__class__ = Tensor
    return wrapper


def is_there(value) -> bool:
    return isinstance(value, Tensor) and "_values" in value.__dict__


def bare(value):
    """The values, on the CPU, of a tensor or of a list of tensors; anything else as it is."""
    if isinstance(value, Tensor):
        return value.__dict__.get("_values", value)
    return type(value)(map(bare, value)) if isinstance(value, list | tuple) else value


def tensors(values) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)


def check(func, args, ours: list[Tensor], others: list[Tensor]) -> None:
    """Raise where CUDA would, and for an operation that is not simulated."""
    if func in INDEXED:
        values = args[2] if len(args) > 2 else None
        apart = not is_there(args[0]) or (isinstance(values, Tensor) and values.dim() > 0 and not is_there(values))
    else:
        apart = func not in COPIES and any(other.dim() for other in others)
    if others and apart:
        shapes = [(str(each.device), *each.shape) for each in tensors(args)]
        raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu: {func} {shapes}")
    if func in OF_FLOATS and not ours[0].is_floating_point():
        raise RuntimeError(f"{func} is not implemented for {ours[0].dtype} on CUDA")
    if func is aten._int_mm.default and (len(args[0]) <= 16 or args[0].shape[1] % 8 or args[1].shape[1] % 8):
        raise RuntimeError(f"_int_mm of {[*args[0].shape]} and {[*args[1].shape]} on CUDA")
    assert func._schema.name not in IN_PLACE_SHAPES, f"{func} is not simulated"


class Simulation(TorchDispatchMode):
    """Runs operations with tensors of the device on their values."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # dynamo's wrapper of every call takes longer than the call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)
        ours, others = [], []
        for each in tensors((*args, *kwargs.values())):
            (ours if is_there(each) else others).append(each)
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        wanted = kwargs.get("device")
        if not ours and (wanted is None or wanted.type != "cuda"):
            return func(*args, **kwargs)
        if ours:
            check(func, args, ours, others)
        goes_there = is_there(args[0]) if func is aten.copy_.default else wanted is None or wanted.type == "cuda"
        if wanted is not None:
            kwargs = {**kwargs, "device": CPU if goes_there else wanted}
        if func is aten.histc.default:  # of integers, too, on CUDA
            return there(func(bare(args[0]).float(), *args[1:], **kwargs).to(args[0].dtype))
        wrappers = {id(bare(each)): each for each in ours}
        result = func(*map(bare, args), **{name: bare(value) for name, value in kwargs.items()})
        return self.wrapped(result, wrappers) if goes_there else result

    def wrapped(self, value, wrappers):
        """A result on the device: what an operation in place returns is the tensor that it was given."""
        if isinstance(value, Tensor):
            return wrappers[id(value)] if id(value) in wrappers else there(value)
        if isinstance(value, list | tuple):
            return type(value)(self.wrapped(each, wrappers) for each in value)
        return value


def set_data(self, value) -> None:
    DATA.__set__(self, value)
    values = value.__dict__.get("_values")  # of this tensor itself, perhaps
    self.__dict__.pop("_values", None)
    if values is not None:
        self._values = values


def of_values(name):
    """A method of tensors that looks at their memory, called on their values."""
    native = getattr(torch._C.TensorBase, name)
    return lambda self, *args, **kwargs: native(bare(self), *args, **kwargs)


def numpy(self, *args, **kwargs):
    if is_there(self):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")
    return NATIVE["numpy"](self, *args, **kwargs)


def deepcopied(self, memo):
    if not is_there(self) or isinstance(self, torch.nn.Parameter):
        return NATIVE["__deepcopy__"](self, memo)
    return memo.setdefault(id(self), self.detach().clone().requires_grad_(self.requires_grad))


def parameter(cls, data=None, requires_grad=True):
    """A new parameter. torch's own `__new__` takes the data of an ordinary tensor without asking any mode."""
    if not is_there(data):
        return NEW_PARAMETER(cls, data, requires_grad)
    made = data.detach()
    made.__class__ = cls
    return made.requires_grad_(requires_grad)


def run_thread(self) -> None:
    with Simulation():
        RUN_OF_THREADS(self)


class Stream:
    """A stream or an event: nothing waits for anything."""

    cuda_stream, device = 0, DEVICE

    def __init__(self, *_, **__) -> None:
        pass

    def __getattr__(self, name):
        return lambda *_: self

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        return None

    def query(self) -> bool:
        return True


def answering(value):
    return lambda *_, **__: value


# Of torch.cuda. Functions of their own each: dynamo keeps a table of them.
ANSWERS = {
    "is_available": True,
    "is_initialized": True,
    "_is_in_bad_fork": False,
    "_lazy_init": None,
    "device_count": 1,
    "current_device": 0,
    "set_device": None,
    "get_device_name": "simulated",
    "get_device_capability": CAPABILITY,
    "is_bf16_supported": True,
    "mem_get_info": (MEMORY, MEMORY),
    "get_per_process_memory_fraction": 1.0,
    "memory_allocated": 0,
    "memory_reserved": 0,
    "max_memory_allocated": 0,
    "reset_peak_memory_stats": None,
    "empty_cache": None,
    "synchronize": None,
    "current_stream": Stream(),
    "default_stream": Stream(),
    "is_current_stream_capturing": False,
    "manual_seed": None,
    "manual_seed_all": None,
    "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": None,
}


@contextmanager
def simulated() -> Iterator[None]:
    """Simulates a CUDA device in the body, and in the threads that it starts."""
    methods = {name: of_values(name) for name in ("data_ptr", "tolist", "untyped_storage")}
    methods |= {"numpy": numpy, "__deepcopy__": deepcopied, "data": property(DATA.__get__, set_data)}
    methods["__repr__"] = lambda self, **_: NATIVE["__repr__"](bare(self))
    methods["__reduce_ex__"] = lambda self, protocol: NATIVE["__reduce_ex__"](bare(self), protocol)
    cuda = {name: answering(value) for name, value in ANSWERS.items()}
    cuda |= {"Stream": Stream, "Event": Stream, "stream": lambda stream: stream}
    with ExitStack() as entered:
        everywhere = {
            Tensor: methods,
            torch.cuda: cuda,
            torch.nn.Parameter: {"__new__": parameter},
            threading.Thread: {"run": run_thread},
        }
        for owner, replaced in everywhere.items():
            for name, value in replaced.items():
                entered.enter_context(patch.object(owner, name, value))
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` on a device: on the CPU, and then a copy
        entered.callback(torch._C._set_only_lift_cpu_tensors, False)
        entered.enter_context(Simulation())
        yield


@pytest.fixture(scope="session", autouse=True)
def _simulated() -> Iterator[None]:
    with simulated():
        yield
