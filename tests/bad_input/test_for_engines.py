"""What an engine cannot run, or a layout cannot hold exactly: one line that names the alternative, before any work."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from commands import Desk, command, make_llama, save
from mixtures import made, tokens
from models import build
from transformers import CompressedTensorsConfig

import compress
from compress.base.errors import CompressError
from compress.checkpoint.export.registry import exporter_named
from compress.checkpoint.read.source import find_source
from compress.inference.load.quantizer import transformers_alone
from compress.jobs.request import Request
from compress.passes.protocol.recipe import load_recipe, make_pass
from compress.search.fitting.recipe_space import Wishes, recipe_space
from compress.search.fitting.request import FitRequest, fit_target

# (words after `compress quantize MODEL`, what the line says)
ASKED: dict[str, tuple[str, str]] = {
    "an engine that is none": ("--for lamacpp", "unknown engine 'lamacpp'; did you mean 'llama.cpp'?"),
    "a program on an engine": ("--for ollama", "unknown engine 'ollama'; did you mean 'llama.cpp'?"),
    "rounded inputs": ("--for llama.cpp --scheme w8a8", "does not run w8a8; it runs w2a16,"),
    "float8": ("--for llama.cpp --scheme fp8", "give --scheme w4a16"),
    "inputs of 4 bits": ("--for vllm --scheme w4a4", "vllm does not run w4a4"),
    "inputs that compressed-tensors has not": ("--for transformers --scheme w2a2", "transformers does not run w2a2"),
    "trellis codes": ("--for vllm --method trellis --calibration demo", "the format of trellis; use --method gptq"),
    "floats without a block": ("--for llama.cpp --scheme mxfp8a16", "it runs w2a16, w3a16, w4a16, w5a16, w6a16, w7a16"),
    "floats that ONNX lacks": ("--for ort --scheme nvfp4a16", "ort does not run nvfp4a16; it runs w2a16, w4a16"),
    "floats of few inputs": (
        "--for llama.cpp --scheme nvfp4a16",
        "blocks of llama.cpp take multiples of 64: leave that out, --ignore",
    ),
    "a width without a kernel": ("--for ort --scheme w3a16", "ort does not run w3a16; it runs w2a16, w4a16, w8a16"),
    "a width without words": ("--for gptqmodel --scheme w5a16", "it runs w2a16, w3a16, w4a16, w8a16"),
    "groups of 16": ("--for llama.cpp --group-size 16", "allowed: multiples of 32: give --group-size 32"),
    "groups of 48": ("--for llama.cpp --group-size 48", "allowed: multiples of 32: give --group-size 32"),
    "groups of 256": ("--for vllm --group-size 256", "allowed: -1, 32, 64, 128: give --group-size 128"),
    "groups of 96": ("--for gptqmodel --group-size 96", "give --group-size 128"),
    "no groups": ("--for ort-genai --group-size -1", "runs groups, not one scale per output; give --group-size 32"),
    "zero points": ("--for llama.cpp --grid asymmetric", "runs symmetric codes; drop --grid asymmetric"),
    "zero points in words": ("--for gptqmodel --grid asymmetric", "drop --grid asymmetric"),
    "outliers": ("--for vllm --set outliers=0.01", "runs no codes with exact outliers beside them; drop outliers"),
    "searched inputs": ("--for transformers --scheme w4a4 --set input_range=mse", "searches no ranges of inputs"),
    "inputs rotated online": ("--for vllm --method rotate --set online=true", "vllm rotates no inputs as it runs"),
    "tiles": ("--for llama.cpp --method spqr --calibration demo", "drop outliers, or leave --for out"),
    "tiles alone": (
        "--for llama.cpp --method spqr --set outliers=0 --group-size 32 --calibration demo",
        "llama.cpp does not run the format of spqr; use --method gptq",
    ),
    "codes and low rank": ("--for gptqmodel --method lqs --calibration demo", "the format of lqs; use --method gptq"),
    "ternary codes in small groups": (
        "--for llama.cpp --method ternary --group-size 128 --calibration demo",
        "runs ternary codes in groups of multiples of 256; give --group-size 256",
    ),
    "ternary codes of few inputs": (
        "--for llama.cpp --method ternary --calibration demo",
        "blocks of llama.cpp take multiples of 256: use --method gptq",
    ),
    "low rank": ("--for vllm --method low-rank --calibration demo", "leave --for out"),
    "ternary codes": ("--for ort --method ternary --calibration demo", "the format of ternary; use --method gptq"),
    "super-blocks": ("--for vllm --scheme q4_k", "vllm does not run q4_k"),
    "an embedding": ("--for ort --embeddings w8a16", "holds no compressed embedding; drop --embeddings"),
    "an embedding in super-blocks": (
        "--for llama.cpp --embeddings q6_k",
        "integer codes alone; give w8a16 (in GGUF Q8_0)",
    ),
    "a cache with a scale per token": (
        "--for vllm --kv-cache fp8",
        "reads key-value caches of fp8 per tensor or fp8 per head, not of fp8 per token; give --kv-cache fp8:tensor",
    ),
    "ranges of inputs that are learned": (
        "--for vllm --scheme w8a8 --set activations=static --recover 1s --calibration demo",
        "learns one for each: give train scales=fixed, or activations=dynamic, or leave --for out",
    ),
    "a dense part of a layer": (
        "--for vllm --ignore *.k_proj",
        "vllm makes one layer of model.layers.0.self_attn.q_proj, k_proj and v_proj (2 such groups), which would have",
    ),
    "a cache": ("--for llama.cpp --kv-cache fp8", "holds no rounded key-value cache; drop --kv-cache"),
    "shards of a single file": ("--for llama.cpp --shard-size 1GB", "writes a single weight file; drop --shard-size"),
    "2:4 without zeros": ("--for llama.cpp --store 2:4", "drop store, or export later"),
    "levels on Macs": (
        "--for mlx --scheme mxfp4a16",
        "it runs w2a16, w3a16, w4a16, w5a16, w6a16, w8a16: give --scheme",
    ),
    "groups of 16 on Macs": ("--for mlx --group-size 16", "allowed: multiples of 32: give --group-size 128"),
    "zero points on Macs": ("--for mlx --grid asymmetric", "runs symmetric codes; drop --grid asymmetric"),
    "2 bits of a builder": ("--for ort-genai --scheme w2a16", "it runs w4a16, w8a16: give --scheme w4a16"),
}


@pytest.mark.parametrize("what", ASKED)
def test_what_an_engine_does_not_run_is_one_line(what: str, desk: Desk) -> None:
    words, says = ASKED[what]
    words = words if "--method" in words else f"{words} --method rtn"
    outcome = command("quantize", desk.model, *words.split(), "--output", desk.output, "--quiet")
    assert outcome.code == 2, outcome
    assert outcome.err.count("\n") == 1, outcome.err
    assert says in outcome.err
    assert not list(desk.here.glob("output*"))


@pytest.mark.parametrize(
    ("model", "engine", "says"),
    [
        (partial(made, "deepseek-v3"), "mlx", "it is a mixture; of these MLX takes mixtral"),
        (partial(build, "gpt2"), "mlx", "c_attn.weight is stored as [inputs, outputs]"),
        (partial(made, "mixtral"), "gptqmodel", "has other names for layers of mixtral and does not find these"),
    ],
    ids=["a mixture", "gpt2", "other names"],
)
def test_a_model_that_an_engine_does_not_run_is_refused_before_it_is_quantized(
    model: Callable[[], torch.nn.Module], engine: str, says: str, tmp_path: Path
) -> None:
    words = ("--method", "rtn", "--for", engine, "--output", tmp_path / "output", "--quiet")
    outcome = command("quantize", save(model().half(), tmp_path / "model"), *words)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1), outcome
    assert says in outcome.err
    assert not list(tmp_path.glob("output*"))


WINDOW: dict[str, object] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 96}
WINDOW |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "pad_token_id": 0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN, OTHER = ({"rope_type": "default", "rope_theta": base} for base in (1e4, 5e4))
LOCAL, FULL = "sliding_attention", "full_attention"
# (class of transformers, its settings beside WINDOW, what the line says)
FAMILIES: dict[str, tuple[str, dict[str, object], str]] = {
    "an encoder": (
        "Bert",
        {},
        "it is a BertForMaskedLM, which mlx-lm 0.32.2 does not run, or not as transformers does",
    ),
    "a family that turns other numbers": ("Glm", {}, "it is a GlmForCausalLM, which mlx-lm 0.32.2 does not run"),
    "scaled positions": (
        "Starcoder2",
        {"rope_parameters": YARN},
        "scaled by 'yarn', which mlx-lm's starcoder2 does not",
    ),
    "windows of Gemma": (
        "Gemma3Text",
        {"layer_types": [FULL, LOCAL]},
        "are not all but each nth; mlx-lm's gemma3_text",
    ),
    "windows of OLMo": ("Olmo3", {"layer_types": [LOCAL] * 2}, "all its layers have a window; mlx-lm's olmo3 has one"),
    "positions of OLMo": (
        "Olmo3",
        {"layer_types": [LOCAL, FULL], "rope_parameters": {FULL: PLAIN, LOCAL: OTHER}},
        "its layers with a window have another rope_theta",
    ),
}


@pytest.mark.parametrize("what", FAMILIES)
def test_families_that_mlx_lm_computes_otherwise_are_refused(what: str, tmp_path: Path) -> None:
    kind, settings, says = FAMILIES[what]
    config = getattr(transformers, f"{kind}Config")(**{**WINDOW, **settings})
    head = "MaskedLM" if kind == "Bert" else "CausalLM"
    save(getattr(transformers, f"{kind.removesuffix('Text')}For{head}")(config), tmp_path / "model")
    (reason,) = exporter_named("mlx").why_not_model(find_source(str(tmp_path / "model")))
    assert says in reason
    assert reason.endswith("; `--to dense` takes it")


@pytest.mark.parametrize(("positions", "other"), [(PLAIN, "dense"), ({**YARN, "truncate": False}, "gguf")])
def test_gguf_is_named_for_a_mixture_only_where_it_takes_the_model(
    positions: dict[str, object], other: str, tmp_path: Path
) -> None:
    config = transformers.GptOssConfig(
        **{**WINDOW, "vocab_size": 2048, "rope_parameters": positions}, head_dim=16, num_local_experts=4
    )
    model = find_source(str(save(transformers.GptOssForCausalLM(config), tmp_path / "model")))
    (reason,) = exporter_named("mlx").why_not_model(model)
    assert reason.endswith(f"; `--to {other}` takes it")


W4 = {"group_size": 32}
# (What is quantized by RTN's options, or left as it is, --to, what the line says)
EXPORTED: dict[str, tuple[Callable[[], torch.nn.Module], dict[str, object] | None, str, str]] = {
    "nothing": (make_llama, None, "awq", "it holds no codes; quantize it first"),
    "a width": (make_llama, {**W4, "scheme": "w5a16"}, "gptq", "allowed: 2, 3, 4, 8; quantize with --bits 8"),
    "a width on Macs": (
        make_llama,
        {**W4, "scheme": "w7a16"},
        "mlx",
        "allowed: 2, 3, 4, 5, 6, 8; quantize with --bits",
    ),
    "zero points on Macs": (make_llama, {**W4, "grid": "asymmetric"}, "mlx", "quantize with --grid signed-scale"),
    "groups on Macs": (make_llama, {"group_size": 16}, "mlx", "allowed: multiples of 32; quantize with --group-size"),
    "a mixture on Macs": (partial(made, "deepseek-v3"), {"group_size": 16}, "mlx", "of these MLX takes mixtral"),
    "GPT-2 on Macs": (partial(build, "gpt2"), W4, "mlx", "c_attn.weight is stored as [inputs, outputs]"),
    "rounded inputs": (make_llama, {"scheme": "w8a8"}, "mlx", "quantize weights alone, like --scheme w8a16"),
    "integers for TensorRT": (make_llama, W4, "modelopt", "modelopt has nvfp4, nvfp4a16, mxfp8, fp8, and fp8 with"),
    "an activation": (partial(make_llama, hidden_act="relu"), W4, "gguf", "its activation is relu; llama.cpp computes"),
}


@pytest.mark.parametrize("what", EXPORTED)
def test_what_a_layout_does_not_hold_is_one_line(what: str, tmp_path: Path) -> None:
    build, options, to, says = EXPORTED[what]
    model = save(build().half(), tmp_path / "model")
    if options is not None:
        compress.quantize(model, make_pass("rtn", options), output=tmp_path / "out", verify=False)
        model = tmp_path / "out"
    refused = command("export", model, "--to", to, "--output", tmp_path / "there")
    assert (refused.code, refused.err.count("\n")) == (2, 1), refused
    assert says in refused.err
    assert not list(tmp_path.glob("there*"))


def test_inputs_that_fill_no_block_are_refused_before_the_run(tmp_path: Path) -> None:
    model = save(make_llama(intermediate_size=80).half(), tmp_path / "model")
    words = ("quantize", model, "--method", "rtn", "--for", "llama.cpp", "--output", tmp_path / "out")
    outcome = command(*words)
    assert outcome.code == 2
    assert "down_proj has 80 inputs (2 layers in all); blocks of llama.cpp take multiples of 32: leave" in outcome.err
    assert "that out, --ignore 'model.layers.*.mlp.down_proj', or leave --for out" in outcome.err
    assert not list(tmp_path.glob("out*"))
    assert command(*words, "--ignore", "*.down_proj").code == 0
    for engine in ("llama.cpp", "gptqmodel", "ort-genai"):
        planned = command("plan", model, "--method", "rtn", "--for", engine)
        assert (planned.code, f"blocks of {engine} take multiples of 32" in planned.err) == (2, True), planned


def test_groups_are_chosen_that_an_engine_and_a_layout_have(tmp_path: Path) -> None:
    model = save(make_llama(intermediate_size=80).half(), tmp_path / "model")
    planned = command("plan", model, "--method", "rtn", "--for", "ort", "--json", tmp_path / "plan.json")
    assert planned.code == 0, planned
    assert command("plan", model, "--method", "rtn", "--for", "ort", "--scheme", "w8a8").code == 0
    schemes = {each["scheme"] for each in json.loads((tmp_path / "plan.json").read_text())["layers"]}
    assert schemes == {"w4a16 g32 symmetric", "w4a16 channel symmetric"}
    compress.quantize(model, make_pass("rtn", {}), output=tmp_path / "usual", verify=False)
    refused = command("export", tmp_path / "usual", "--to", "awq", "--output", tmp_path / "out")
    assert "quantize with --group-size 16" in refused.err
    compress.quantize(model, make_pass("rtn", {"group_size": 16}), output=tmp_path / "alike", verify=False)
    assert command("export", tmp_path / "alike", "--to", "awq", "--output", tmp_path / "out").code == 0
    refused = command("export", tmp_path / "alike", "--to", "gptq", "--output", tmp_path / "no")
    assert "allowed: multiples of 32; leave that out, --ignore 'model.layers.*.mlp.down_proj'" in refused.err


MIXED = """passes:
  - rtn: {{scheme: w8a16, group_size: {1}}}
    only: ['{0}']
  - rtn: {{scheme: w4a16, group_size: {1}}}
    but: ['{0}']
