"""The arguments of `quantize` in one value, and the checks that need no model."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.base.byte_sizes import parse_bytes
from compress.base.errors import InputError, one_of
from compress.data.bos import PLACES
from compress.engine.plan.plan import Plan, plan
from compress.model.layers import FLOATS
from compress.model.patterns import compiled
from compress.passes.protocol.base import Pass
from compress.passes.protocol.recipe import describe
from compress.weights.formats.sparse24 import TWO_OF_FOUR

STORES = (TWO_OF_FOUR,)
Calibration = str | Tensor | Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of `quantize`, which says what they mean."""

    model: nn.Module | str | Path
    passes: tuple[Pass, ...] = ()
    calibration: Calibration | None = None
    training: Calibration | None = None
    samples: int | None = None
    length: int | None = None
    bos: str | None = None
    batch_size: int = 8
    ignore: Sequence[str] = ()
    one_block: bool = False
    convolutions: bool | None = None
    experts: bool = False
    drop_zeros: bool = False
    output: str | Path | None = None
    resume: bool = False
    overwrite: bool = False
    verify: bool | None = None
    store: str | None = None
    shard_size: int | str | None = None
    keep_codes: bool = False
    device: str | torch.device | None = None
    dtype: torch.dtype | None = None
    fsdp: bool | str = False
    restore: bool = True
    spill: str | Path | None = None
    trust_remote_code: bool = False

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "Request":
        """The request that a call's arguments make, checked; those that are none of `quantize` are left out."""
        known = {name: value for name, value in arguments.items() if name in cls.__dataclass_fields__}
        request = cls(**{**known, "passes": several(known.get("passes"))})
        request.check()
        return request

    @property
    def folder(self) -> Path | None:
        """The model's directory, if it is one by its name."""
        return Path(self.model) if isinstance(self.model, str | Path) else None

    @property
    def shard_bytes(self) -> int | None:
        """The most data in a weight file, as it was given."""
        return None if self.shard_size is None else parse_bytes(str(self.shard_size), "shard size")

    def match(self, model: nn.Module, one_block: bool = False, valued: bool = True) -> Plan:
        """The passes matched with layers of a model. one_block, valued: as in `engine.plan.plan`."""
        one_block = one_block or self.one_block
        return plan(model, self.passes, self.ignore, one_block, self.convolutions, valued, self.experts)

    def check(self) -> None:
        """Refuse arguments that are wrong whatever the model is."""
        self._check_extent()
        self._check_data()
        if self.dtype is not None and self.dtype not in FLOATS:
            raise InputError(f"dtype {self.dtype!r}; allowed: {', '.join(map(str, FLOATS))}")
        try:
            json.dumps(describe(self.passes))
        except TypeError as error:
            raise InputError(
                f"a pass has an option that cannot be recorded ({error}); use numbers, words and lists"
            ) from None
        self._check_output()

    def _check_extent(self) -> None:
        if isinstance(self.ignore, str):
            raise InputError(f"ignore: {self.ignore!r} is one pattern; give a list of them, [{self.ignore!r}]")
        for pattern in self.ignore:
            compiled(pattern)

    def _check_data(self) -> None:
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise InputError(f"batch size {self.batch_size!r}; allowed: 1 or more")
        for what, value in (("samples", self.samples), ("length", self.length)):
            if value is not None and not isinstance(value, int):
                raise InputError(f"{what} {value!r}; it must be a whole number")
        if self.bos is not None:
            one_of("bos", self.bos, PLACES)

    def _check_output(self) -> None:
        """Refuse what is about an output where there is none, and the other way round."""
        if self.keep_codes and self.output is not None:
            raise InputError("keep_codes is for a model that stays in memory; drop it, the output holds the codes")
        if (self.resume or self.overwrite or self.verify) and self.output is None:
            raise InputError("resume, overwrite and verify need an output")
        if self.store is not None:
            one_of("store", self.store, STORES)
        if self.store is not None and self.output is None:
            raise InputError("store is how the output is written; give an output or leave it out")
        if self.shard_bytes is not None and self.output is None:
            raise InputError("shard_size is of the output's files; give an output or leave it out")
        check_apart(self.output, self.spill)
        if isinstance(self.model, nn.Module) and self.verify and not hasattr(self.model, "config"):
            raise InputError(
                "verify reloads the output by its configuration, which this model has none of; leave it out"
            )


def check_apart(output: str | Path | None, spill: str | Path | None) -> None:
    """Raises InputError for a folder of large tensors that is the output or lies in it: the output appears when it is
    complete, and that name would be taken."""
    if output is None or spill is None:
        return
    whole, folder = Path(output).absolute(), Path(spill).absolute()
    if any(folder.is_relative_to(place) for place in (whole, Path(f"{whole}.partial"))):
        raise InputError(f"spill {str(spill)!r} is the output {str(output)!r}, or lies in it; give another")


def several(given: Any) -> tuple[Pass, ...]:
    """The passes that were given: one, or several."""
    if isinstance(given, Pass):
        return (given,)
    if isinstance(given, str | type) or not isinstance(given, Iterable):
        raise InputError(f"passes: {given!r} is no pass; give one, like compress.GPTQ(scheme='w4a16'), or a list")
    passes = tuple(given)
    if not passes:
        raise InputError("no pass given; give at least one, like RTN() or GPTQ()")
    for p in passes:
        if not isinstance(p, Pass):
            raise InputError(f"passes: {p!r} is no pass; give instances, like compress.GPTQ(scheme='w4a16')")
    return passes
