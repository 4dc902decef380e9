"""Five ternary codes in a byte: 1.6 bits each, where two bits would waste one of four values.

    byte = (q0 + 1) + 3 (q1 + 1) + 9 (q2 + 1) + 27 (q3 + 1) + 81 (q4 + 1)      at most 242, as 3^5 = 243

A row begins with a byte of its own; unused digits of its last byte are 0, so that byte is below 3^(K mod 5).
"""

import torch
from torch import Tensor

DIGITS = 5
BASE = 3


def bytes_of(count: int) -> int:
    """Bytes that a row of `count` codes takes."""
    return -(-count // DIGITS)


def limits(count: int, device: torch.device | None = None) -> Tensor:
    """int16 [bytes_of(count)] the exclusive upper bound of each byte in a row."""
    full = torch.full((bytes_of(count),), BASE**DIGITS, dtype=torch.int16, device=device)
    full[count // DIGITS :] = BASE ** (count % DIGITS)
    return full


def pack_trits(codes: Tensor) -> Tensor:
    """[R, K] int8 codes of -1, 0 and 1 -> [R, ceil(K / 5)] uint8."""
    rows, count = codes.shape
    digits = torch.zeros(rows, bytes_of(count) * DIGITS, dtype=torch.uint8, device=codes.device)
    digits[:, :count] = (codes + 1).to(torch.uint8)
    weighed = digits.view(rows, -1, DIGITS) * _places(codes.device)
    return weighed.sum(-1, dtype=torch.uint8)


def unpack_trits(packed: Tensor, count: int) -> Tensor:
    """[R, ceil(count / 5)] uint8 -> [R, count] int8. Inverse of `pack_trits`."""
    digits = packed.unsqueeze(-1) // _places(packed.device) % BASE
    return digits.view(len(packed), -1)[:, :count].to(torch.int8) - 1


def _places(device: torch.device) -> Tensor:
    """uint8 [5] the place value of each digit."""
    return torch.tensor([BASE**place for place in range(DIGITS)], dtype=torch.uint8, device=device)
