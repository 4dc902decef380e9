"""Models of which only the configuration is there: a config.json, or one of `known_models.yaml` by its name."""

from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from compress.base.errors import InputError, NoSuchModelError, first_line
from compress.checkpoint.files import read_json
from compress.checkpoint.read.configuration import check_config
from compress.checkpoint.read.source import find_source
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


def check_not_known(name: str) -> None:
    """Raises InputError for the name of a known model, of which nothing but the configuration is there."""
    if (owned := hub_id(name)) is not None:
        raise InputError(f"{name} is a name of `compress plan` alone; give the hub id {owned} or a directory")


def known_instead(name: str) -> str | None:
    """The known model that a hub id is planned as: the one of its last part, where the hub does not give it. None for a
    model that is there. Raises InputError, with the nearest known name, for another that is not."""
    if Path(name).exists() or name == "demo":
        return None
    known = name.lower().rpartition("/")[2]
    try:
        find_source(name)
    except NoSuchModelError as error:
        if known in known_models():
            return known
        near = get_close_matches(known, known_models(), 1)
        raise InputError(
            f"{error}" + (f"; did you mean {near[0]!r}, whose shapes are known?" if near else "")
        ) from None
    return None


def model_from_configuration(name: str) -> nn.Module | None:
    """A model on the meta device, in the dtype of its configuration, each expert with layers of its own.

    name: a config.json, a folder that holds one and no weights, a key of `known_models`, or a hub id that ends in one
    and is not to be had. None for any other name.
    Raises InputError for a configuration from which transformers makes no language model.
    """
    path = Path(name)
    if path.is_dir() and (path / "config.json").is_file() and not any(any(path.glob(p)) for p in WEIGHTS):
        path = path / "config.json"
    if path.name == "config.json" and path.is_file():
        fields = read_json(path)
        check_config(fields, path)
    elif (known := name.lower() if hub_id(name) else known_instead(name)) is not None:
        fields = {"dtype": "bfloat16", **known_models()[known]}
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
