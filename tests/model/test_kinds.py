"""Each kind of layer: what is in codes, what stays dense, and by which words; and that it runs as it was decided."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from commands import fast_gptq
from safetensors.torch import load_file
from torch import Tensor, nn

import compress
from compress.base.errors import InputError
from compress.model.sharing import check_shardable
from compress.model.splitting.split_layers import ADVICE
from compress.model.untreated_layers import UNASKED_CONVOLUTION
from compress.passes.protocol.base import Pass

W = 16
SHARED = "shares its weight with another module"


class Lookup(nn.Module):
    """Users and items, a bag, and what is made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.bag = nn.Embedding(60, W), nn.Embedding(40, 2 * W), nn.EmbeddingBag(30, W)
        self.again, self.out = nn.Embedding(60, W), nn.Linear(5 * W, W)
        self.again.weight = self.users.weight

    def forward(self, u: Tensor) -> Tensor:
        return self.out(torch.cat([self.users(u), self.again(u), self.items(u), self.bag(u[:, None])], -1))


class Tied(nn.Module):
    """Two layers with one weight, and one that is called for each of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.own = nn.Linear(W, W), nn.Linear(W, W), nn.Linear(W, W)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.other(self.one(x).tanh())) + self.own(x)


class Block(nn.Module):
    """A norm and two layers beside the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(W), nn.Linear(W, W), nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Blocks(nn.Module):
    """A stack in which one block comes twice, or whose blocks share a layer, a weight, a bias and a norm."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        first, second = Block(), Block()
        self.layers = nn.ModuleList([first, second, first] if twice else [first, second, Block()])
        if not twice:
            second.up, second.norm = first.up, first.norm
            self.layers[2].up.weight, self.layers[2].down.bias = first.up.weight, first.down.bias

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Attention(nn.Module):
    """Attention of torch, and a layer behind it."""

    def __init__(self, split: bool = False) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(W, 2, batch_first=True), nn.Linear(W, W)
        if split:
            compress.split_layers(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x, x, x)[0])


class Words(nn.Module):
    """A language model of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.head = nn.Embedding(40, W), nn.LSTM(W, W, batch_first=True), nn.Linear(W, 40)
        compress.split_layers(self)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(ids))[0])


class Upsampling(nn.Module):
    """A transposed convolution of so many dimensions between two linear layers."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
        usual = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.first, self.up, self.down, self.last = (
            nn.Linear(W, W),
            kind(W, W, 2, 2),
            usual(W, W, 2, 2),
            nn.Linear(W, W),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(self.first(x).movedim(-1, 1)))
        return self.last(y.movedim(1, -1))


@dataclass(frozen=True)
class Kind:
    """A model, its batch, the layers in codes, and the words for those that stay dense."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Mapping[str, Tensor]]
    coded: set[str]
    dense: Mapping[str, str] = field(default_factory=dict)
    tables: bool = False


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1))


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


UP = {"first", "last"}
KINDS = {
    "embeddings": Kind(
        Lookup, lambda: {"u": ids(30, 64)}, {"users", "items", "out"},
        {"bag.weight": "EmbeddingBag: not a linear layer"}, tables=True,
    ),
    "tied and shared": Kind(
        Tied, lambda: {"x": floats(64, W)}, {"own"},
        dict.fromkeys(("one", "other"), SHARED),
    ),
    "a block that comes twice": Kind(
        lambda: Blocks(twice=True), lambda: {"x": floats(64, W)}, {"layers.1.up", "layers.1.down"},
        dict.fromkeys((f"layers.{i}.{name}" for i in (0, 2) for name in ("up", "down")), SHARED),
    ),
    "blocks that share tensors": Kind(
        lambda: Blocks(twice=False), lambda: {"x": floats(64, W)}, {f"layers.{i}.down" for i in range(3)},
        dict.fromkeys((f"layers.{i}.up" for i in range(3)), SHARED),
    ),
    "attention of torch": Kind(
        Attention, lambda: {"x": floats(4, 12, W)}, {"out"},
        {"attention.in_proj_weight": f"MultiheadAttention: {ADVICE}",
         "attention.out_proj": f"its MultiheadAttention never calls the layer: {ADVICE}"},
    ),
    "attention, split": Kind(
        lambda: Attention(split=True), lambda: {"x": floats(4, 12, W)},
        {"out", *(f"attention.{name}_proj" for name in ("q", "k", "v", "out"))},
    ),
    "LSTM": Kind(
        Words, lambda: {"ids": ids(40, 4, 12)}, {"lstm.ih_l0", "lstm.hh_l0", "head", "table"}, tables=True,
    ),
    **{
        f"ConvTranspose{dims}d": Kind(
            lambda dims=dims: Upsampling(dims), lambda dims=dims: {"x": floats(3, *[4] * dims, W)}, UP,
            {"up.weight": f"ConvTranspose{dims}d: not a linear layer", "down": UNASKED_CONVOLUTION},
        )
        for dims in (1, 2, 3)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_compressed_or_listed_and_runs_as_decided(name, tmp_path):
    kind = KINDS[name]
    torch.manual_seed(0)
    model, batch = kind.make().eval(), kind.batch()
    passes: list[Pass] = [fast_gptq(group_size=W)]
    passes = [compress.Embeddings(scheme="w4a16", group_size=W), *passes] if kind.tables else passes
    found = compress.quantize(model, passes, calibration=[batch], output=tmp_path / "out", convolutions=False)
    assert {layer.name for layer in found.record.layers} == kind.coded
    alone = {n: why for n, why in found.record.left_alone.items() if n not in kind.coded}
    assert {n: why for n, why in alone.items() if why != "embedding"} == kind.dense
    every, once = ({n for n, _ in model.named_parameters(remove_duplicate=same)} for same in (False, True))
    (file,) = (tmp_path / "out").glob("*.safetensors")
    assert not (every - once).intersection(load_file(file))
    loaded = compress.load(tmp_path / "out", into=kind.make().eval())
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch), model(**batch))


def test_three_dimensions_are_convolutions_like_others():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 4, 2, groups=2)).eval()
    batch = {"input": floats(4, 4, 5, 5, 5)}
    original = [p.clone() for p in model.parameters()]
    found = compress.quantize(model, fast_gptq(scheme="w3a16", group_size=-1), calibration=[batch])
    assert [layer.name for layer in found.record.layers] == ["0", "2"]
    assert all(layer.figures["loss"] < layer.figures["rtn_loss"] for layer in found.record.layers)
    assert [torch.equal(p, o) for p, o in zip(model.parameters(), original, strict=True)] == [False, True] * 2


def test_blocks_that_share_tensors_are_not_sharded_one_by_one():
    model = Blocks(twice=False)
    blocks = [(f"layers.{i}", block) for i, block in enumerate(model.layers)]
    check_shardable(model, [("layers", model.layers)])
    with pytest.raises(InputError, match=r"^layers\.1\.norm\.weight and layers\.0\.norm\.weight are one parameter"):
        check_shardable(model, blocks)
