"""GPTQ and AWQ checkpoints that are damaged, or that say something else than they hold: one line, exit code 2."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import command, make_llama, save
from safetensors.torch import load_file, save_file

import compress
from compress.base.errors import InputError
from compress.checkpoint.read.compressed_layers import stored_in, weight_of
from compress.checkpoint.read.source import find_source
from compress.passes.protocol.recipe import make_pass

pytestmark = pytest.mark.timeout(120)
Tensors = dict[str, torch.Tensor]
BOTH = ("gptq", "awq")
LAYER = "model.layers.0.mlp.up_proj"  # [96, 64]
WORDS = ("bits", "group_size", "sym", "checkpoint_format", "version", "zero_point", "dynamic", "pack_dtype", "format")
PLAIN = (None, True, False, 0, -1, -7, 1, 3, 5, 8, 10**30, 0.5, "4", "gptq", "", [], {})
RULES = ({"(": {}}, {"": {"bits": "x"}}, {"": {"group_size": "x"}}, {"": {"bits": 3, "group_size": 10**18}}, {"": []})
VALUES = (*PLAIN, *RULES)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """{layout: a checkpoint of 4 bits in groups of 32}."""
    here = tmp_path_factory.mktemp("exported")
    model = save(make_llama().half(), here / "model")
    compress.quantize(model, make_pass("rtn", {"group_size": 32}), output=here / "out", verify=False)
    return {layout: compress.export(here / "out", here / layout, layout).output for layout in BOTH}


def damaged(
    folder: Path, change: Callable[[Tensors], object] = lambda tensors: None, words: dict[str, Any] | None = None
) -> None:
    """Change the tensors of a checkpoint, and keys of its quantization_config."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= words or {}
    (folder / "config.json").write_text(json.dumps(config))


def part(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({f"{LAYER}.{name}": make(tensors[f"{LAYER}.{name}"])})


def nothing(tensors: Tensors) -> None:
    """Leave them as they are."""


def nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor[0, 0] = torch.nan
    return tensor


def read_all(folder: Path) -> None:
    """Everything that is compressed, as any of our readers reads it."""
    source = find_source(str(folder))
    for layer in stored_in(source).layers:
        weight_of(source, layer).dequantize()


AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
# {what is wrong: (the layouts, the change of the tensors, keys of the configuration, what the line says)}
CASES: dict[str, tuple[tuple[str, ...], Callable[[Tensors], object], dict[str, Any], str]] = {
    "no scales": (BOTH, lambda t: t.pop(f"{LAYER}.scales"), {}, f"{LAYER}.scales is missing"),
    "fewer words": (BOTH, part("qweight", lambda w: w[:-1]), {}, f"{LAYER}"),
    "words of one dimension": (BOTH, part("qweight", torch.flatten), {}, "it must have two dimensions"),
    "no word": (BOTH, part("qweight", lambda w: w[:0]), {}, "and something in it"),
    "words of another dtype": (BOTH, part("qweight", lambda w: w.short()), {}, "its layer needs I32"),
    "a group too few": (BOTH, part("scales", lambda s: s[:-1]), {}, f"{LAYER}.scales is F16 [1, 96]; its layer needs"),
    "zero points of other shape": (
        BOTH,
        part("qzeros", torch.t),
        {},
        f"{LAYER}.qzeros is I32 [12, 2]; its layer needs",
    ),
    "a scale that is no number": (BOTH, part("scales", nan), {}, f"{LAYER}.scales holds values that are not finite"),
    "groups that do not fit": (BOTH, nothing, {"group_size": 48}, "its layer needs I32"),
    "a group of nothing": (BOTH, nothing, {"group_size": -3}, "group size -3; allowed: 1 or more"),
    "bits as a word": (BOTH, nothing, {"bits": "four"}, "it must be a whole number"),
    "other bits": (BOTH, nothing, {"bits": 5}, "has 5 bits; readable"),
    "no bits": (BOTH, nothing, {"bits": None}, "bits"),
    "a part too much": (BOTH, lambda t: t.update({f"{LAYER}.perm": torch.zeros(4)}), {}, f"{LAYER}.perm is no part of"),
    "marlin": (("gptq",), nothing, {"checkpoint_format": "marlin"}, "of the format 'marlin'"),
    "marlin, as it was": (("gptq",), nothing, {"is_marlin_format": True}, "format 'marlin'"),
    "other words": (("gptq",), nothing, {"pack_dtype": "int64"}, "readable: 'int32'"),
    "no pattern": (("gptq",), nothing, {"dynamic": {"+:(": {"bits": 8}}}, "which is no pattern"),
    "a group too large": (("gptq",), part("g_idx", lambda g: g + 1), {}, "g_idx does not give each of 2 groups 32"),
    "groups that differ": (("gptq",), part("g_idx", lambda g: g * 0), {}, "g_idx does not give each of 2 groups 32"),
    "other zero points": (("gptq",), part("qzeros", lambda z: z + 1), {}, "zero points beside 8"),
    "zero points that overflow": (("gptq",), part("qzeros", lambda z: z | -1), {"sym": False}, "for 16 or for 0"),
    **{
        f"AutoRound's {key}": (
            BOTH,
            nothing,
            {**AUTO_ROUND, key: value},
            "readable: int weights alone, as auto_round:auto",
        )
        for key, value in {
            "packing_format": "auto_round:fp8",
            "data_type": "mx_fp",
            "act_bits": 8,
            "rotation_config": {"a": 1},
        }.items()
    },
    "gemv": (("awq",), nothing, {"version": "gemv"}, "AWQ, version 'gemv'; readable: 'gemm'"),
    "another tool's": (("awq",), nothing, {"backend": "llm-awq"}, "version of 'llm-awq'"),
    "no zero points": (("awq",), nothing, {"zero_point": False}, "without zero points"),
}


@pytest.mark.parametrize(("layout", "wrong"), [(layout, name) for name, case in CASES.items() for layout in case[0]])
def test_damage_is_one_line(layout: str, wrong: str, exported: dict[str, Path], copy_of: Callable[..., Path]) -> None:
    _, change, words, says = CASES[wrong]
    model = copy_of(exported[layout])
    damaged(model, change, words)
    with pytest.raises(InputError) as refusal:
        read_all(model)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_command_ends_with_2(exported: dict[str, Path], copy_of: Callable[..., Path]) -> None:
    model = copy_of(exported["gptq"])
    damaged(model, part("scales", nan))
    for words in (["generate", model, "--prompt", "a"], ["verify", model]):
        outcome = command(*words)
        assert (outcome.code, outcome.err.count("\n")) == (2, 1), outcome
    damaged(model, lambda tensors: tensors.pop(f"{LAYER}.qweight"))
    outcome = command("generate", model, "--prompt", "a")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1), outcome
    config = json.loads((model / "config.json").read_text())
    del config["quantization_config"]
    (model / "config.json").write_text(json.dumps(config))
    outcome = command("inspect", model)
    assert outcome.code == 2
    assert "no quantization_config, like quantize_config.json; copy it there" in outcome.err


