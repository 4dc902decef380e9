"""Libraries for 64-bit ARM, cross-compiled and run in an emulator: tests call them as they call those of this machine.

Memory of tensors goes to the emulator (emulated.cpp) with every call and comes back from it. So that the size of what a
pointer points to is known, `torch.Tensor.data_ptr` is watched meanwhile.
"""

import ctypes
import functools
import hashlib
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compress.kernels.cpu import build, processor
from compress.kernels.cpu.arguments import TYPES
from compress.kernels.cpu.compiling import jobs, run_all
from compress.kernels.cpu.libraries import PARTS, sources, units
from compress.kernels.private_folders import candidates, make_private

EMULATOR, COMPILER, SYSTEM = "qemu-aarch64", "aarch64-linux-gnu-g++", "/usr/aarch64-linux-gnu"
HOW = "apt-get install qemu-user g++-aarch64-linux-gnu"
DRIVER = Path(__file__).with_name("emulated.cpp")
TARGETS = [pytest.param(name, marks=pytest.mark.slow) for name in processor.ARM]
WITH_OPENMP = "neon-i8mm"
NUMBER = struct.Struct("<q")


class Emulated:
    """A library that runs in an emulator: its functions are attributes, called as those of a `ctypes.CDLL`."""

    def __init__(self, driver: Path, library: Path, sizes: dict[int, int]) -> None:
        words = [EMULATOR, "-cpu", "max", "-L", SYSTEM, str(driver), str(library)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.sizes = sizes

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self.call, name)

    def instructions(self) -> bytes:
        self.send(text("instructions"))
        return self.read(NUMBER.unpack(self.read(NUMBER.size))[0])

    def call(self, name: str, *arguments: Any) -> int:
        """The result of a function, given pointers to structs and to memory of tensors, which it may change."""
        sent, held = [text(name), NUMBER.pack(len(arguments))], []
        for argument in arguments:
            if isinstance(argument, ctypes.c_void_p):
                whole, pointers = b"", [(0, argument.value)]
            else:
                of = argument._obj
                whole = bytes(of)
                fields = [(name, kind) for name, kind in of._fields_ if kind is ctypes.c_void_p]
                pointers = [(getattr(type(of), name).offset, getattr(of, name)) for name, _ in fields]
            pointers = [(at, pointer) for at, pointer in pointers if pointer]
            sent += [NUMBER.pack(len(whole)), whole, NUMBER.pack(len(pointers))]
            for at, pointer in pointers:
                size = self.sizes[pointer]
                sent += [NUMBER.pack(at), NUMBER.pack(size), ctypes.string_at(pointer, size)]
                held.append((pointer, size))
        self.send(b"".join(sent))
        (returned,) = NUMBER.unpack(self.read(NUMBER.size))
        for pointer, size in held:
            ctypes.memmove(pointer, self.read(size), size)
        return returned

    def send(self, message: bytes) -> None:
        try:
            self.process.stdin.write(message)
            self.process.stdin.flush()
        except BrokenPipeError:
            self.fail()

    def read(self, size: int) -> bytes:
        found = self.process.stdout.read(size)
        if len(found) < size:
            self.fail()
        return found

    def fail(self) -> None:
        raise AssertionError(f"the emulator ended: {self.process.stderr.read().decode(errors='replace')[-500:]}")


class _Attention(ctypes.Structure):
    """`Attention` of cpu_attention.h, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "mask", "out")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "key_heads", "keys", "size", "value_size")),
        ("query_strides", ctypes.c_int64 * 2),
        ("key_strides", ctypes.c_int64 * 3),
        ("value_strides", ctypes.c_int64 * 3),
        ("mask_strides", ctypes.c_int64 * 2),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("type", "mask_type", "has_mask", "bool_mask", "threads")),
    )


def attention(
    library: Emulated, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """The result of `direct.attention`, by the loop of an emulated library and not by way of torch's operator."""
    batch, heads, _, size = query.shape
    filled = _Attention(batch=batch, heads=heads, key_heads=key.shape[1], keys=key.shape[2], size=size, scale=scale)
    filled.value_size, filled.type, filled.threads = value.shape[3], TYPES[query.dtype], 2
    for i in range(3):
        filled.key_strides[i], filled.value_strides[i] = key.stride(i), value.stride(i)
        if i < 2:
            filled.query_strides[i] = query.stride(i)
            filled.mask_strides[i] = 0 if mask is None or mask.shape[i] == 1 else mask.stride(i)
    if mask is not None:
        assert mask.stride(3) == 1
        filled.has_mask, filled.bool_mask, filled.mask = True, mask.dtype == torch.bool, mask.data_ptr()
        filled.mask_type = TYPES.get(mask.dtype, 0)
    out = torch.full((batch, 1, heads, value.shape[3]), torch.nan, dtype=query.dtype)
    filled.query, filled.key, filled.value, filled.out = (each.data_ptr() for each in (query, key, value, out))
    assert library.attend(ctypes.byref(filled)) == 0
    return out


