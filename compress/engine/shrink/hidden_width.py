"""The choice of the channels of the hidden state that stay: `solvers.hidden_width` on a whole model."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compress.base.collectives import Comm
from compress.base.errors import CompressError, InputError
from compress.engine.residency import Local
from compress.model.calls import Call, real_tokens, removing
from compress.model.edits.changes import DATA, Applied, change, changing
from compress.model.edits.keep_channels import dimension_of
from compress.model.edits.width import Width, narrow
from compress.model.layers import is_layer
from compress.solvers.hidden_width import by_weights, scale_by_weights, staying

See = Callable[[str, Call, Tensor, Tensor], None]  # a norm's name, the call, what it was given and returned
OFFSETS = (0.0, 1.0)  # what a norm adds to its weight before it multiplies by it


@dataclass(frozen=True)
class Narrowing:
    """Narrowing of a model's hidden state to `count` channels. calls: of the whole model, on this rank; none: by
    weights. weighed: whether weights, not activations, rank the channels, where there are calls."""

    model: nn.Module
    width: Width
    count: int
    calls: Sequence[Call]
    weighed: bool
    residency: Local
    comm: Comm

    def edit(self) -> "NarrowHidden":
        """The edit that cuts the model."""
        with self.residency.open(self.model, keep=False), torch.no_grad():
            scores_H = by_weights(self.squares()) if self.weighed else self.activations()
            kept_N = self.comm.gather_objects(staying(scores_H, self.count).tolist())[0]
            kept_N = torch.tensor(kept_N)
            norms = self.width.norms(self.model)
            offsets = {name: offset_of(name, module, self.width.size) for name, module in norms.items()}
            scales = self.fitted(kept_N) if self.calls else dict.fromkeys(norms, self.by_writers(kept_N))
        return NarrowHidden(self.width, kept_N, scales, offsets)

    def squares(self, writing: bool = False) -> list[Tensor]:
        """[H] of each matrix that has the channels (of those that write them): the sum of squares of each channel."""
        sums, seen = [], set()
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for name, dims in self.width.axes.items():
            parameter, owner = parameters[name], self.model.get_submodule(name.rpartition(".")[0])
            if parameter.ndim < len("NK") or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            for dimension in dims:
                rows = is_layer(owner) and dimension == dimension_of(owner, "producers")
                if not writing or rows or isinstance(owner, nn.Embedding):
                    values = parameter.data.double().movedim(dimension, 0).flatten(1)
                    sums.append(values.square().sum(1).cpu())
        return sums

    def by_writers(self, kept_N: Tensor) -> float:
        """One number for all norms."""
        return scale_by_weights(self.squares(writing=True), kept_N)

    def activations(self) -> Tensor:
        """[H] what norms return, without its sign, a mean over tokens, added up. A collective."""
        norms = self.width.norms(self.model)
        if not norms:
            raise InputError(
                f"{type(self.model).__name__} has no norms, by which channels of the hidden state are ranked; give "
                "importance=magnitude"
            )
        total = {name: torch.zeros(self.width.size, dtype=torch.float64) for name in norms}
        tokens = dict.fromkeys(norms, 0)

        def see(name: str, call: Call, x: Tensor, y: Tensor) -> None:
            rows_MH = real_tokens(y, call)
            total[name] += rows_MH.double().abs().sum(0).cpu()
            tokens[name] += len(rows_MH)

        self.watch(norms, see)
        scores_H = torch.zeros(self.width.size, dtype=torch.float64)
        for name in norms:
            count = self.comm.all_reduce(torch.tensor(tokens[name]))
            scores_H += self.comm.all_reduce(total[name]) / count.clamp(min=1)
        if not bool(torch.isfinite(scores_H).all()):
            raise CompressError("norms return what is not finite; check the calibration data")
        return scores_H

    def fitted(self, kept_N: Tensor) -> dict[str, float]:
        """The number of each norm, by least squares. A collective."""
        norms = self.width.norms(self.model)
        cut: dict[str, nn.Module] = {}
        for name, module in norms.items():
            cut[name] = copy.deepcopy(module)
            narrow(cut[name], self.width.inside(name), kept_N)
        sums = {name: torch.zeros(2, dtype=torch.float64) for name in norms}

        def see(name: str, call: Call, x: Tensor, y: Tensor) -> None:
            kept = kept_N.to(x.device)
            bias = getattr(cut[name], "bias", None)
            own, wanted = cut[name](real_tokens(x, call)[..., kept]), real_tokens(y, call)[..., kept]
            own, wanted = (each.double() if bias is None else each.double() - bias.double() for each in (own, wanted))
            sums[name] += torch.stack([(own * wanted).sum(), own.square().sum()]).cpu()

        self.watch(norms, see)
        summed = {name: self.comm.all_reduce(each).tolist() for name, each in sums.items()}
        return {name: above / below if above > 0 and below > 0 else 1.0 for name, (above, below) in summed.items()}

    def watch(self, norms: Mapping[str, nn.Module], see: See) -> None:
        """Run the model on its calls; `see` is told what each norm was given and returned."""
        for call in self.calls:
            hooks = [norm.register_forward_hook(partial(_show, see, name, call)) for name, norm in norms.items()]
            with removing(hooks):
                self.model(*call.args, **call.kwargs)


@dataclass(frozen=True)
class NarrowHidden:
    """An edit of a whole model: the channels `kept_N` of its hidden state stay, and what each norm multiplies by, its
    weight and an offset, is scaled."""

    width: Width
    kept_N: Tensor
    scales: Mapping[str, float]
    offsets: Mapping[str, float]

    def apply(self, module: nn.Module, stored_dtypes: Mapping[str, torch.dtype] | None = None) -> Applied:
        """Cut the tensors of a model and scale its norms."""
        with changing() as done:
            done += narrow(module, self.width, self.kept_N).changes
            for name, scale in self.scales.items():
                weight = module.get_submodule(name).get_parameter("weight")
                after = scale * (weight.data.double() + self.offsets[name]) - self.offsets[name]
                done.append(change(weight, DATA, after.to(weight.dtype)))
        return Applied(tuple(done))

    def entry(self) -> dict[str, Any]:
        """The entry of compress.json about it."""
        gone = sorted(set(range(self.width.size)) - set(self.kept_N.tolist()))
        return {"of": self.width.size, "removed": gone, "scales": dict(self.scales)}


def _show(see: See, name: str, call: Call, norm: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
    see(name, call, args[0], output)


def offset_of(name: str, norm: nn.Module, size: int) -> float:
    """The offset that a norm adds to its weight: 0, or 1 where a weight of zero leaves channels as they are. Raises
    InputError for a norm that multiplies by something else."""
    twin = copy.deepcopy(norm)
    weight, bias = twin.get_parameter("weight"), getattr(twin, "bias", None)
    x = torch.arange(-size, size, dtype=weight.dtype, device=weight.device).reshape(2, size)
    for offset in OFFSETS:
        weight.data.fill_(-offset)
        y = twin(x)
        if float((y if bias is None else y - bias).abs().max()) == 0:
            return offset
    raise InputError(
        f"{name} ({type(norm).__name__}) multiplies by neither its weight nor one more, so it cannot be scaled for "
        "fewer channels; leave hidden out"
    )
