"""Images for calibration: folders of them, conversations that show some, and what the processor makes of them."""

import base64
import json
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from commands import PLAIN_GPTQ, Outcome, command
from multimodal import IMAGE, clip, conversations, llava, pictures, qwen2_vl, vit
from transformers import AutoImageProcessor, AutoTokenizer

import compress
from compress.checkpoint.read.pretrained import processor_of
from compress.checkpoint.read.source import find_source
from compress.data.images import Sample, read_image, samples_of
from compress.data.processor_batches import QUESTION, Pictures, process

pytest.importorskip("PIL", reason="images are read by Pillow (the extra `images`)")
# Of a model without texts. transformers 5.17 makes it with torchvision, later ones with Pillow, too.
needs_image_processor = pytest.mark.skipif(
    "torchvision" in getattr(AutoImageProcessor, "_backends", ()) and find_spec("torchvision") is None,
    reason="this transformers makes image processors with torchvision, which is not installed",
)
FAST = [word for name, value in PLAIN_GPTQ.items() for word in ("--set", f"{name}={value}")]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six pictures with texts, and conversations about them. Not to be changed."""
    folder = pictures(tmp_path_factory.mktemp("pictures"), texts=True)
    conversations(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {make.__name__: make(folder / make.__name__) for make in (llava, clip, vit)}


def quantized(model: Path, calibration: object, output: Path, *more: object) -> Outcome:
    words = ["--group-size", 32, "--calibration", calibration, "--output", output, *FAST]
    return command("quantize", model, *words, *more)


def made(model: Path, samples: list[Sample] | None, size: int = 8) -> Pictures:
    assert samples is not None
    processor = processor_of(find_source(str(model)), texts=True)
    return process(samples, processor, "given", texts=True, count=None, size=size)


# --- what is read ------------------------------------------------------------------------------------------------


def test_texts_lie_beside_images_or_in_metadata(shown: Path, tmp_path: Path) -> None:
    pictures(tmp_path / "class", count=2)
    rows = [{"file_name": "class/1.png", "text": "the second"}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    found, beside = samples_of(str(tmp_path)), samples_of(str(shown))
    assert found is not None
    assert beside is not None
    assert [sample.text for sample in found] == ["", "the second"]
    (tmp_path / "class" / "0.txt").write_text(" \n")  # no caption
    assert [sample.text for sample in samples_of(str(tmp_path)) or ()] == ["", "the second"]
    assert [sample.text for sample in beside] == [" ".join(["noise"] * (i + 1)) for i in range(6)]


def test_an_image_of_a_message_is_a_path_an_address_in_the_row_or_one_of_a_list(shown: Path, tmp_path: Path) -> None:
    inline = "data:image/png;base64," + base64.b64encode((shown / "0.png").read_bytes()).decode()
    parts = [{"type": "image"}, {"type": "image_url", "image_url": {"url": inline}}, {"type": "text", "text": "Why?"}]
    row = {"messages": [{"role": "user", "content": parts}], "images": ["0.png"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row), encoding="utf-8")
    found = samples_of(str(tmp_path / "rows.jsonl"))
    assert found is not None
    assert found[0].images == (str(tmp_path / "0.png"), inline)
    assert found[0].messages[0]["content"] == [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Why?"}]


def test_text_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n{"text": "b"}')
    assert samples_of(str(tmp_path / "a.jsonl")) is None
    assert samples_of(str(tmp_path)) is None
    assert samples_of("demo") is None


# --- what the processor makes of it --------------------------------------------------------------------------------


def test_samples_share_a_batch_where_nothing_has_to_be_padded(models: dict[str, Path], shown: Path) -> None:
    """Answers of other lengths are batches of their own; questions without answers are one."""
    asked = [Sample(s.where, s.image) for s in samples_of(str(shown)) or []]
    apart, together = made(models["llava"], samples_of(str(shown / "rows.jsonl"))), made(models["llava"], asked)
    assert [len(batch["input_ids"]) for batch in apart.batches] == [1] * 6
    assert [len(batch["input_ids"]) for batch in together.batches] == [6]
    assert [len(batch["input_ids"]) for batch in made(models["llava"], asked, size=4).batches] == [4, 2]
    for batch in (*apart.batches, *together.batches):
        assert bool(batch["attention_mask"].all())
        assert batch["pixel_values"].shape[1:] == (3, 32, 32)
    assert apart.origin.tokens == sum(batch["input_ids"].numel() for batch in apart.batches)
    assert together.notes[1:] == (f"6 images without a text are shown with {QUESTION!r}",)


# --- the command line ----------------------------------------------------------------------------------------------


@pytest.mark.first
@pytest.mark.parametrize(
    ("model", "given", "layers", "says"),
    [
        ("llava", ".", 28, "6 images and 246 tokens of 6 of 6 samples"),
        ("llava", "rows.jsonl", 28, "6 images and 234 tokens of 6 of 6 samples"),
        ("clip", ".", 26, "6 images and 42 tokens of 6 of 6 samples"),
        pytest.param("vit", ".", 12, "6 images of 6 of 6 samples", marks=needs_image_processor),
    ],
)
def test_every_tower_is_calibrated_and_runs_as_it_was_decided(
    models: dict[str, Path], shown: Path, tmp_path: Path, model: str, given: str, layers: int, says: str
) -> None:
    done = quantized(models[model], shown / given, tmp_path / "out")
    assert done.code == 0, done.err
    assert says in done.err
    record = json.loads((tmp_path / "out/compress.json").read_text())
    assert record["calibration"]["images"] == record["calibration"]["samples"] == 6
    assert len(record["layers"]) == layers
    assert all("loss" in layer["figures"] for layer in record["layers"])  # none was left to plain rounding
    assert not [why for why in record["left_alone"].values() if "never called" in why]
    loaded = compress.load(tmp_path / "out")
    seen = samples_of(str(shown))
    assert seen is not None
    processor = processor_of(find_source(str(models[model])), texts=model != "vit")
    (batch, *_) = process(seen, processor, "given", texts=model != "vit", count=1, size=1).batches
    with torch.no_grad():
        assert all(torch.isfinite(each).all() for each in loaded(**batch).values() if isinstance(each, torch.Tensor))


@needs_image_processor
def test_samples_are_spread_over_the_images(models: dict[str, Path], shown: Path, tmp_path: Path) -> None:
    done = quantized(models["vit"], shown, tmp_path / "out", "--samples", 2)
    assert done.code == 0, done.err
    (origin,) = json.loads((tmp_path / "out/compress.json").read_text())["calibration"]["files"]
    assert (origin["rows"], origin["used"], origin["dropped"]) == (6, 2, {"not needed for so many samples": 4})


@needs_image_processor
def test_patches_of_images_of_any_size_are_calibrated_and_torchvision_is_asked_for(shown: Path, tmp_path: Path) -> None:
    model = qwen2_vl(tmp_path / "model")
    done = quantized(model, shown, tmp_path / "out")
    if find_spec("torchvision") is None:
        refused(done, "the processor of", "with Torchvision, which is not installed", "batches in Python")
    else:
        assert done.code == 0, done.err
    images, words = AutoImageProcessor.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    batches = []
    for sample in samples_of(str(shown)) or []:
        seen = dict(images(images=[read_image(str(sample.image), "")], return_tensors="pt"))
        count = int(seen["image_grid_thw"].prod()) // 4  # patches that become one token
        ids = words(f"What is {IMAGE * count}?", return_tensors="pt")["input_ids"]
        kinds = (ids == words.convert_tokens_to_ids(IMAGE)).long()
        batches.append({"input_ids": ids, "mm_token_type_ids": kinds, **seen})
    assert len({len(batch["pixel_values"]) for batch in batches}) > 1
    made = compress.quantize(model, compress.GPTQ(group_size=32, **PLAIN_GPTQ), calibration=batches)
    assert len(made.record.layers) == 24
    assert all("loss" in layer.figures for layer in made.record.layers)


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "row", "says"),
    [
        ("llava", [{"type": "image", "path": "no.png"}], ("line 1", "no.png cannot be read as an image", "No such")),
        ("llava", [{"type": "image", "path": "rows.jsonl"}], ("line 1", "rows.jsonl cannot be read as an image")),
        ("llava", [{"type": "image", "path": "vast.png"}], ("vast.png cannot be read", "9000 x 9000 pixels", "shrink")),
        ("llava", [{"type": "image", "url": "data:image/png;base64,?"}], ("line 1: data:... cannot be read",)),
        ("llava", [{"type": "image", "url": "https://a.b/c.png"}], ("https://a.b/c.png is in the web", "its path")),
        ("llava", [{"type": "image"}], ("line 1: an image has no place", "'images'")),
        ("clip", [{"type": "image", "path": "0.png"}], ("no chat template", "folder of images with texts")),
    ],
)
def test_images_that_cannot_be_read_are_refused_in_one_line(
    models: dict[str, Path], tmp_path: Path, model: str, row: object, says: tuple[str, ...]
) -> None:
    pictures(tmp_path, count=1)
    pytest.importorskip("PIL.Image").new("1", (9000, 9000)).save(tmp_path / "vast.png")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": row}]}), encoding="utf-8")
    refused(quantized(models[model], rows, tmp_path / "out"), *says)
    assert not (tmp_path / "out").exists()


def refused(outcome: Outcome, *says: str) -> None:
    """Exit code 2 and one line that says all of it."""
    assert outcome.code == 2, outcome
    assert outcome.err.count("\n") == 1, outcome.err
    assert [words for words in says if words not in outcome.err] == [], outcome.err


@needs_image_processor
def test_images_need_a_model_that_reads_them_and_its_processor(
    models: dict[str, Path], llama: Path, shown: Path, tmp_path: Path, copy_of: Callable[[Path], Path]
) -> None:
    only = pictures(tmp_path / "only")
    refused(quantized(llama, only, tmp_path / "out"), "is a directory without .txt, .jsonl, .json, .parquet")
    refused(quantized(models["vit"], shown, tmp_path / "out", "--length", 32), "length is of windows of text")
    refused(quantized(models["vit"], "demo", tmp_path / "out"), "holds no inputs of this model", "a folder of images")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "PIL", None)
        refused(quantized(models["vit"], shown, tmp_path / "out"), "read by Pillow, which is not", ".[images]")
    vast = Path(shutil.copytree(models["vit"], tmp_path / "vast"))
    settings = json.loads((vast / "preprocessor_config.json").read_text())
    settings["size"] = {"height": 100_000, "width": 100_000}
    (vast / "preprocessor_config.json").write_text(json.dumps(settings))
    refused(quantized(vast, shown, tmp_path / "out"), "processor makes images of 10,000,000,000 pixels (size)")
    bare = copy_of(models["vit"])
    (bare / "preprocessor_config.json").unlink()
    refused(quantized(bare, shown, tmp_path / "out"), "has no usable image processor", "preprocessor_config.json")
