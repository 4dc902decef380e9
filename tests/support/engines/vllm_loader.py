"""A checkpoint as vLLM computes with it once it has loaded it, in float32 and plain torch: what it makes one layer of,
and which numbers it takes for all of that. Shares no code with what writes or loads our checkpoints.

From vLLM 0.32.0, `vllm/model_executor`:

    models/*.py                           `packed_modules_mapping`: FUSED; experts of a block: all in one tensor
    layers/quantization/compressed_tensors
      compressed_tensors.py, utils.py     a fused layer's scheme is its first part's; `ignore` takes all parts or none;
                                          caches are float8, of one scale or one for each head
      schemes/..._w4a4_nvfp4.py           one weight_global_scale and one input_global_scale: the largest of the parts
      schemes/..._w8a8_fp8.py             one input_scale: the largest; one weight_scale per tensor: codes are rounded
                                          again to the largest (`requantize_with_max_scale`, by way of float16)
      schemes/..._w8a8_int8.py            one input_scale: the largest; with zero points the widest range
                                          (`kernels/linear/scaled_mm/cutlass.py`)
      compressed_tensors_moe/             one scheme for all experts; gate's weight_global_scale for both; one
                                          input_scale for all experts, float8 alone (`process_fp8_input_tensor_
                                          strategy_moe`, `fused_moe/oracle/nvfp4.py`); no static int8
    models/gpt_oss.py                     reads no tensors of single experts but its own (w13, w2)
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import compress

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
LEVELS = torch.cat([E2M1, -E2M1])
BETWEEN = (E2M1[1:] + E2M1[:-1]) / 2
INT_MIDDLE = 0.5
FLOAT8, FLOAT8_MAX, E2M1_MAX = torch.float8_e4m3fn, 448.0, 6.0
QKV, GATED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
FUSED = {
    "LlamaForCausalLM": (QKV, GATED),
    "Qwen3ForCausalLM": (QKV, GATED),
    "MixtralForCausalLM": (QKV,),
    "Qwen3MoeForCausalLM": (QKV, GATED),
    "DeepseekV3ForCausalLM": (("q_a_proj", "kv_a_proj_with_mqa"), GATED),
    "GptOssForCausalLM": (QKV,),
}
FIRST, LAST = ("gate_proj", "up_proj", "w1", "w3"), ("down_proj", "w2")  # of an expert
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)$")


class VLLMError(Exception):
    """What vLLM raises while it loads a checkpoint."""


class Loaded:
    """A checkpoint's tensors, and its layers as vLLM groups them. units: {layers that are one, or of which one scale is
    asked: their scheme, None for dense ones}."""

    def __init__(self, out: Path) -> None:
        self.config = json.loads((out / "config.json").read_text())
        self.how = self.config["quantization_config"]
        self.tensors = {n: t for file in sorted(out.glob("*.safetensors")) for n, t in load_file(file).items()}
        _check_caches(self.how.get("kv_cache_scheme"))
        self.model = _model(out)
        layers = [n for n, m in self.model.named_modules() if isinstance(m, nn.Linear)]
        known = dict.fromkeys(n for each in layers for n in (each, each.replace(".mlp.", ".block_sparse_moe.")))
        here = {name.rpartition(".")[0] for name in self.tensors}
        self.units = {unit: self._scheme(unit) for unit in self._grouped([name for name in known if name in here])}

    def _grouped(self, layers: Sequence[str]) -> list[tuple[str, ...]]:
        units: dict[str, list[str]] = {}
        for name in layers:
            parent, _, leaf = name.rpartition(".")
            expert = EXPERT.match(name)
            group = next((g for g in FUSED[self.config["architectures"][0]] if leaf in g), None)
            if expert is not None:
                units.setdefault(f"{expert[1]} {'first' if leaf in FIRST else 'last'}", []).append(name)
            else:
                units.setdefault(name if group is None else f"{parent} {group}", []).append(name)
        return [tuple(sorted(unit, key=_order)) for unit in units.values()]

    def _scheme(self, unit: Sequence[str]) -> dict | None:
        ignored = {name in self.how["ignore"] for name in unit}
        if len(ignored) > 1:
            raise VLLMError(f"different schemes for the parts of {unit[0]}")
        if ignored == {True}:
            return None
        schemes = [self._target(name) for name in unit]
        if EXPERT.match(unit[0]) and any(scheme != schemes[0] for scheme in schemes):
            raise VLLMError(f"several schemes for the experts of {unit[0]}")
        if any(scheme != schemes[0] for scheme in schemes):
            raise VLLMError(f"tensors of other shapes for the parts of {unit[0]}")
        scheme = schemes[0]
        given = (scheme or {}).get("input_activations")
        if EXPERT.match(unit[0]) and given and given["type"] == "int" and not given["dynamic"]:
            raise VLLMError(f"fixed int8 inputs of experts, {unit[0]}")
        return scheme

    def _target(self, name: str) -> dict | None:
        groups = self.how["config_groups"].values()
        named = [g for g in groups if name in g["targets"]]
        matching = [
            g for g in groups for t in g["targets"] if t.startswith("re:") and re.match(t.removeprefix("re:"), name)
        ]
        return next(iter([*named, *matching, *(g for g in groups if "Linear" in g["targets"])]), None)

    def weights(self, unit: Sequence[str]) -> list[Tensor]:
        """[N, K] float32 of each part of a unit."""
        scheme = self.units[tuple(unit)]
        if scheme is None:
            return [self.tensors[f"{name}.weight"].float() for name in unit]
        if EXPERT.match(unit[0]):  # one layer for each expert
            pairs: dict[str, list[str]] = {}
            for name in unit:
                pairs.setdefault(EXPERT.match(name)[2], []).append(name)
            return [w for pair in pairs.values() for w in self._fused(pair, scheme, max_of=lambda of: of[0])]
        return self._fused(unit, scheme, max_of=max)

    def _fused(self, parts: Sequence[str], scheme: dict, max_of) -> list[Tensor]:
        def of(kind: str) -> list[Tensor]:
            return [self.tensors[f"{part}.{kind}"] for part in parts]

        form, how, rows = scheme.get("format") or self.how["format"], scheme["weights"], []
        kinds = {n.removeprefix(f"{parts[0]}.") for n in self.tensors if n.startswith(f"{parts[0]}.weight")}
        one = max_of(of("weight_global_scale")) if "weight_global_scale" in kinds else None
        whole = {kind: torch.cat(of(kind)) for kind in kinds - {"weight_global_scale", "weight_shape"}}
        if form == "float-quantized" and how["strategy"] == "tensor":
            whole["weight"], whole["weight_scale"] = _rounded_again(of("weight"), of("weight_scale"))
        if "weight_shape" in kinds:
            rows = [int(shape[0]) for shape in of("weight_shape")]
            whole["weight_shape"] = of("weight_shape")[0]
        rows = rows or [len(part) for part in of("weight_packed" if "weight_packed" in kinds else "weight")]
        return list(values(form, how, whole, one).split(rows))

    def rounding(self, unit: Sequence[str]):
        """The function by which a unit rounds its input; None where it does not."""
        scheme = self.units[tuple(unit)]
        given = None if scheme is None else scheme.get("input_activations")
        if not given:
            return None
        if given["dynamic"] == "local":  # of experts the widest range of all
            held = torch.stack([self.tensors[f"{name}.input_global_scale"] for name in unit])
            one = held.min() if EXPERT.match(unit[0]) else held.max()
            return lambda x: _nvfp4(x, one)
        if given["dynamic"]:
            return lambda x: _dynamic(x, given)
        scale = torch.stack([self.tensors[f"{name}.input_scale"].float() for name in unit])
        if given["type"] == "float":
            return lambda x: (x / scale.max()).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8).float() * scale.max()
        zeros = [self.tensors.get(f"{name}.input_zero_point", torch.zeros(1)) for name in unit]
        zero = torch.stack(zeros).float() if not given["symmetric"] else torch.zeros_like(scale)
        most, least = (scale * (127 - zero)).max(), (scale * (-128 - zero)).min()
        step = scale.max() if given["symmetric"] else (most - least) / 255
        middle = 0 if given["symmetric"] else (-128 - least / step).round()
        return lambda x: ((x / step + middle).round().clamp(-128, 127) - middle) * step


def _order(name: str) -> tuple:
    found, leaf = EXPERT.match(name), name.rpartition(".")[2]
    order = next((group.index(leaf) for group in (*FUSED["DeepseekV3ForCausalLM"], QKV, FIRST) if leaf in group), 0)
    return (int(found[2]) if found else 0, order)


def _check_caches(scheme: dict | None) -> None:
    """As `CompressedTensorsKVCacheMethod.validate_kv_cache_scheme`."""
    if scheme and (
        (scheme["type"], scheme["num_bits"]) != ("float", 8) or scheme["strategy"] not in ("tensor", "attn_head")
    ):
        raise VLLMError(f"a key-value cache of {scheme}")


def _rounded_again(codes: Sequence[Tensor], scales: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    one = torch.stack([scale.reshape(()) for scale in scales]).max().float()
    again = [(part.half() * scale.float()).float() / one for part, scale in zip(codes, scales, strict=True)]
    whole = torch.cat(again).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)
    return whole, one.expand(len(whole), 1)


def values(form: str, how: dict, whole: Mapping[str, Tensor], one: Tensor | None) -> Tensor:
    """[N, K] of codes and scales. form, how: the words of the configuration; one: the global scale."""
    scale = whole["weight_scale"]
    if form == "pack-quantized":
        codes = unpacked(whole["weight_packed"], how["num_bits"], int(whole["weight_shape"][1]))
    elif "weight_packed" in whole:  # floats of 4 bits, the lower half of a byte first
        packed = whole["weight_packed"].long()
        codes = LEVELS[torch.stack([packed & 15, packed >> 4], -1).flatten(1)]
    else:
        codes = whole["weight"].float()
    if scale.dtype == torch.uint8:  # exponents
        scale = torch.ldexp(torch.ones(scale.shape), scale.int() - 127)
    scale = scale.float() if one is None else scale.float() / one
    if how["strategy"] == "block":
        scale = scale.repeat_interleave(how["block_structure"][0], 0)[: len(codes)]
    return codes.float() * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)


def unpacked(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Signed codes from words of 32 bits: one behind the other, lowest bits first, also across words."""
    stream = ((packed.long()[..., None] >> torch.arange(32)) & 1).flatten(1)[:, : columns * bits]
    return (stream.unflatten(1, (-1, bits)) << torch.arange(bits)).sum(-1) - 2 ** (bits - 1)


