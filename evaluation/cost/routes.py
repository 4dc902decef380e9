"""The kernel of every compressed layer of a checkpoint on a device, without loading a weight."""

from dataclasses import dataclass

import torch

from compress.base.errors import InputError
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.pretrained import embeddings_of, empty_model, read_config
from compress.checkpoint.read.source import find_source
from compress.inference.layers.experts import one_by_one, route_among
from compress.inference.layers.linear import run_of
from compress.kernels.cpu import build as cpu
from compress.kernels.cpu.libraries import LIBRARIES, PARTS
from compress.kernels.routes import TOKENS
from compress.model.disk_names import places_in


@dataclass(frozen=True)
class KernelRow:
    """A layer: shape (N, K), {tokens: kernel} (of an expert, tokens that go to it), the reasons against faster kernels
    (empty: it has the fastest), and the reasons why `batch_invariant` of `compress.load` refuses it (empty: it does
    not)."""

    name: str
    shape: tuple[int, int]
    scheme: str
    kernels: dict[int, str]
    why_not: tuple[str, ...]
    why_not_batch_invariant: tuple[str, ...] = ()


@dataclass(frozen=True)
class LibraryRow:
    """A library of compiled loops: its purpose, the instructions that it uses (None: it is not available), and the
    reasons why it is not."""

    about: str
    instructions: str | None
    why_not: tuple[str, ...]


def library_rows(device: torch.device) -> list[LibraryRow]:
    """The compiled loops of this machine, for a CPU, parts of products left out; built where they are not there yet."""
    if device.type != "cpu":
        return []
    rows = []
    for name, made in LIBRARIES.items():
        if name in PARTS:
            continue
        reasons = cpu.why_not() or cpu.why_not(name)
        rows.append(LibraryRow(made.about, None if reasons else cpu.library().instructions().decode(), reasons))
    return rows


def kernel_rows(
    model: str,
    device: torch.device,
    dtype: torch.dtype | None = None,
    tokens: tuple[int, ...] = TOKENS,
    trust_remote_code: bool = False,
) -> list[KernelRow]:
    """One row per compressed layer. dtype: of the arithmetic; the checkpoint's own unless given, float32 on a CPU for
    `compress generate`. Raises InputError for a checkpoint that holds no compressed layer."""
    source = find_source(model, trust_remote_code)
    layers = stored_in(source).layers
    if not layers:
        raise InputError(f"{source.name} is not compressed: torch multiplies its weights as they are")
    embeddings = embeddings_of(source)
    arithmetic = dtype or getattr(read_config(source), "dtype", None) or torch.float32
    model_of, rows = empty_model(source), []
    modules, place = dict(model_of.named_modules()), places_in(model_of)
    placed = {name: place(modules, name) for name in layers}
    known = {placed[name]: (stored.scheme, stored.shape) for name, stored in layers.items()}
    apart = one_by_one(model_of, known, arithmetic, device)
    for name, stored in layers.items():
        scheme, (N, K) = stored.scheme, stored.shape
        if name in embeddings:
            rows.append(KernelRow(name, (N, K), str(scheme), dict.fromkeys(tokens, "rows looked up"), ()))
            continue
        layer = run_of(scheme)
        routes = {M: layer.route(scheme, M, stored.shape, arithmetic, device) for M in tokens}
        if placed[name] in apart:
            routes = {M: route_among(route, apart[placed[name]]) for M, route in routes.items()}
        reasons = dict.fromkeys(reason for route in routes.values() for reason in route.why_not)
        varying = layer.why_not_batch_invariant(scheme, K, arithmetic, device)
        kernels = {M: route.kernel for M, route in routes.items()}
        rows.append(KernelRow(name, (N, K), str(scheme), kernels, tuple(reasons), tuple(varying)))
    return rows