"""
# What one layer is made of, by vLLM, and what is given another scheme than the rest of it.
ONE_LAYER = {
    "*.up_proj": (make_llama, 32, "vllm makes one layer of model.layers.0.mlp.gate_proj and up_proj (2 such groups)"),
    "*.kv_a_proj_with_mqa": (partial(made, "deepseek-v3"), -1, "self_attn.q_a_proj and kv_a_proj_with_mqa (2 such"),
    "*.1.down_proj": (partial(made, "qwen3-moe"), -1, "all experts of a block, and those of model.layers.0.mlp.exp"),
    "*.experts.1.w1": (partial(made, "mixtral"), -1, "all experts of a block, and those of model.layers.0."),
}


@pytest.mark.parametrize("pattern", ONE_LAYER)
def test_layers_that_become_one_have_one_scheme(pattern: str, tmp_path: Path) -> None:
    build, size, says = ONE_LAYER[pattern]
    build().save_pretrained(tmp_path / "model")
    recipe = tmp_path / "mixed.yaml"
    recipe.write_text(MIXED.format(pattern, size))
    for words in (("quantize", "--for", "vllm", "--output", tmp_path / "out"), ("plan", "--for", "vllm")):
        refused = command(words[0], tmp_path / "model", "--recipe", recipe, *words[1:])
        assert (refused.code, tuple(tmp_path.glob("out*"))) == (2, ()), refused
        assert says in refused.err
    told = command("plan", tmp_path / "model", "--recipe", recipe, "--json", "-").json()["engines"]
    assert says in told["vllm"]
    assert (told["transformers"] is not None) == ("experts" in says)
    # Without --for the same recipe runs, and says for whom its result is not.
    alone = compress.quantize(tmp_path / "model", load_recipe(recipe), output=tmp_path / "out", verify=False)
    assert any("vLLM" in note for note in alone.record.notes), alone.record.notes


TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
TEXT = {**TINY, "vocab_size": 128, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}


@pytest.mark.filterwarnings("ignore:You passed .quantization_config.")
def test_a_tower_that_transformers_opens_dequantized_is_said_to_be_one(tmp_path: Path) -> None:
    """Its initialization reads weights, and nothing can be computed without pictures: it is opened all the same."""
    config = transformers.Gemma3Config(
        text_config=TEXT,
        vision_config={**TINY, "image_size": 32, "patch_size": 8},
        mm_tokens_per_image=4,
        image_token_index=127,
        boi_token_index=125,
        eoi_token_index=126,
    )
    kind = transformers.AutoModelForImageTextToText
    kind.from_config(config).bfloat16().save_pretrained(tmp_path / "model")
    words = ("--method", "rtn", "--scheme", "w8a16", "--for", "transformers", "--output", tmp_path / "out")
    done = command("quantize", tmp_path / "model", *words)
    assert done.code == 0, done
    said = " ".join(done.out.split())  # wrapped at 80 columns
    assert "neither vocab_size nor num_channels; it loads with CompressedTensorsConfig(dequantize=True)" in said
    with transformers_alone():
        with pytest.raises(AttributeError, match="weight"):
            kind.from_pretrained(tmp_path / "out")
        kind.from_pretrained(tmp_path / "out", quantization_config=CompressedTensorsConfig(dequantize=True))


def test_what_transformers_does_not_open_is_not_promised(tmp_path: Path) -> None:
    kind = transformers.AutoModelForSequenceClassification
    config = transformers.ModernBertConfig(**TINY, vocab_size=128, pad_token_id=0, num_labels=3)
    kind.from_config(config).bfloat16().save_pretrained(tmp_path / "model")
    words = ("--method", "rtn", "--scheme", "w8a16", "--embeddings", "w8a16", "--output", tmp_path / "out")
    failed = command("quantize", tmp_path / "model", "--for", "transformers", *words)
    assert failed.code == 1
    assert f"transformers does not open {tmp_path / 'out'} (not compared: it cannot load this: its init" in failed.err
    assert "before 5.23" not in failed.err
    assert compress.verify(tmp_path / "out")["loader"] == "none"


def test_fit_offers_an_engine_no_experts_of_several_schemes(tmp_path: Path) -> None:
    made("mixtral").save_pretrained(tmp_path / "model")
    torch.save(tokens(20), text := tmp_path / "text.pt")
    words = ("--calibration", text, "--text", text, "--bits", 4, "--output", tmp_path / "out")
    refused = command("fit", tmp_path / "model", *words, "--for", "vllm")
    assert (refused.code, refused.err.count("\n")) == (2, 1), refused
    assert "a scheme for each expert, and vllm takes one for all experts of a block; quantize with one" in refused.err
    _, ignored = refused.err.strip().split(", or --ignore ")
    patterns = [each.strip("' ") for each in ignored.split("--ignore")]
    rows = torch.zeros(8, 16, dtype=torch.int64)
    asked = Request(model=str(tmp_path / "model"), calibration=rows, ignore=patterns)
    request = FitRequest(asked, fit_target(bits=4.0), rows)
    assert recipe_space(request, Wishes("vllm")).schemes


def test_blocks_of_scales_end_where_a_part_of_a_layer_does(tmp_path: Path) -> None:
    model = save(make_llama(hidden_size=128, intermediate_size=128), tmp_path / "model")
    words = ("quantize", model, "--method", "rtn", "--scheme", "fp8-block", "--output", tmp_path / "out")
    refused = command(*words, "--for", "vllm")
    assert refused.code == 2
    assert (
        "q_proj, k_proj and v_proj, and the 64 rows of model.layers.0.self_attn.k_proj are no multiple" in refused.err
    )
    assert command(*words, "--for", "transformers", "--no-verify").code == 0


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_llama().half(), tmp_path_factory.mktemp("half") / "model")


def test_weights_beyond_the_scales_of_float16_are_one_line(tmp_path: Path) -> None:
    llama = make_llama().float()
    with torch.no_grad():
        llama.model.layers[1].mlp.up_proj.weight[0, 0] = 1e9
    model = save(llama, tmp_path / "model")
    with pytest.raises(CompressError, match=r"up_proj has weights up to 1e\+09, whose scales float16 has not"):
        compress.quantize_for("gptqmodel", model, make_pass("rtn", {"group_size": 32}), output=tmp_path / "out")


@pytest.mark.parametrize(("factor", "says"), [(1e9, r"e\+0\d, whose scales"), (1e-12, r"e-1\d, whose scales")])
def test_weights_beyond_super_blocks_are_one_line(factor: float, says: str, tmp_path: Path) -> None:
    llama = make_llama(hidden_size=256, intermediate_size=256, num_hidden_layers=1).float()
    with torch.no_grad():
        llama.model.layers[0].mlp.up_proj.weight.mul_(factor)
    with pytest.raises(CompressError, match=says):
        compress.quantize(llama, make_pass("rtn", {"scheme": "q4_k"}))


def test_a_run_stopped_before_its_export_goes_on(half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, words = tmp_path / "out", ("quantize", half, "--method", "rtn", "--for", "gptqmodel", "--output")
    monkeypatch.setattr("compress.jobs.quantize_for.export", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compress.quantize_for("gptqmodel", half, make_pass("rtn", {"scheme": "w4a16"}), output=out)
    monkeypatch.undo()
    weights = (tmp_path / "out.checkpoint" / "model.safetensors").stat()
    refused = command(*words, out)
    assert (refused.code, out.exists()) == (2, False)
    assert "out.checkpoint exists; choose another output or pass --overwrite" in refused.err
    other = command(*words, out, "--scheme", "w8a16", "--resume")
    assert "out.checkpoint exists, complete, of a run that differs (recipe); choose another" in other.err, other
    done = command(*words, out, "--resume")
    assert done.code == 0, done
    assert "out.checkpoint is complete: nothing of it is left to do" in done.err
    assert "14 layers compressed" in done.out
    assert compress.verify(out)["layers"] == 14
    assert (tmp_path / "out.checkpoint" / "model.safetensors").stat() == weights


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_an_engine_finds_what_it_opens(half: Path, tmp_path: Path) -> None:
    """The checkpoint itself, or its export, with the checkpoint beside it."""
    out = tmp_path / "out"
    made = command("quantize", half, "--method", "rtn", "--for", "gptqmodel", "--output", out)
    assert made.code == 0, made
    assert "--for gptqmodel picks scheme w4a16; it reads OUT, in GPTQ's layout" in made.err
    assert f"gptqmodel opens {out}: model.safetensors" in made.out
    assert compress.verify(out)["layers"] == 14
    held = [str(layer.scheme) for layer in compress.load(out).modules() if hasattr(layer, "scheme")]
    assert held == ["w4a16 g32 symmetric"] * 14
    again = command("quantize", half, "--method", "rtn", "--for", "gptqmodel", "--output", out)
    assert (again.code, again.err.count("\n")) == (2, 3), again  # what was picked, its scales, and the reason
    assert "exists; choose another output or pass --overwrite" in again.err
    left = compress.quantize_for("vllm", half, make_pass("rtn", {}), output=tmp_path / "vllm", notes=["why"])
    assert left.exported is None
    assert left.output == tmp_path / "vllm"
