"""Experts and where tokens go, for tests of grouped products."""

import torch

from compress.kernels.layouts import words as pack


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
    weight = pack.Planar(words, scales, zeros if zero else None, group, bits)
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
