"""Experts and where tokens go: for tests of grouped products, and models whose experts lie in one parameter."""

import torch
from torch import nn
from torch.nn.functional import grouped_mm, linear, silu

from compress.kernels.layouts import words as pack

WIDTH, INNER = 16, 24  # of the models


def routings():
    """name -> (experts of each token [M, T], how many there are). The last number is no expert."""
    g = torch.Generator().manual_seed(0)
    few = torch.tensor([[2, 0]])
    uneven = torch.full((40, 2), 3)
    uneven[::7, 1], uneven[5, 0], uneven[6:9] = 1, 0, 4  # expert 2 of 4 has no token, three tokens have no expert
    return {
        "one token of many experts": (torch.tensor([[6, 1, 4]]), 9),
        "fewer tokens than experts": (few, 3),
        "uneven": (uneven, 4),
        "all to one": (torch.full((33, 1), 1), 2),
        "twice to the same": (torch.randint(3, (9, 4), generator=g), 3),
        "nobody's": (torch.full((5, 2), 2), 2),
    }


def experts_of(experts, M, N, K, group, bits, zero, dtype):
    """(x [M, K], planar weights stacked, their values fp64 [E, N, K], bias [E, N])."""
    g = torch.Generator().manual_seed(M + N + K)
    stacked, values = [], []
    for _ in range(experts):
        codes = torch.randint(0, 2**bits, (N, K), generator=g).to(torch.uint8)
        scale = (torch.randn(N, 1 if group == -1 else K // group, generator=g) * 0.05).to(dtype)
        middle = torch.full(scale.shape, 2 ** (bits - 1), dtype=torch.uint8)
        zeros = torch.randint(0, 2**bits, scale.shape, generator=g).to(torch.uint8) if zero else middle
        wide = [t.double().repeat_interleave(K // scale.shape[1], 1) for t in (zeros, scale)]
        values.append((codes.double() - wide[0]) * wide[1])
        stacked.append(pack.to_planar(codes, scale, zeros, bits, dtype))
    words, scales, zeros = (torch.stack(parts) for parts in list(zip(*stacked, strict=True))[:3])
    weight = pack.CodeWords(words, scales, zeros if zero else None, group, bits)
    x = torch.randn(M, K, generator=g).to(dtype)
    return x, weight, torch.stack(values), torch.randn(experts, N, generator=g).to(dtype)


def combined_by_loop(x_MK, values_ENK, bias_EN, expert_MT, share_MT):
    """What a layer of experts returns, a token and an expert after the other."""
    out = x_MK.new_zeros(len(x_MK), values_ENK.shape[1])
    for m, (chosen, shares) in enumerate(zip(expert_MT.tolist(), share_MT, strict=True)):
        for e, share in zip(chosen, shares, strict=True):
            if e < len(values_ENK):
                out[m] += share * (values_ENK[e] @ x_MK[m] + bias_EN[e])
    return out


class Experts(nn.Module):
    """Experts [E, N, K] in a loop over those that tokens are routed to, as in transformers."""

    is_transposed = False

    def __init__(self, count: int) -> None:
        super().__init__()
        shapes = (count, INNER, WIDTH), (count, WIDTH, INNER)
        up, down = (torch.randn(shape) / shape[-1] ** 0.5 for shape in shapes)
        if self.is_transposed:
            up, down = up.mT.contiguous(), down.mT.contiguous()
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)

    def forward(self, x_MK, expert_M):
        out = torch.zeros_like(x_MK)
        for e in expert_M.unique():
            rows = expert_M == e
            out[rows] = self.one(x_MK[rows], e)
        return out

    def one(self, x, e):
        return linear(silu(linear(x, self.up[e])), self.down[e])


class Transposed(Experts):
    """Experts [E, K, N]."""

    is_transposed = True

    def one(self, x, e):
        return silu(x @ self.up[e]) @ self.down[e]


class Unbound(Experts):
    """All slices taken before the first of them is used."""

    def forward(self, x_MK, expert_M):
        self.slices = self.up.unbind(0), self.down.unbind(0)
        return super().forward(x_MK, expert_M)

    def one(self, x, e):
        up, down = (each[int(e)] for each in self.slices)
        return torch.addmm(x.new_zeros(WIDTH), silu(torch.mm(up, x.T).T), down.T)


class Grouped(Experts):
    """One product for all experts, of rows sorted by expert."""

    def forward(self, x_MK, expert_M):
        order = expert_M.argsort(stable=True)
        ends = expert_M.bincount(minlength=len(self.up)).cumsum(0).int()
        hidden = silu(grouped_mm(x_MK[order], self.up.mT, offs=ends))
        return torch.empty_like(x_MK).index_copy(0, order, grouped_mm(hidden, self.down.mT, offs=ends))


class Separate(Experts):
    """The same weights in linear layers."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        for key in ("up", "down"):
            weights = self._parameters.pop(key)
            self.add_module(key, nn.ModuleList(nn.Linear(w.shape[1], w.shape[0], bias=False) for w in weights))
            for module, weight in zip(self.get_submodule(key), weights, strict=True):
                module.weight.data = weight.data.clone()

    def one(self, x, e):
        return self.down[int(e)](silu(self.up[int(e)](x)))


class Block(nn.Module):
    """Experts chosen by the sign of what comes in, between linear layers. The last expert is never chosen."""

    def __init__(self, kind: type[Experts], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = kind(4)

    def forward(self, x):
        chosen = (x[..., 0] > 0).int() + (x[..., 1] > 0.7).int()
        hidden = self.first(x)
        return x + self.last(hidden + self.experts(hidden.flatten(0, -2), chosen.flatten()).view_as(x))


def routed(kind: type[Experts], blocks: int = 2) -> nn.Module:
    """A model of routed experts; the same weights for every kind."""
    return Routed(kind, blocks).eval()


class Routed(nn.Module):
    """Blocks one after the other."""

    def __init__(self, kind: type[Experts], blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind, i) for i in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def shown(samples: int = 12, length: int = 16) -> list[dict[str, torch.Tensor]]:
    """Calibration batches for it, a sample each for a batch size of one."""
    x = torch.randn(samples, length, WIDTH, generator=torch.Generator().manual_seed(1))
    return [{"x": each} for each in x.split(4)]
