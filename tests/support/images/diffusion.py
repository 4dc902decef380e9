"""A tiny diffusion transformer: blocks modulated by the timestep and the class (adaLN-Zero)."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

WIDTH, HEADS, BLOCKS = 32, 4, 2


class DiTBlock(nn.Module):
    """Attention and MLP between norms without weights, whose shift, scale and gate come from the condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x [B, T, C], condition [B, C]."""
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulation(condition)[:, None].chunk(6, -1)
        y = self.norms[0](x) * (1 + scale) + shift
        q, k, v = self.qkv(y).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate * self.proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate_mlp * self.mlp(self.norms[1](x) * (1 + scale_mlp) + shift_mlp)


class DiT(nn.Module):
    """Predicts the noise in latents [B, 4, 8, 8] at timesteps [B], of classes [B]."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, WIDTH, 2, 2)
        self.positions = nn.Parameter(torch.randn(1, 16, WIDTH) * 0.1)
        self.times = nn.Sequential(nn.Linear(16, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.classes = nn.Embedding(10, WIDTH)
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(BLOCKS))
        self.out = nn.Linear(WIDTH, 16)

    def forward(self, latents: Tensor, timesteps: Tensor, labels: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(10000) * torch.arange(8, device=latents.device) / 8)
        angles = timesteps[:, None].float() * frequencies
        condition = self.times(torch.cat([angles.cos(), angles.sin()], -1)) + self.classes(labels)
        x = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        return self.out(x)


def dit() -> DiT:
    torch.manual_seed(0)
    return DiT().eval()


def noisy(count: int = 8, size: int = 8, seed: int = 1) -> list[dict[str, Tensor]]:
    """Batches of noisy latents at random timesteps."""
    random = torch.Generator().manual_seed(seed)
    return [
        {
            "latents": torch.randn(size, 4, 8, 8, generator=random),
            "timesteps": torch.randint(1000, (size,), generator=random),
            "labels": torch.randint(10, (size,), generator=random),
        }
        for _ in range(count)
    ]
