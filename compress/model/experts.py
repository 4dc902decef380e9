"""Experts that are linear layers: every pass treats them like any others.

While a model is calibrated, an expert computes more rows than are routed to it (`Calibration`): a few of the other
tokens too, with a small weight. An expert that is rarely chosen would otherwise be decided from a handful of tokens,
and one that is never chosen from none.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compress.base.collectives import Comm
from compress.base.errors import CompressError

GATE = "router or gate of experts"
# Shown the number of an expert, its tokens, what it returns for them, and the weights of that.
Watch = Callable[[int, Tensor, Tensor, Tensor], None]
# Each expert sees one of so many tokens, wherever they are routed.
STRIDE = 16
# The weight of these tokens together, in tokens that an expert gets on average.
POOLED = 0.1


@dataclass
class Calibration:
    """The routing of one micro-batch while it is calibrated. reference: True for the forward of the original model,
    whose experts are shown the tokens that those of the compressed model get, so that the two can be compared token by
    token. routes: the experts [T, top] of each token in the compressed model. tokens: bool mask of the tokens that are
    no padding; None: all of them. weight_M: of the rows that the expert at work is shown first; those behind them only
    make its output."""

    routes: dict[nn.Module, Tensor] = field(default_factory=dict)
    reference: bool = False
    tokens: Tensor | None = None
    weight_M: Tensor | None = None


_CALIBRATION: ContextVar[Calibration | None] = ContextVar("calibration of experts", default=None)


@contextmanager
def calibrating(calibration: Calibration) -> Iterator[None]:
    """Shows experts, in the body, the tokens that `Calibration` describes."""
    token = _CALIBRATION.set(calibration)
    try:
        yield
    finally:
        _CALIBRATION.reset(token)


class Expert(nn.Module):
    """One expert: two or three linear layers. `Experts` computes with them, in `opening`. apart: whether it has working
    copies only there, when its block is open."""

    apart = False
    opening: Callable[[], AbstractContextManager[None]] = nullcontext


class Experts(nn.Module):
    """Experts with a linear layer for each matrix, as a drop-in for a module of transformers that holds them in one
    parameter each. Attributes of that module are kept. ranks: those that hold a share of the experts each, and all see
    the same tokens (`share_experts`); None: this process holds all of them."""

    kind: type[nn.Module]
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]
    has_post_expert_norm: bool = False  # what transformers before 5.20 has no word for
    has_gate: bool
    is_concatenated: bool
    is_transposed: bool
    leaves: tuple[str, ...]
    ranks: Comm | None = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H]: the weighted sum over each token's experts. top_k_index: [T, top], E or more for none."""
        return self.watched(None, hidden_states, top_k_index, top_k_weights)

    def watched(self, see: Watch | None, *given: Tensor) -> Tensor:
        """`forward` of the same arguments; `see` is shown what every expert returns, with the tokens that it is for and
        their weights."""
        hidden_states, top_k_index, top_k_weights = given
        calibration = _CALIBRATION.get()
        out_TH, parts = torch.zeros_like(hidden_states), []
        for i, token, place, row, at in self._rows(top_k_index, calibration):
            y, weights = self._expert(i, hidden_states[row])[at], top_k_weights[token, place]
            if see is not None:
                see(i, token, y, weights)
            part = (y * weights[:, None]).to(out_TH.dtype)
            if self.ranks is None:
                out_TH.index_add_(0, token, part)
            else:
                parts.append((token, place, part))
        return out_TH if self.ranks is None else self._joined(out_TH, parts, top_k_index, calibration)

    def _joined(
        self, out_TH: Tensor, parts: Sequence[tuple[Tensor, ...]], index: Tensor, calibration: Calibration | None
    ) -> Tensor:
        """[T, H] `forward`, from what this rank's experts add: in the order of the experts, as one process adds. A
        collective. parts: tokens, which of their choices, what an expert adds. Raises CompressError, on every rank,
        where ranks have routed a token to different experts."""
        assert self.ranks is not None
        # Of each choice of a token: what its expert adds, and how many ranks have computed that.
        parts_TCH = out_TH.new_zeros(*index.shape, out_TH.shape[1] + 1)
        for token, place, part in parts:
            parts_TCH[token, place] = nn.functional.pad(part, (0, 1), value=1)
        parts_TCH = self.ranks.all_reduce(parts_TCH)
        due = index < len(self.numbers)
        if calibration is not None and not calibration.reference and calibration.tokens is not None:
            due = due & calibration.tokens.reshape(-1, 1)  # nobody computes padding
        if not torch.equal(parts_TCH[..., -1] == 1, due):
            raise CompressError("ranks route a token to different experts: use devices of one kind, or one rank")
        for place in index.argsort(dim=1, stable=True).unbind(1):
            out_TH += parts_TCH[torch.arange(len(index), device=index.device), place, :-1]
        return out_TH

    def owner(self, i: int) -> int:
        """The rank that holds an expert: each has as many, but for one, in their order."""
        return 0 if self.ranks is None else i * self.ranks.world // len(self.numbers)

    def computes(self, i: int) -> bool:
        """True for an expert that this process holds."""
        return self.ranks is None or self.owner(i) == self.ranks.rank

    def _gated(self, both: Tensor) -> Tensor:
        """The input of the last layer, from what transformers' parameter of gate and other projection returns."""
        own = getattr(self.kind, "_apply_gate", None)
        if own is not None:
            return own(self, both)
        gate, up = both.chunk(2, -1)
        return self.act_fn(gate) * up

    def _expert(self, i: int, x: Tensor) -> Tensor:
        expert: Any = self.get_submodule(str(i))
        *first, last = (getattr(expert, leaf) for leaf in self.leaves)
        with expert.opening():
            y = last(self._inner([layer(x) for layer in first]))
        return self.post_expert_norm(y) if self.has_post_expert_norm else y

    def _inner(self, outputs: list[Tensor]) -> Tensor:
        """The input of the last layer, from the outputs of the first ones: of gate and up, or of both side by side."""
        if not self.has_gate:
            return self.act_fn(outputs[0])
        if self.is_concatenated:
            return self._gated(outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1))
        gate, up = outputs[0].chunk(2, -1) if len(outputs) == 1 else outputs
        return self._gated(torch.stack([gate, up], -1).flatten(-2))

    def _rows(
        self, index: Tensor, calibration: Calibration | None
    ) -> Iterator[tuple[int, Tensor, Tensor, Tensor, Tensor | slice]]:
        """(Number of an expert that computes, its tokens, which of their choices it is, the rows that it computes, the
        places of its tokens among these), one expert after the other."""
        count = len(self.numbers)
        if calibration is None:
            for i in index.unique().tolist():
                if i < count and self.computes(i):
                    token, place = torch.where(index == i)
                    yield i, token, place, token, slice(None)
            return
        for i in filter(self.computes, range(count)):
            token, place = torch.where(index == i)
            shown, weight_M = self._shown(i, index, calibration, count)
            rest = token[~torch.isin(token, shown)]
            if not calibration.reference and calibration.tokens is not None:
                rest = rest[calibration.tokens.reshape(-1)[rest]]  # nobody reads the output of padding
            row = torch.cat([shown, rest])
            kept = torch.isin(token, row)
            token, place = token[kept], place[kept]
            where = torch.empty(len(index), dtype=torch.long, device=index.device)
            where[row] = torch.arange(len(row), device=index.device)
            calibration.weight_M = weight_M
            yield i, token, place, row, where[token]
            calibration.weight_M = None

    def _shown(self, i: int, index: Tensor, calibration: Calibration, count: int) -> tuple[Tensor, Tensor]:
        """(The tokens that statistics of an expert are about, in order, their weights)."""
        if not calibration.reference:
            calibration.routes[self] = index
        routes = calibration.routes.get(self, index)
        mine_T = (routes == i).any(1)
        pool_T = torch.zeros_like(mine_T)
        pool_T[::STRIDE] = True
        if calibration.tokens is not None:
            real = calibration.tokens.reshape(-1)
            mine_T, pool_T = mine_T & real, pool_T & real
            pool_T[real.nonzero()[:1]] = True
        weight = POOLED * routes.numel() / count / pool_T.sum()
        weight_T = torch.where(mine_T, torch.ones_like(weight), weight.clamp(max=1))
        shown = (mine_T | pool_T).nonzero()[:, 0]
        return shown, weight_T[shown]

    @property
    def numbers(self) -> list[str]:
        """The names of its experts."""
        return [name for name in self._modules if name.isdecimal()]