def _e2m1(x: Tensor) -> Tensor:
    """The nearest of E2M1's values; in the middle of two, the even code."""
    codes = torch.bucketize(x.abs(), BETWEEN)
    middle = (codes < len(BETWEEN)) & (x.abs() == BETWEEN[codes.clamp(max=len(BETWEEN) - 1)])
    return E2M1[codes + (middle & (codes % 2 == 1))] * x.sign()


def _nvfp4(x: Tensor, one: Tensor) -> Tensor:
    groups = x.unflatten(-1, (-1, 16))
    local = (groups.abs().amax(-1, keepdim=True) / E2M1_MAX * one).clamp(max=FLOAT8_MAX).to(FLOAT8).float()
    step = local / one
    return (_e2m1(torch.where(step > 0, groups / step, 0.0).clamp(-E2M1_MAX, E2M1_MAX)) * step).flatten(-2)


def _dynamic(x: Tensor, given: dict) -> Tensor:
    """Rounded by the largest value of each token or group."""
    size = given.get("group_size") or x.shape[-1]
    groups = x.unflatten(-1, (-1, size))
    most = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10)
    if given.get("scale_dtype") == "torch.uint8" and given["num_bits"] == 4:
        step = torch.exp2(torch.floor(torch.log2(most / 1.75)) - 1)  # up to 7 steps of 1 are clipped to 6
        return (_e2m1((groups / step).clamp(-E2M1_MAX, E2M1_MAX)) * step).flatten(-2)
    if given["type"] == "float":
        step = most / FLOAT8_MAX
        if given.get("scale_dtype") == "torch.uint8":
            step = torch.exp2(torch.ceil(torch.log2(step)))
        return ((groups / step).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8).float() * step).flatten(-2)
    step = most / (2 ** (given["num_bits"] - 1) - INT_MIDDLE)
    return ((groups / step).round().clamp(-128, 127) * step).flatten(-2)


