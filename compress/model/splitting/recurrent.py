"""LSTM, GRU and RNN of torch as linear layers, one for each weight, with the recurrence written out.

    lstm.weight_ih_l0 [4H, K], lstm.bias_ih_l0      ->    lstm.ih_l0   reads x_t
    lstm.weight_hh_l0 [4H, H], lstm.bias_hh_l0      ->    lstm.hh_l0   reads h_(t-1)
    lstm.weight_hr_l0 [P, H]  (projections)         ->    lstm.hr_l0   reads o_t tanh(c_t)

    LSTM   i, f, g, o = x W_ih + h W_hh      c = sigmoid(f) c + sigmoid(i) tanh(g)      h = sigmoid(o) tanh(c)
    GRU    r, z, n    = x W_ih , h W_hh      n = tanh(n_x + sigmoid(r) n_h)             h = n + sigmoid(z) (h - n)
    RNN                                      h = tanh or relu(x W_ih + h W_hh)

The layer on x_t is called once, with all steps. The others are called at every step. While a model is calibrated they
are first called once with what they read at all steps, for the weights as they are so far: statistics see every row,
exactly once. What that call returns nobody reads; the steps are then taken with what was decided.

Shapes: B sequences, T steps, S rows of all steps, H the state, K inputs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from compress.base.errors import InputError
from compress.model.experts import is_calibrating
from compress.model.splitting.stand_in import linear_of, take_attributes

State = tuple[Tensor, ...]  # (h,), or (h, c) of an LSTM
LAYERS = (nn.LSTM, nn.GRU, nn.RNN)
CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)

_STEPPING: ContextVar[bool] = ContextVar("inside the steps of a recurrence", default=False)


def is_step() -> bool:
    """True inside the steps of a recurrence, where calls of layers are no new input for statistics."""
    return _STEPPING.get()


@contextmanager
def _steps() -> Iterator[None]:
    token = _STEPPING.set(True)
    try:
        yield
    finally:
        _STEPPING.reset(token)


def next_state(mode: str, of_input: Tensor, of_state: Tensor, state: State) -> State:
    """The next state, not projected. of_input, of_state: the products with x_t and h_(t-1), biases included."""
    if mode == "LSTM":
        i, f, g, o = (of_input + of_state).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if mode == "GRU":
        (r, z, n), (r_h, z_h, n_h) = of_input.chunk(3, -1), of_state.chunk(3, -1)
        new = torch.tanh(n + (r + r_h).sigmoid() * n_h)
        return (new + (z + z_h).sigmoid() * (state[0] - new),)
    total = of_input + of_state
    return (total.relu() if mode == "RNN_RELU" else total.tanh(),)


@dataclass(frozen=True)
class Timeline:
    """The steps of a batch of sequences: along a dimension of a tensor, or rows of a PackedSequence. sizes: sequences
    that have each step, of a packed one; None where all have all."""

    dim: int
    sizes: list[int] | None = None

    def apart(self, x: Tensor) -> Sequence[Tensor]:
        """[B, F] of each step."""
        return x.unbind(self.dim) if self.sizes is None else x.split(self.sizes)

    def joined(self, steps: Sequence[Tensor]) -> Tensor:
        """Inverse of `apart`."""
        return torch.stack(tuple(steps), self.dim) if self.sizes is None else torch.cat(tuple(steps))


@dataclass(frozen=True)
class Walked:
    """A walk through all steps: outputs of each step, the last state, and what the layers hh and hr read."""

    outputs: list[Tensor]
    last: State
    read: dict[str, list[Tensor]]


class Recurrent(nn.Module):
    """A drop-in for nn.LSTM, nn.GRU and nn.RNN, with a linear layer for each of their weights. Attributes of that
    module are kept; kind is its class."""

    kind: type[nn.Module]
    mode: str
    input_size: int
    hidden_size: int
    num_layers: int
    batch_first: bool
    dropout: float
    bidirectional: bool
    proj_size: int

    @staticmethod
    def of(module: nn.RNNBase) -> "Recurrent":
        """The drop-in of a module; the layers hold its parameters."""
        made = Recurrent()
        take_attributes(made, module)
        made.kind = type(module)
        for name in _names(module.num_layers, module.bidirectional, bool(module.proj_size)):
            made.add_module(name, _layer(module, name))
        return made.train(module.training)

    def flatten_parameters(self) -> None:
        """Does nothing: there is no joint buffer of weights."""

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> Any:
        """(Outputs, last state), as the module that this stands for returns them."""
        if isinstance(input, PackedSequence):
            steps, x, alone = Timeline(0, input.batch_sizes.tolist()), input.data, False
            batch, order = int(input.batch_sizes[0]), input.sorted_indices
        else:
            if input.dim() not in (2, 3):
                raise InputError(f"{self.kind.__name__}: expected an input of 2 or 3 dimensions, got {input.dim()}")
            alone = input.dim() == 2
            x = input.unsqueeze(0 if self.batch_first else 1) if alone else input
            steps, order = Timeline(1 if self.batch_first else 0), None
            batch = x.shape[0 if self.batch_first else 1]
        first = self._first(hx, x, batch, alone, order)
        last: list[State] = []
        directions = ("", "_reverse") if self.bidirectional else ("",)
        for i in range(self.num_layers):
            outputs = []
            for direction in directions:
                state = tuple(part[len(last)] for part in first)
                y, end = self._direction(x, state, f"l{i}{direction}", steps, reverse=bool(direction))
                outputs.append(y)
                last.append(end)
            x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
            if self.dropout and self.training and i + 1 < self.num_layers:
                x = nn.functional.dropout(x, self.dropout)
        ends = [torch.stack(parts) for parts in zip(*last, strict=True)]
        if isinstance(input, PackedSequence):
            back = input.unsorted_indices
            ends = ends if back is None else [part.index_select(1, back) for part in ends]
            made: Any = PackedSequence(x, input.batch_sizes, input.sorted_indices, input.unsorted_indices)
        elif alone:
            made, ends = x.squeeze(0 if self.batch_first else 1), [part.squeeze(1) for part in ends]
        else:
            made = x
        return made, tuple(ends) if self.mode == "LSTM" else ends[0]

    def _first(self, hx: Any, x: Tensor, batch: int, alone: bool, order: Tensor | None) -> State:
        """The state before the first step, [layers x directions, B, width] each."""
        count = self.num_layers * (2 if self.bidirectional else 1)
        widths = [self.proj_size or self.hidden_size, self.hidden_size][: 2 if self.mode == "LSTM" else 1]
        if hx is None:
            return tuple(x.new_zeros(count, batch, width) for width in widths)
        states = tuple(hx) if self.mode == "LSTM" else (hx,)
        states = tuple(part.unsqueeze(1) for part in states) if alone else states
        for part, width in zip(states, widths, strict=True):
            if part.shape != (count, batch, width):
                wanted = (count, batch, width)
                raise InputError(f"{self.kind.__name__}: expected a state of {wanted}, got {tuple(part.shape)}")
        return states if order is None else tuple(part.index_select(1, order) for part in states)

    def _direction(self, x: Tensor, state: State, name: str, steps: Timeline, reverse: bool) -> tuple[Tensor, State]:
        """(Outputs, last state) of one layer in one direction."""
        of_input = steps.apart(getattr(self, f"ih_{name}")(x))
        if is_calibrating():
            for read in ("hh", "hr") if self.proj_size else ("hh",):
                before = self._walk(of_input, state, name, reverse).read[read]
                getattr(self, f"{read}_{name}")(steps.joined(before))
        walked = self._walk(of_input, state, name, reverse)
        return steps.joined(walked.outputs), walked.last

    def _walk(self, of_input: Sequence[Tensor], state: State, name: str, reverse: bool) -> Walked:
        """Through all steps. A sequence that ends before others, or begins after them, keeps its state meanwhile."""
        hh, hr = getattr(self, f"hh_{name}"), getattr(self, f"hr_{name}", None)
        count = len(of_input)
        outputs: dict[int, Tensor] = {}
        read: dict[str, dict[int, Tensor]] = {"hh": {}, "hr": {}}
        keeps = is_calibrating()
        with _steps():
            for t in reversed(range(count)) if reverse else range(count):
                rows = len(of_input[t])
                now = tuple(part[:rows] for part in state)
                new = next_state(self.mode, of_input[t], hh(now[0]), now)
                if keeps:
                    read["hh"][t], read["hr"][t] = now[0], new[0]
                if hr is not None:
                    new = (hr(new[0]), *new[1:])
                outputs[t] = new[0]
                state = new if rows == len(state[0]) else _beside(new, state, rows)
        in_order = {key: [found[t] for t in sorted(found)] for key, found in read.items()}
        return Walked([outputs[t] for t in range(count)], state, in_order)

    def extra_repr(self) -> str:
        return f"{self.kind.__name__}, {self.input_size}, {self.hidden_size}, num_layers={self.num_layers}"


class RecurrentCell(nn.Module):
    """A drop-in for nn.LSTMCell, nn.GRUCell and nn.RNNCell with the linear layers `ih` and `hh`."""

    kind: type[nn.Module]
    mode: str
    input_size: int
    hidden_size: int

    @staticmethod
    def of(module: nn.RNNCellBase) -> "RecurrentCell":
        """The drop-in of a cell; the layers hold its parameters."""
        cell = RecurrentCell()
        take_attributes(cell, module)
        cell.kind = type(module)
        cell.mode = {nn.LSTMCell: "LSTM", nn.GRUCell: "GRU"}.get(
            cast(Any, type(module)), f"RNN_{getattr(module, 'nonlinearity', 'tanh').upper()}"
        )
        for name in ("ih", "hh"):
            cell.add_module(name, _layer(module, name))
        return cell.train(module.training)

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """The next state, as the cell that this stands for returns it."""
        parts = 2 if self.mode == "LSTM" else 1
        if hx is None:
            state: State = (input.new_zeros(*input.shape[:-1], self.hidden_size),) * parts
        else:
            state = tuple(hx) if parts > 1 else (hx,)
        of_input, hh = self.get_submodule("ih")(input), self.get_submodule("hh")
        new = next_state(self.mode, of_input, hh(state[0]), state)
        return new if parts > 1 else new[0]

    def extra_repr(self) -> str:
        return f"{self.kind.__name__}, {self.input_size}, {self.hidden_size}"


def _names(layers: int, bidirectional: bool, projected: bool) -> list[str]:
    """The names of the linear layers, in the order in which they are first read."""
    reads = ("ih", "hh", "hr") if projected else ("ih", "hh")
    directions = ("", "_reverse") if bidirectional else ("",)
    return [f"{read}_l{i}{direction}" for i in range(layers) for direction in directions for read in reads]


def _layer(module: nn.Module, name: str) -> nn.Linear:
    """The linear layer of a module's weight and bias of this name."""
    weight = module._parameters[f"weight_{name}"]
    assert weight is not None
    return linear_of(weight, module._parameters.get(f"bias_{name}"))


def _beside(new: State, state: State, rows: int) -> State:
    """The state of all sequences, of which the first `rows` have gone on."""
    return tuple(torch.cat([one, other[rows:]]) for one, other in zip(new, state, strict=True))
