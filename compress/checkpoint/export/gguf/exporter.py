"""Writes a checkpoint as one GGUF file, for llama.cpp, Ollama, LM Studio and what else reads it.

    Modelfile     for `ollama create`
    model.gguf    metadata, tokenizer and all tensors: the codes of compressed layers in blocks of the same values
                  (`holding`), the others in float16, bfloat16 or float32 as they are stored, and float32 where they
                  have one dimension

The record has, for each tensor, the SHA-256 of the values that it is to have. gguf-py's own dequantizer is held to them
in a process of its own after writing, and by `compress verify` whenever asked.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.base.version import VERSION
from compress.checkpoint.export.exporter import Exporter, Written
from compress.checkpoint.export.gguf import tokenizer
from compress.checkpoint.export.gguf.block_types import why_not as why_no_block
from compress.checkpoint.export.gguf.file import FILE, Entry, add_all, write_file
from compress.checkpoint.export.gguf.graft import Template, entries_of
from compress.checkpoint.export.gguf.names import entries_of as tensor_entries
from compress.checkpoint.export.gguf.names import floats_why_not, fused, planned, unnamed
from compress.checkpoint.export.gguf.readback import read_back
from compress.checkpoint.export.integers import note_losses, why_not_float16
from compress.checkpoint.export.place import Place
from compress.checkpoint.gguf.architectures import FAMILIES, Architecture
from compress.checkpoint.gguf.library import NEWER, NEWER_FILES, gguf, missing
from compress.checkpoint.gguf.tensor_names import names_of
from compress.checkpoint.leftovers import LEGAL
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.pretrained import read_config
from compress.checkpoint.read.source import Source
from compress.checkpoint.read.unplaced_tensors import beside, totals
from compress.checkpoint.read.weight_files import tensor_bytes
from compress.checkpoint.write.directory import is_checkpoint
from compress.checkpoint.write.manifest import read_record

NAME = "general.name"
QUANTIZATION_VERSION = 2  # of ggml's blocks (GGML_QNT_VERSION)
# llama.cpp's word for a file, by the type of most of its weights; F16 for one that has no word for it.
FILE_TYPES = {"F32": "ALL_F32", **{f: f"MOSTLY_{f}" for f in ("F16", "BF16")}}
FILE_TYPES["MXFP4"] = "MOSTLY_MXFP4_MOE"  # the only word there is
FILE_TYPES |= {f"Q{bits}_K": f"MOSTLY_Q{bits}_K_M" for bits in (3, 4, 5)}  # mixes of these; Q2_K and Q6_K are words

MODELFILE = f"""# ollama create NAME -f Modelfile
# {FILE} holds the chat template. Where Ollama does not know it, add TEMPLATE; see its documentation of Modelfiles.
FROM ./{FILE}
"""


@dataclass(frozen=True)
class GGUFLayout(Exporter):
    """One file for llama.cpp: codes in blocks that stand for the same values. template: a GGUF file that llama.cpp's
    converter made of the dense export, for another family than those in `architectures` (`graft`). name: of the model,
    in the file."""

    template: str | None = None
    name: str | None = None

    about = "one GGUF file, for llama.cpp, Ollama, LM Studio: K-quants; codes in groups of 32 or more"
    kind = "gguf"
    reads_back = True
    options = ("template", "name")
    one_file = True
    companions = LEGAL

    def why_not(self, checkpoint: Source) -> list[str]:
        """A family, tokenizer and codes that can be written exactly; and the package gguf."""
        if reasons := self.why_not_model(checkpoint):
            return reasons
        if self.template is None and (held := fused(checkpoint)):
            return [f"{held[0]} holds all experts; quantize them, which takes them apart, or give --template"]
        return _why_no_blocks(checkpoint)

    def why_not_model(self, model: Source) -> list[str]:
        """A family and tokenizer that are known here; and the package gguf."""
        if (line := missing()) is not None:
            return [line]
        return [] if self.template is not None else _why_no_family(model)

    def write(self, checkpoint: Source, place: Place) -> Written:
        """Write the file, one tensor after the other."""
        note_losses(checkpoint, place)
        fill: Callable[[Any, Mapping[str, Any]], None]
        if self.template is not None:
            template = Template(Path(self.template))
            family, entries, fill = template.family, entries_of(checkpoint, template), template.fill
        else:
            own = FAMILIES[checkpoint.config["architectures"][0]]
            family, entries = own.name, _entries(checkpoint, own, place)
            metadata = _metadata(checkpoint, own)
            fill = lambda writer, keys: add_all(writer, {**metadata, **keys})  # noqa: E731
        for line in _spread(entries, checkpoint):
            place.note(line)
        keys = {**_file_type(entries), **({} if self.name is None else {NAME: self.name})}
        held = write_file(place, family, lambda writer: fill(writer, keys), entries)
        place.text("Modelfile", MODELFILE)
        layers = sum(1 for layer in stored_in(checkpoint).layers.values() if layer.shares is None)
        return Written(layers, {"gguf": {"file": FILE, "layers": layers, "tensors": held}})

    def read_back(self, folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
        """Compare every tensor, as gguf-py reads it, with the values that were decided. Raises CheckpointError."""
        return read_back(folder, record.get("gguf") or {})


def _entries(source: Source, family: Architecture, place: Place) -> list[Entry]:
    """The tensors of a file of a family that is known here; with notes of what it lacks."""
    config = read_config(source)
    lost = [f"not written: {words}" for words in totals(beside(source))]
    for line in (*family.notes(config), *tokenizer.notes_of(source.path), *lost):
        place.note(line)
    return tensor_entries(planned(source, family, names_of(family, config)), source)


def _why_no_family(source: Source) -> list[str]:
    """Reasons against the model: its family, configuration, names and tokenizer."""
    kind = (source.config.get("architectures") or ["none"])[0]
    if kind not in FAMILIES:
        known = ", ".join(name.removesuffix("ForCausalLM") for name in FAMILIES)
        return [f"it is a {kind}; written without --template FILE: {known}"]
    family, config = FAMILIES[kind], read_config(source)
    if found := family.why_not(config):
        return [f"{'; '.join(found)}; `--to dense` takes it"]
    names = names_of(family, config)
    if strangers := unnamed(source, names):
        return [f"llama.cpp's {family.name} has no tensor for {strangers[0]}; `--to dense` takes it"]
    return [why for why in (tokenizer.why_not(source.path, config.vocab_size), floats_why_not(source)) if why]


def _why_no_blocks(source: Source) -> list[str]:
    """The first layer that no block holds, or whose scales are no float16 numbers."""
    for name, layer in stored_in(source).layers.items():
        if (why := why_no_block(layer.scheme, layer.shape[1])) is not None:
            return [f"{name} {why}"]
    return why_not_float16(source)


def _spread(entries: Sequence[Entry], source: Source) -> Iterator[str]:
    """A line for each scheme whose codes take more bytes in blocks than in the checkpoint, and for types that older
    llama.cpp has not."""
    larger: dict[tuple[str, str], list[str]] = {}
    layers_of = stored_in(source).layers
    for entry in entries:
        if entry.of not in layers_of:
            continue
        layer = layers_of[entry.of]
        sizes = (tensor_bytes(n, *source.headers[n]) for part, n in layer.parts.items() if part != "weight_shape")
        if entry.nbytes > sum(sizes):
            larger.setdefault((str(layer.scheme), entry.type), []).append(entry.of)
    for (scheme, kind), layers in larger.items():
        yield f"{len(layers)} layers of {scheme}, like {layers[0]}, take more bytes as blocks of {kind}"
    for kind in {entry.type for entry in entries} & NEWER.keys():
        yield f"{kind} is read by llama.cpp that has #24448; for an older one quantize with --group-size 32"


def _file_type(entries: Sequence[Entry]) -> dict[str, int]:
    """The keys for the types of a file's tensors."""
    kinds: Counter[str] = Counter()
    for entry in entries:
        if entry.name.startswith("blk.") and len(entry.shape) > 1:
            kinds[entry.type] += entry.nbytes
    most = kinds.most_common(1)[0][0] if kinds else "F32"
    words = {**NEWER_FILES, **gguf().LlamaFileType.__members__}
    found = words.get(FILE_TYPES.get(most, f"MOSTLY_{most}"), words["MOSTLY_F16"])
    return {"general.file_type": int(found), "general.quantization_version": QUANTIZATION_VERSION}


def _name(source: Source) -> str:
    """The name of the model that was quantized: of its folder, or on the hub."""
    own = source.path.name.removesuffix(".checkpoint")
    original = read_record(source.path).get("model") if is_checkpoint(source.path) else None
    if not isinstance(original, str) or original in (source.config.get("architectures") or ()):  # it was in memory
        return own
    return Path(original).name or own


def _metadata(source: Source, family: Architecture) -> dict[str, Any]:
    """{key: value} of the model, its family and its tokenizer."""
    config = read_config(source)
    general: dict[str, Any] = {
        "general.type": "model",
        NAME: _name(source) or family.name,
        "general.quantized_by": f"compress {VERSION}",
    }
    own = {f"{family.name}.{key}": value for key, value in family.keys(config).items()}
    words_of = {f"tokenizer.{key}": value for key, value in tokenizer.keys_of(source.path, config.vocab_size).items()}
    return general | own | words_of
