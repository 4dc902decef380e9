"""Tables of levels: grids whose values are listed, code by code, and the number formats that are made of them.

    E2M1    0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives       OCP Microscaling formats 1.0, FP4; NVFP4, too
    E2M3    m / 8 for m < 8, then (1 + m / 8) 2^e, e = 0, 1, 2   the same, FP6: up to 7.5
    E3M2    m / 16 for m < 4, then (1 + m / 4) 2^e, e = -2 ... 4 the same, the other FP6: up to 28
    NF4     16 quantiles of the normal distribution in [-1, 1]    QLoRA, arXiv 2305.14314, as bitsandbytes has them
    IQ4_NL  16 whole numbers from -127 to 113, denser around 0    ggml-common.h of llama.cpp (`kvalues_iq4nl`)

A value is level * scale. A code of a float has its sign in the highest bit, so that one code is -0; of two levels
equally near, floats take the one of the even code and others the lower, as the readers of these formats do. Beyond the
outer levels codes saturate. IQ4_NL has no level 0: its scale may be negative, and puts the largest weight at -127.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

Ties = Literal["even", "lower"]


@dataclass(frozen=True)
class Levels:
    """values: by code, in units of the scale. ties: of two levels equally near, the one of the even code or the
    lower."""

    name: str
    values: tuple[float, ...]
    ties: Ties

    @property
    def largest(self) -> float:
        return max(self.values)

    @property
    def least(self) -> float:
        return min(self.values)

    @property
    def has_zero(self) -> bool:
        """True where 0 is a level, so that zeros stay zeros."""
        return 0.0 in self.values

    def nearest(self, x: Tensor) -> Tensor:
        """The level nearest to each of x, in the dtype of x, float32 or float64."""
        rising, borders, _ = _sorted(self, x.dtype, x.device)
        return rising[torch.bucketize(x.contiguous(), borders)]

    def codes(self, levels: Tensor) -> Tensor:
        """uint8, the codes of levels; that of 0 is the positive one."""
        rising, _, codes = _sorted(self, levels.dtype, levels.device)
        return codes[torch.searchsorted(rising, levels.contiguous())]

    def table(self, device: torch.device) -> Tensor:
        """[2, L] float32: different levels, rising, and the largest number that is rounded to each."""
        rising, borders, _ = _sorted(self, torch.float32, device)
        return torch.stack([rising, torch.nn.functional.pad(borders, (0, 1), value=torch.inf)])

    def of(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The levels of codes."""
        table = _by_code(self, dtype, codes.device)
        return table.index_select(0, codes.flatten().int()).view(codes.shape)


@cache
def _by_code(levels: Levels, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(levels.values, dtype=torch.float32, device=device).to(dtype)


@cache
def _sorted(levels: Levels, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(Different levels, rising; the largest number that is rounded down between each two of them; their codes)."""
    code_of: dict[float, int] = {}
    for code, value in enumerate(levels.values):
        code_of.setdefault(value, code)  # -0 equals 0, whose code comes first
    rising = torch.tensor(sorted(code_of), dtype=torch.float32).to(dtype)
    codes = torch.tensor([code_of[value] for value in sorted(code_of)], dtype=torch.uint8)
    middle = (rising[1:] + rising[:-1]) / 2
    up = (codes[1:] % 2 == 0) if levels.ties == "even" else torch.zeros_like(codes[1:], dtype=torch.bool)
    below = torch.nextafter(middle, torch.full_like(middle, -torch.inf))
    return rising.to(device), torch.where(up, below, middle).to(device), codes.to(device)


def _float(name: str, exponent_bits: int, significand_bits: int) -> Levels:
    """All values of a float without infinities, those of the lowest exponent without a leading one."""
    least, steps = 2 - 2 ** (exponent_bits - 1), 2**significand_bits
    magnitudes = [m / steps * 2.0**least for m in range(steps)]
    exponents = range(least, least + 2**exponent_bits - 1)
    magnitudes += [(1 + m / steps) * 2.0**exponent for exponent in exponents for m in range(steps)]
    return Levels(name, (*magnitudes, *(-value for value in magnitudes)), "even")


E2M1, E2M3, E3M2 = _float("e2m1", 2, 1), _float("e2m3", 2, 3), _float("e3m2", 3, 2)
# bitsandbytes 0.50, functional.py (`create_normal_map` rounds the quantiles so).
NF4 = Levels(
    "nf4",
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "lower",
)
IQ4_NL = Levels(
    "iq4_nl",
    (*(-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0), *(1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)),
    "lower",
)
# By the type and the bits of a grid.
TABLES: dict[tuple[str, int], Levels] = {
    ("float", 4): E2M1,
    ("float", 6): E2M3,
    ("e3m2", 6): E3M2,
    ("normal", 4): NF4,
    ("nonlinear", 4): IQ4_NL,
}
