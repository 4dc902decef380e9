"""The bytes of the tensors that live on a device for which the CPU stands, as a run goes: those that wait on the host
(`base.host_memory`) and the model's own do not count, nor what an operator takes inside itself."""

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from compress.base.host_memory import OnHost
from compress.engine.walk.state import MemoryMode
from compress.jobs.forecast import peak_memory


class LiveMemory(TorchDispatchMode):
    """Bytes that live now, the most so far, and of each size in bytes the most tensors so far."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now, self.peak = 0, 0
        self.alive, self.most = Counter[int](), Counter[int]()
        self.elsewhere = [t.untyped_storage() for t in (*model.parameters(), *model.buffers())]
        self.uncounted = {storage._cdata for storage in self.elsewhere}
        monkeypatch.setattr(OnHost, "of", self.put_aside)

    def put_aside(self, tensor: Tensor) -> OnHost:
        with _disable_current_modes():
            held = OnHost(tensor.clone(), tensor.device)
        self.elsewhere.append(held.tensor.untyped_storage())
        self.uncounted.add(self.elsewhere[-1]._cdata)
        return held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self.count(tensor.untyped_storage())
        return made

    def count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.sizes or key in self.uncounted:
            return
        self.sizes[key] = size
        self.now += size
        self.alive[size] += 1
        self.peak = max(self.peak, self.now)
        self.most[size] = max(self.most[size], self.alive[size])
        weakref.finalize(storage, self.forget, key)

    def forget(self, key: int) -> None:
        size = self.sizes.pop(key)
        self.now -= size
        self.alive[size] -= 1


def allow(monkeypatch: pytest.MonkeyPatch, mode: MemoryMode) -> None:
    """Let runs take this mode, whatever memory there is."""
    monkeypatch.setattr(peak_memory, "has_own_memory", lambda device: True)
    monkeypatch.setattr(peak_memory, "memory_modes", lambda plan, tokens, own: iter([mode]))
