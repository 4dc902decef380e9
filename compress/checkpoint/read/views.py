"""Weight files seen in other names and layouts: tensors that are made of stored ones as they are read."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.checkpoint.read.configuration import Header
from compress.checkpoint.read.weight_files import WeightFiles


@dataclass(frozen=True)
class View:
    """A tensor that is made of stored ones. header: its shape, and safetensors' name of its dtype. of: the stored
    tensors, in the order in which `make` takes them."""

    header: Header
    of: tuple[str, ...]
    make: Callable[..., Tensor]


class ViewedFiles(WeightFiles):
    """Weight files with some tensors hidden, and views in their place."""

    def __init__(self, files: WeightFiles, hidden: Collection[str], views: Mapping[str, View]) -> None:
        self.files, self.views = files, views
        kept = {name: header for name, header in files.headers.items() if name not in hidden}
        self.headers = {**kept, **{name: view.header for name, view in views.items()}}
        self.stamps = files.stamps

    def __getitem__(self, name: str) -> Path:
        view = self.views.get(name)
        return self.files[name if view is None else view.of[0]]

    def __iter__(self) -> Any:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)

    @property
    def stored(self) -> Mapping[str, Header]:
        return self.files.stored

    @property
    def of_variant(self) -> bool:
        return False

    @property
    def paths(self) -> list[Path]:
        return self.files.paths

    def tensor(self, name: str) -> Tensor:
        view = self.views.get(name)
        if view is None:
            return self.files.tensor(name)
        return view.make(*(self.files.tensor(each) for each in view.of)).reshape(view.header[0])

    def stored_tensor(self, name: str) -> Tensor:
        return self.files.stored_tensor(name)


def reshape(files: WeightFiles, name: str, shape: tuple[int, ...]) -> View:
    """A view of one tensor in another shape."""
    assert prod(shape) == prod(files.headers[name][0])
    return View((shape, files.headers[name][1]), (name,), lambda tensor: tensor)
