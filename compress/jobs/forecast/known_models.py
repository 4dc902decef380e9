"""Models of which only the configuration is there: a config.json, or one of `known_models.yaml` by its name."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from compress.base.errors import InputError, first_line
from compress.checkpoint.files import read_json
from compress.checkpoint.read.configuration import check_config
from compress.model.split_experts import split_experts

FILE = Path(__file__).with_suffix(".yaml")
WEIGHTS = ("*.safetensors", "*.bin")


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """{name: fields of the configuration, its `hub` id, and `parameters`, their number}."""
    entries: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return entries


def hub_id(name: str) -> str | None:
    """The hub id of a known model; None for another name."""
    known = {} if Path(name).exists() else known_models().get(name.lower(), {})
    return known.get("hub")


def model_from_configuration(name: str) -> nn.Module | None:
    """A model on the meta device, in the dtype of its configuration, each expert with layers of its own.

    name: a config.json, a folder that holds one and no weights, or a key of `known_models`. None for any other name.
    Raises InputError for a configuration from which transformers makes no language model.
    """
    path = Path(name)
    if path.is_dir() and (path / "config.json").is_file() and not any(any(path.glob(p)) for p in WEIGHTS):
        path = path / "config.json"
    if path.name == "config.json" and path.is_file():
        fields = read_json(path)
        check_config(fields, path)
    elif not path.exists() and name.lower() in known_models():
        fields = {"dtype": "bfloat16", **known_models()[name.lower()]}
        del fields["parameters"], fields["hub"]
    else:
        return None
    fields = {key: value for key, value in fields.items() if key not in ("auto_map", "transformers_version")}
    try:
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{name}: transformers makes no language model of it ({first_line(error)})") from None
    split_experts(model)
    return model