def _model(out: Path) -> nn.Module:
    config = transformers.AutoConfig.from_pretrained(out)
    del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    if config.architectures[0] != "GptOssForCausalLM":
        compress.split_experts(model)
    return model


def model_in_vllm(out: Path) -> nn.Module:
    """The model that computes with what vLLM makes of a checkpoint. Raises VLLMError where it would raise."""
    held = Loaded(out)
    coded = {name for unit, scheme in held.units.items() if scheme is not None for name in unit}
    state = {n: t for n, t in held.tensors.items() if n.rpartition(".")[0] not in coded or n.endswith(".bias")}
    state = {n: t.float() for n, t in state.items() if not n.endswith((".k_scale", ".v_scale"))}
    for unit in held.units:
        state |= {f"{name}.weight": w for name, w in zip(unit, held.weights(unit), strict=True)}
    missing, unknown = held.model.load_state_dict({_in_model(n): t for n, t in state.items()}, strict=False)
    if unknown:  # which vLLM passes over, and computes with what its memory held before
        raise VLLMError(f"no parameter for {unknown[0]}")
    assert set(missing) <= {"lm_head.weight"}, missing
    for unit in held.units:
        if (rounds := held.rounding(unit)) is not None:
            for name in unit:
                layer = held.model.get_submodule(_in_model(name))
                layer.register_forward_pre_hook(lambda _, given, rounds=rounds: (rounds(given[0].float()),))
    return held.model


def _in_model(name: str) -> str:
    return name.replace(".block_sparse_moe.", ".mlp.")