def torn(folder: Path, draw: random.Random) -> None:
    """Change a few bytes of a file, or cut it off."""
    path = folder / draw.choice(["model.safetensors", "config.json"])
    held = bytearray(path.read_bytes())
    size = draw.choice([len(held), 4096, 16])
    for _ in range(draw.randint(1, 4)):
        held[draw.randrange(min(size, len(held)))] = draw.randrange(256)
    path.write_bytes(held[: draw.choice([len(held), len(held), draw.randrange(len(held))])])


def reshaped(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """Another tensor in the place of one."""
    kinds: list[Callable[[], torch.Tensor]] = [
        lambda: tensor[: draw.randrange(len(tensor) + 1)],
        lambda: tensor.flatten()[: draw.randrange(9)],
        lambda: tensor.repeat(*[draw.randint(1, 3) for _ in tensor.shape]),
        lambda: tensor.to(draw.choice([torch.float64, torch.int8, torch.bool, torch.bfloat16, torch.int32])),
        lambda: torch.randint(-(2**31), 2**31 - 1, tensor.shape).to(tensor.dtype),
        lambda: torch.full_like(tensor, draw.choice([0, -1, 127])),
        lambda: tensor.t() if tensor.ndim == 2 else tensor[None],
        lambda: torch.empty(0),
    ]
    return draw.choice(kinds)()


def misled(folder: Path, draw: random.Random) -> None:
    """Change a tensor, and words of the configuration."""
    tensors = load_file(folder / "model.safetensors")
    name = draw.choice([name for name in tensors if not name.endswith(".weight")])
    words = {draw.choice(WORDS): draw.choice(VALUES) for _ in range(draw.randrange(3))}
    damaged(folder, lambda held: held.update({name: reshaped(tensors[name], draw)}), words)


def wander(exported: dict[str, Path], copy_of: Callable[..., Path], seeds: range) -> None:
    """Each time the values are read, or one line says why not."""
    lines = []
    for seed in seeds:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        model = copy_of(exported[draw.choice(BOTH)], f"copy-{seed}")
        draw.choice([torn, misled])(model, draw)
        try:
            read_all(model)
        except InputError as refusal:
            lines.append(str(refusal))
        shutil.rmtree(model)
    assert len(lines) > len(seeds) // 3
    assert [line for line in lines if "\n" in line] == []


def test_no_damage_crashes_a_reader(exported: dict[str, Path], copy_of: Callable[..., Path]) -> None:
    wander(exported, copy_of, range(40))


@pytest.mark.slow
def test_no_damage_crashes_a_reader_at_length(exported: dict[str, Path], copy_of: Callable[..., Path]) -> None:
    wander(exported, copy_of, range(40, 1000))