class SortedExperts(Experts):
    """Experts that are given as many rows each, sorted by expert."""

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """[E T, H]: the outputs of expert 0 for the first T rows, of expert 1 for the next ..."""
        return self.watched(None, hidden_states)

    def watched(self, see: Watch | None, *given: Tensor) -> Tensor:
        """As of `Experts`, of tokens that are given as other than zeros. Their weights are ones: what makes them count
        less is in what they are given as."""
        (hidden_states,) = given
        outputs = []
        for i, part in enumerate(hidden_states.view(len(self.numbers), -1, hidden_states.shape[-1])):
            outputs.append(self._expert(i, part) if self.computes(i) else torch.zeros_like(part))
            if see is not None:
                token = part.any(-1).nonzero()[:, 0]
                see(i, token, outputs[-1][token], torch.ones(len(token), device=part.device))
        return torch.cat(outputs) if self.ranks is None else self.ranks.all_reduce(torch.cat(outputs))


def share_experts(model: nn.Module, comm: Comm) -> None:
    """Leave each rank the values of its share of every mixture's experts; the others are then on the meta device."""
    for module in model.modules():
        if isinstance(module, Experts):
            module.ranks = comm
            for i, name in enumerate(module.numbers):
                for part in () if module.computes(i) else module.get_submodule(name).modules():
                    for key, p in part._parameters.items():
                        if p is not None:
                            part._parameters[key] = nn.Parameter(torch.empty_like(p, device="meta"), False)


