"""Layouts of other tools, transcribed from their descriptions: readers that share no code with ours."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def bits_of(words: torch.Tensor) -> np.ndarray:
    """The bits of int32 words, lowest first, along the first axis: [W, N] -> [32 W, N]."""
    held = words.numpy().view(np.uint32)
    return ((held[:, None, :] >> np.arange(32, dtype=np.uint32)[None, :, None]) & 1).reshape(-1, held.shape[1])


def numbers(stream: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of so many bits, one after the other along the first axis."""
    return sum(stream[i::bits].astype(np.int32) << i for i in range(bits))


def gptq_weight(parts: dict[str, torch.Tensor], bits: int) -> torch.Tensor:
    """[N, K] float32 as format 1 defines it: zero points are stored less one."""
    codes = numbers(bits_of(parts["qweight"]), bits)
    zeros = numbers(bits_of(parts["qzeros"].t().contiguous()), bits).T + 1
    group = parts["g_idx"].numpy()
    scales = parts["scales"].numpy().astype(np.float32)
    return torch.from_numpy(((codes - zeros[group]).astype(np.float32) * scales[group]).T.copy())


def awq_weight(parts: dict[str, torch.Tensor], group_size: int) -> torch.Tensor:
    """[N, K] float32 as version gemm defines it: nibble i of a word is output AWQ_ORDER[i] of eight."""

    def outputs(words: torch.Tensor) -> np.ndarray:
        held = words.numpy().view(np.uint32)
        found = np.zeros((held.shape[0], held.shape[1] * 8), np.int32)
        for nibble, place in enumerate(AWQ_ORDER):
            found[:, place::8] = held >> np.uint32(4 * nibble) & 15
        return found

    codes, zeros, scales = (
        outputs(parts["qweight"]),
        outputs(parts["qzeros"]),
        parts["scales"].numpy().astype(np.float32),
    )
    group = np.arange(len(codes)) // group_size
    return torch.from_numpy(((codes - zeros[group]).astype(np.float32) * scales[group]).T.copy())


def layers_of(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    held: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer, _, part = name.rpartition(".")
        held.setdefault(layer, {})[part] = tensor
    return {layer: parts for layer, parts in held.items() if "qweight" in parts}
