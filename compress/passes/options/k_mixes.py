"""llama.cpp's mixes of K-quants (`llama_tensor_get_type_impl` of its llama-quant.cpp), by names of layers in blocks."""

import re
from collections.abc import Sequence

from compress.base.errors import InputError
from compress.kernels.layouts.k_quants import K_QUANTS

# {mix: the type of most layers}
MIXES = {"q3_k_m": "q3_k", "q3_k_l": "q3_k", "q4_k_s": "q4_k", "q4_k_m": "q4_k", "q5_k_m": "q5_k"}
K_SCHEMES = (*K_QUANTS, *MIXES)
# The layers to which mixes give more bits.
ROLES = ("v_proj", "o_proj", "down_proj")
NUMBER = re.compile(r"\.(\d+)\.")


def block_of(layer: str) -> int | None:
    """The number of a layer's block, the first in its name; None where it has none."""
    found = NUMBER.search(layer)
    return None if found is None else int(found[1])


def blocks_of_names(scheme: str, layers: Sequence[str]) -> int:
    """The number of blocks of a model with these layers. Raises InputError for a model to which a mix means nothing."""
    numbers = [block_of(layer) for layer in layers if layer.rpartition(".")[2] in ROLES]
    if not numbers or None in numbers:
        example = f", and a layer is called {layers[0]!r}" if layers else ""
        raise InputError(
            f"{scheme} gives {', '.join(ROLES)} of numbered blocks other types than the rest{example}; give "
            f"{MIXES[scheme]} to all, or write a recipe that names layers"
        )
    return max(number for number in numbers if number is not None) + 1


def takes_more(block: int, blocks: int) -> bool:
    """True for the first and the last eighth of the blocks, and every third between them."""
    return block < blocks // 8 or block >= 7 * blocks // 8 or (block - blocks // 8) % 3 == 2


def type_in(scheme: str, layer: str, blocks: int) -> str:
    """The type of a layer, where a model of so many blocks has a scheme."""
    if scheme in K_QUANTS:
        return scheme
    block, role = block_of(layer) or 0, layer.rpartition(".")[2]
    match scheme, role:
        case "q4_k_m" | "q5_k_m", "v_proj" | "down_proj" if takes_more(block, blocks):
            return "q6_k"
        case "q4_k_s", "v_proj" if block < 4:
            return "q5_k"
        case "q4_k_s", "down_proj" if block < blocks // 8:
            return "q5_k"
        case "q3_k_m", "v_proj":
            return "q5_k" if block < 2 else "q4_k"
        case "q3_k_m", "down_proj":
            return "q5_k" if block < blocks // 16 else "q4_k"
        case "q3_k_m", "o_proj":
            return "q4_k"
        case "q3_k_l", "v_proj" | "down_proj" | "o_proj":
            return "q5_k"
    return MIXES[scheme]


def types_of(scheme: str) -> list[str]:
    """The types that layers of a scheme may have."""
    most = range(16)  # so many blocks have a sixteenth
    layers = [f"layers.{block}.{role}" for block in most for role in ("", *ROLES)]
    return sorted({type_in(scheme, layer, len(most)) for layer in layers})