def open_one_by_one(model: nn.Module) -> None:
    """Let experts have working copies only while they compute."""
    for module in model.modules():
        if isinstance(module, Expert):
            module.apart = True


def apart_in(module: nn.Module) -> dict[nn.Parameter, Expert]:
    """{parameter: its expert} of the experts inside a module that are opened one by one."""
    return {p: m for m in module.modules() if isinstance(m, Expert) and m.apart for p in m.parameters()}


def by_rank(module: nn.Module) -> set[nn.Parameter]:
    """The parameters inside a module that one rank holds, this one or another (`share_experts`)."""
    shared = (m for m in module.modules() if isinstance(m, Experts) and m.ranks is not None)
    return {p for m in shared for name in m.numbers for p in m.get_submodule(name).parameters()}


def gates(model: nn.Module) -> dict[str, nn.Module]:
    """{name: module} beside experts that weigh them: routers, and gates of shared experts. They stand next to a list of
    experts, and their weight has no more rows than there are experts."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        most = max(map(_experts_in, module.children()), default=0)
        for child_name, child in module.named_children() if most else ():
            weight = child._parameters.get("weight")
            if weight is not None and weight.ndim == 2 and len(weight) <= most:
                modules[f"{name}.{child_name}" if name else child_name] = child
    return modules


def _experts_in(module: nn.Module) -> int:
    """The number of experts of a module: of `Experts`, or of a list of modules that all have linear layers inside."""
    if isinstance(module, Experts):
        return len(module.numbers)
    if not isinstance(module, nn.ModuleList) or len(module) < 2:
        return 0
    return len(module) if all(any(isinstance(m, nn.Linear) for m in e.modules()) for e in module) else 0


def is_calibrating() -> bool:
    """True where a model is run for statistics of its layers."""
    return _CALIBRATION.get() is not None


def shown_now() -> Calibration | None:
    """The calibration that is going on, while an expert computes; None elsewhere."""
    calibration = _CALIBRATION.get()
    return None if calibration is None or calibration.weight_M is None else calibration