def text(words: str) -> bytes:
    return NUMBER.pack(len(words)) + words.encode()


@contextmanager
def emulated(target: str, name: str = "gemm") -> Iterator[Emulated]:
    """A library for an ARM target, whose calls go to an emulator. Skips where that is missing."""
    if missing := [program for program in (EMULATOR, COMPILER) if shutil.which(program) is None]:
        pytest.skip(f"no {', no '.join(missing)}: {HOW}")
    folder = next(candidates(build.PRIVATE_FOLDER))
    make_private(folder)
    sizes: dict[int, int] = {}
    plain = torch.Tensor.data_ptr

    def watched(tensor: torch.Tensor) -> int:
        pointer, storage = plain(tensor), tensor.untyped_storage()
        sizes[pointer] = storage.data_ptr() + storage.nbytes() - pointer
        return pointer

    with pytest.MonkeyPatch.context() as patched:
        threads = ("-fopenmp",) if target == WITH_OPENMP else ()  # the others have threads of their own, as on macOS
        flags = (*(flag for flag in build.FLAGS if flag != build.OPENMP), *threads, *processor.flags_of(target))
        library = _whole(folder, flags, name, pairs=target == processor.MOST_OF_ARM)
        driver = _driver(folder)
        patched.setattr(torch.Tensor, "data_ptr", watched)
        found = Emulated(driver, library, sizes)
        try:
            if name == "gemm":
                assert found.instructions().decode() == target
            yield found
        finally:
            found.close()


def _whole(folder: Path, flags: tuple[str, ...], name: str, pairs: bool) -> Path:
    """A library, that of products with all its parts in it: nobody gives it more. It is kept."""
    names = [name, *(part for part, made in PARTS.items() if name == "gemm" and (pairs or not made.pairs))]
    depends = [*flags, *(source.read_text(encoding="utf-8") for each in names for source in sources(each))]
    made = folder / f"emulated-{name}-{hashlib.sha256(chr(0).join(depends).encode()).hexdigest()[:20]}.so"
    if made.exists():
        return made
    compiled = [unit for each in names for unit in units(each)]
    with tempfile.TemporaryDirectory() as scratch:
        objects = [f"{scratch}/{number}.o" for number in range(len(compiled))]
        commands = [
            [COMPILER, *flags, *unit.defined, "-c", str(unit.source), "-o", each]
            for unit, each in zip(compiled, objects, strict=True)
        ]
        run_all(commands, jobs())
        run_all([[COMPILER, *flags, "-shared", *objects, "-o", f"{scratch}/linked.so"]], 1)
        shutil.copy(f"{scratch}/linked.so", partial := made.with_suffix(".partial"))
        partial.replace(made)
    return made


@functools.cache
def _driver(folder: Path) -> Path:
    made = folder / "emulated"
    subprocess.run([COMPILER, "-std=c++17", "-O1", str(DRIVER), "-ldl", "-o", str(made)], check=True)
    return made


@contextmanager
def products_for(target: str) -> Iterator[Any]:
    """The library of products for this processor ("native"), for less than it has, or for ARM in an emulator. Skips
    where there is none."""
    if build.why_not():
        pytest.skip("; ".join(build.why_not()))
    if target in processor.ARM:
        with emulated(target) as library:
            yield library
        return
    if target == "native":
        yield build.library()
        return
    if target == "avx2-vnni" and processor.VNNI not in processor.cpu_flags():
        pytest.skip(f"the CPU has no {processor.VNNI}")
    library, reasons = build.load_from_a_place("gemm", build.flags_for(target))
    assert library is not None, reasons
    assert library.instructions().decode() == target
    yield library
