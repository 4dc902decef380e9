"""Tiny random models that read images, with the processors that make their inputs, and pictures to show them."""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoTokenizer

from compress.checkpoint.read.source import DEMO

SIDE = 32  # pixels of an image as models are given it
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 8,
}
DECODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
IMAGE, START, END = "<image>", "<|vision_start|>", "<|vision_end|>"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}" + IMAGE + "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def tokenizer() -> transformers.PreTrainedTokenizerBase:
    """The demo's, with a token that stands for an image and one for padding."""
    found = AutoTokenizer.from_pretrained(DEMO)
    found.add_special_tokens({"additional_special_tokens": [IMAGE, START, END], "pad_token": "<pad>"})
    return found


def image_processor() -> transformers.CLIPImageProcessor:
    return transformers.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})


def llava(directory: Path) -> Path:
    """A vision tower, a projector and a decoder, whose processor writes a token for each patch of an image."""
    words = tokenizer()
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**TOWER),
        text_config=transformers.LlamaConfig(**DECODER, vocab_size=len(words)),
        image_token_id=words.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-2,
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    processor = transformers.LlavaProcessor(
        image_processor(),
        words,
        patch_size=TOWER["patch_size"],
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    return saved(directory, model, processor)


def clip(directory: Path) -> Path:
    """Two towers, of images and of texts."""
    words = tokenizer()
    torch.manual_seed(0)
    text = {name: value for name, value in DECODER.items() if name not in ("num_key_value_heads",)}
    config = transformers.CLIPConfig(
        vision_config={**TOWER},
        text_config={**text, "max_position_embeddings": 64, "vocab_size": len(words), "eos_token_id": 1},
        projection_dim=16,
    )
    model = transformers.CLIPModel(config).eval()
    return saved(directory, model, transformers.CLIPProcessor(image_processor(), words))


def qwen2_vl(directory: Path) -> Path:
    """A tower that takes images of any size as rows of patches, and a decoder; its processor needs torchvision."""
    words = tokenizer()
    words.chat_template = TEMPLATE.replace(IMAGE, f"{START}{IMAGE}{END}")
    torch.manual_seed(0)
    tower = {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2, "num_heads": 4, "depth": 2, "patch_size": 8}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    config = transformers.Qwen2VLConfig(
        vision_config={**tower, "spatial_merge_size": 2},
        text_config={**DECODER, "vocab_size": len(words), "rope_parameters": rope},
        image_token_id=words.convert_tokens_to_ids(IMAGE),
        vision_start_token_id=words.convert_tokens_to_ids(START),
        vision_end_token_id=words.convert_tokens_to_ids(END),
    )
    images = transformers.Qwen2VLImageProcessor(min_pixels=16 * 16, max_pixels=64 * 64, patch_size=8, merge_size=2)
    model = transformers.Qwen2VLForConditionalGeneration(config).eval()
    words.save_pretrained(directory)
    return saved(directory, model, images)


def vit(directory: Path) -> Path:
    """A classifier of images."""
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**TOWER, num_labels=3)).eval()
    processor = transformers.ViTImageProcessor(size={"height": SIDE, "width": SIDE})
    return saved(directory, model, processor)


def saved(directory: Path, model: torch.nn.Module, processor: object) -> Path:
    """Write a model with its processor beside it."""
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


def pictures(folder: Path, count: int = 6, texts: bool = False) -> Path:
    """Random PNG files of several sizes, with a text beside each where asked for."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for i in range(count):
        pixels = random.integers(0, 256, (30 + 5 * i, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
        if texts:
            (folder / f"{i}.txt").write_text("noise " * (i + 1), encoding="utf-8")
    return folder


def conversations(folder: Path) -> Path:
    """rows.jsonl in a folder: messages for each of its pictures, each with an answer of another length."""
    rows = []
    for i, picture in enumerate(sorted(folder.glob("*.png"))):
        asked = [{"type": "image", "path": picture.name}, {"type": "text", "text": "What is it?"}]
        answer = [{"type": "text", "text": "noise " * (i + 1)}]
        rows.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]})
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path
