"""A Whisper-like model from the command line: batches of features and tokens in a file."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from commands import command
from torch import nn

import compress
from compress.inference.layers.compressed_layers import compressed_layers
from compress.jobs.verify import ACTIVE_TOLERANCE

FAST = ["--set", "drift=0", "--set", "clip=false", "--set", "refit=0", "--set", "sweeps=0"]
METHODS = {
    "gptq": ["--method", "gptq", "--scheme", "w4a16", "--group-size", 16, *FAST],
    "smoothquant": ["--method", "smoothquant", "--scheme", "w8a8"],
}
PASSES = {
    "gptq": lambda: compress.GPTQ(group_size=16, drift=0.0, clip=False, refit=0, sweeps=0),
    "smoothquant": compress.SmoothQuant,
}
POSITIONS, MELS = 16, 8


def whisper() -> transformers.WhisperForConditionalGeneration:
    torch.manual_seed(0)
    stacks = {f"{s}_{n}": v for s in ("encoder", "decoder") for n, v in
              (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))}  # fmt: skip
    config = transformers.WhisperConfig(
        vocab_size=96,
        d_model=32,
        num_mel_bins=MELS,
        max_source_positions=POSITIONS,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        **stacks,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    for p in model.parameters():
        p.data.mul_(3 if p.ndim == 2 else 1)
    return model


def heard(count: int = 3) -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    return [
        {
            "input_features": torch.randn(2, MELS, 2 * POSITIONS, generator=random),
            "decoder_input_ids": torch.randint(3, 96, (2, 12), generator=random),
        }
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    whisper().save_pretrained(folder / "model")
    torch.save(heard(), folder / "heard.pt")
    return folder


@pytest.mark.first
@pytest.mark.parametrize("method", METHODS)
def test_both_stacks_are_compressed_from_the_command_line_verified_and_run(place: Path, method: str) -> None:
    out = place / method
    done = command(
        "quantize", place / "model", "--calibration", place / "heard.pt", "--output", out, "--allow-little",
        "--verify", *METHODS[method],
    )  # fmt: skip
    assert done.code == 0, done.err
    record = json.loads((out / "compress.json").read_text())
    names = {layer["name"] for layer in record["layers"]}
    assert names == {n for n, m in whisper().named_modules() if isinstance(m, nn.Linear)} - {"proj_out"}
    assert set(record["left_alone"]) == {
        *("proj_out", "model.decoder.embed_tokens", "model.encoder.embed_positions", "model.decoder.embed_positions"),
        *("model.encoder.conv1", "model.encoder.conv2"),
    }
    assert (record["calibration"]["source"], record["calibration"]["batches"]) == ("heard.pt", 3)
    assert record["verification"]["layers"] == len(names)
    batch, loaded, original = heard()[0], compress.load(out), whisper()
    assert len(list(compressed_layers(loaded))) == len(names)
    in_memory = whisper()
    compress.quantize(in_memory, PASSES[method](), calibration=heard())
    with torch.no_grad():
        found, decided, before = (each(**batch).logits for each in (loaded, in_memory, original))
    assert float((found - decided).abs().max()) < ACTIVE_TOLERANCE * float(decided.std())
    assert 0 < float((found - before).norm()) < 0.3 * float(before.norm())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["heard.pt", "--length", 8], "samples, length and bos do not apply to ready-made batches"),
        (["demo"], "'demo' holds no inputs of this model; the model takes input_features: give batches in Python"),
    ],
)
def test_what_is_no_batches_of_this_model_is_refused(place: Path, given: list[object], says: str) -> None:
    calibration, *more = given
    data = calibration if calibration == "demo" else place / str(calibration)
    done = command(
        "quantize", place / "model", "--calibration", data, "--output", place / "no", *METHODS["gptq"], *more
    )
    assert done.code == 2
    assert says in done.err
