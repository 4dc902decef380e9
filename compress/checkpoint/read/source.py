"""Finds a model (a directory, a hub id, or `demo`) and checks its files before work starts."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from compress.base.errors import CheckpointError, InputError, NoSuchModelError
from compress.base.regular_files import special
from compress.checkpoint.files import RECORD, read_json
from compress.checkpoint.leftovers import COMPANIONS
from compress.checkpoint.read import bitsandbytes, coded_heads, gpt_oss, gptq_awq, mlx, modelopt, narrow_bytes
from compress.checkpoint.read.configuration import AUTO_ROUND, AWQ, GPTQ, Header, check_config
from compress.checkpoint.read.configuration import METHOD as COMPRESSED_TENSORS
from compress.checkpoint.read.content import Stamp, content_of, contents_of, stamp_of
from compress.checkpoint.read.weight_files import NAMING, WeightFiles, weight_files
from compress.weights import fine_grained

ADAPTER = "adapter_config.json"
OF_TENSORS = "tensors"  # in the identity of an export: `tensors_of` its checkpoint
DEMO = Path(__file__).parents[2] / "demo"
T = TypeVar("T")
PICKLE = (
    "a file of PyTorch, which may run code when it is read; load it yourself and write the model with "
    "save_pretrained(DIR), or give it to compress.quantize in memory (Python)"
)
# {ending: the kind of such a file, and the advice what to give instead}.
FOREIGN = {
    ".onnx": "an ONNX graph; give the Hugging Face directory that it was exported from",
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), PICKLE),
}
GGUF = ".gguf"
SHOWN = 60  # characters of a name in a message
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(:[\w.-]+)?")  # and the configuration of a dataset


@dataclass(frozen=True)
class Source:
    """A checkpoint directory with a readable configuration and all of its weight files, in our words (`in_our_words`).

    trusted: Python code that comes with it may be run. Otherwise it never is, and no prompt asks for it. known: results
    of functions that are `once`.
    """

    name: str
    path: Path
    config: dict[str, Any]
    weights: WeightFiles
    trusted: bool = False
    known: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def headers(self) -> Mapping[str, Header]:
        """{tensor name: (shape, safetensors' name of its dtype)}."""
        return self.weights.headers

    @property
    def quantization(self) -> dict[str, Any] | None:
        return self.config.get("quantization_config")

    @property
    def code(self) -> Mapping[str, str]:
        """`own_code` of its configuration."""
        return own_code(self.config)

    def fingerprint(self) -> str:
        """SHA-256 over the configuration, the names and contents of the weight files, and code of its own that may run.
        Raises CheckpointError for a file that was changed since it was opened."""
        return _fingerprint(self)

    def check_unchanged(self) -> None:
        """Raises CheckpointError for a weight file that was changed in its place since it was opened. One that has been
        replaced by another file is still read as it was."""
        for path, opened in self.weights.stamps.items():
            now = _stamp(path)
            if now is None or now == opened or now[:2] != opened[:2]:
                continue
            if content_of(path) != _contents(self)[path]:
                raise CheckpointError(
                    f"{path} was changed while the run was reading it; put the former file back and go on with "
                    "--resume, or begin again with --overwrite"
                )
            self.weights.stamps[path] = now


def once(find: Callable[[Source], T]) -> Callable[[Source], T]:
    """A function of a checkpoint whose result is kept with it, so that nothing is read twice."""
    key = f"{find.__module__}.{find.__qualname__}"

    @wraps(find)
    def known(source: Source) -> T:
        if key not in source.known:
            source.known[key] = find(source)
        return cast(T, source.known[key])

    return known


@once
def _contents(source: Source) -> dict[Path, str]:
    return {path: content_of(path) for path in source.weights.paths}


@once
def _fingerprint(source: Source) -> str:
    digest = hashlib.sha256(json.dumps(source.config, sort_keys=True).encode())
    for path, content in _contents(source).items():
        digest.update(f"{path.name} {content}".encode())
    for path, stamp in source.weights.stamps.items():
        now = _stamp(path)
        # Another name or other permissions change the last of a stamp, and no content.
        if now is None or now[:-1] != stamp[:-1]:
            raise CheckpointError(f"{path} was changed while it was read; run this again once nobody writes to it")
    if source.trusted and source.code:
        digest.update(contents_of(sorted(source.path.glob("*.py"))).encode())
    return digest.hexdigest()


def _stamp(path: Path) -> Stamp | None:
    try:
        return stamp_of(path)
    except OSError:
        return None


def path_of(name: str, what: str) -> Path:
    """The path of a name. Raises InputError where the system cannot even look it up. what: names it in the message."""
    path = Path(name)
    try:
        path.exists()
    except OSError as error:
        shown = name if len(name) <= SHOWN else name[:SHOWN] + "..."
        raise InputError(f"{what} {shown!r} cannot be looked up: {error.strerror}") from None
    return path


def find_source(name: str, trust_remote_code: bool = False) -> Source:
    """Resolve `demo`, a directory or a hub id. Raises InputError in one line where it is not a usable checkpoint.

    trust_remote_code: run the model's own Python code where it has some.
    """
    if not name.strip():
        raise InputError("the model is an empty name; give a directory, a hub id (owner/name) or 'demo'")
    path = DEMO if name == "demo" else path_of(name, "model")
    kind = special(path)
    if kind is None and not path.exists():
        path = _download(name)
    if kind is None and path.is_file() and path.suffix.lower() == GGUF:
        return _of_gguf(name, path)
    if not path.is_dir():
        kind = kind or FOREIGN.get(path.suffix.lower(), "a file; give the directory that holds its config.json")
        raise InputError(f"model {name!r} is {kind}")
    _check_entries(path)
    path = checkpoint_of(path)
    if not (path / "config.json").exists() and (path / ADAPTER).exists():
        raise InputError(
            f"{path} holds an adapter of peft alone; load it beside its model, merge_and_unload(), save_pretrained and "
            "give that directory"
        )
    if not (path / "config.json").exists() and (held := sorted(path.glob(f"*{GGUF}"))):
        if len(held) > 1:
            raise InputError(f"{path} holds {len(held)} GGUF files, like {held[0].name}; give one of them")
        return _of_gguf(name, held[0])
    if not (path / "config.json").exists():
        other = next((entry for entry in sorted(path.iterdir()) if entry.suffix.lower() in FOREIGN), None)
        advice = "give a Hugging Face model directory, a hub id or 'demo'"
        if other is not None:
            advice = f"its {other.name} is {FOREIGN[other.suffix.lower()]}"
        raise InputError(f"{path} holds no config.json; {advice}")
    config = read_json(path / "config.json")
    check_config(config, path / "config.json")
    # Files of an output may have other names than those of its model.
    named = config.pop(NAMING, None)
    weights, config = in_our_words(weight_files(path, named), config, path)
    return Source(name, path, config, weights, trust_remote_code)


def _of_gguf(name: str, path: Path) -> Source:
    """The model in a GGUF file."""
    from compress.checkpoint.read.gguf import open_gguf  # imports transformers, which takes seconds

    folder, weights, config = open_gguf(path)
    check_config(config, folder / "config.json")
    return Source(name, folder, config, weights)


def checkpoint_of(path: Path) -> Path:
    """The checkpoint that an export without weights of ours was written from, if it lies beside it and has the same
    tensors still; else the directory as it is."""
    record = _record_of(path)
    of = record.get("identity")
    if not isinstance(of, dict) or of.get(OF_TENSORS) is None or any(path.glob("*.safetensors")):
        return path
    beside = (path if path.name else path.absolute()).parent / Path(str(record.get("model"))).name
    return beside if tensors_of(beside) == of[OF_TENSORS] else path


def tensors_of(path: Path) -> str | None:
    """The SHA-256 that a record has of all tensors; None without one."""
    checksums = _record_of(path).get("checksums")
    return checksums.get("tensors") if isinstance(checksums, dict) else None


def _record_of(path: Path) -> dict[str, Any]:
    found = read_json(path / RECORD) if (path / RECORD).is_file() else None
    return found if isinstance(found, dict) else {}


def _check_entries(path: Path) -> None:
    """Raises CheckpointError for a model directory with an entry that is neither file nor folder: transformers opens
    entries by names of its own. Raises InputError for one that cannot be listed."""
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    for entry in entries:
        kind = special(entry)
        if kind is not None and not entry.is_dir():
            raise CheckpointError(f"{entry} is {kind}; a model directory holds regular files: move it away")


def looks_like_path(name: str) -> bool:
    """True for the name of a file or folder that is not there and can be no id of the hub (name or owner/name), or
    whose folder is there."""
    folder = Path(name).parent
    return HUB_ID.fullmatch(name) is None or (folder != Path() and folder.is_dir())


def why_not_had(error: Exception, what: str) -> str:
    """A clause about a model or a dataset that the hub did not give."""
    chain = [type(each).__name__ for each in (error, error.__cause__, error.__context__) if each is not None]
    if "GatedRepoError" in chain:
        return f"the {what} of that name on the hub is gated: ask for access there, and log in with `hf auth login`"
    if {"RepositoryNotFoundError", "DatasetNotFoundError", "HFValidationError"} & {*chain}:
        return f"the hub has no {what} of that name"
    return "the hub cannot be reached"


def _download(name: str) -> Path:
    if looks_like_path(name):
        raise InputError(f"model folder {name!r} does not exist; give a directory, a hub id (owner/name) or 'demo'")
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py", *COMPANIONS]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # noqa: BLE001 - every failure of the hub client means the same to the person
        raise NoSuchModelError(
            f"model {name!r} is no folder here, and {why_not_had(error, 'model')}; give a directory, a hub id "
            "(owner/name) or 'demo'"
        ) from None


def needs_code(source: Source, what: str, code: str) -> InputError:
    """The error for a model whose `what` is Python code of its own and is not trusted. code: `module.Class`."""
    return InputError(
        f"the {what} of {source.name} is Python code of its own ({code}), which is not run; read it, and if you trust "
        "it give --trust-remote-code (in Python trust_remote_code=True)"
    )


def own_code(config: Any) -> dict[str, str]:
    """{Auto class of transformers: `module.Class` that comes with the model}, the `auto_map` of a configuration."""
    auto_map = config.get("auto_map") if isinstance(config, Mapping) else None
    found: dict[str, str] = {}
    for kind, code in auto_map.items() if isinstance(auto_map, Mapping) else ():
        names = [name for name in (code if isinstance(code, list) else [code]) if isinstance(name, str)]
        found |= {kind: names[-1]} if names else {}  # a tokenizer lists a slow and a fast class
    return found


def check_dense(source: Source) -> None:
    """Raises InputError for a checkpoint that is quantized already."""
    if source.quantization is not None:
        raise InputError(
            f"{source.name} is quantized already ({source.quantization.get('quant_method')}); give the original model"
        )


Seen = Callable[[WeightFiles, Mapping[str, Any], Path], tuple[WeightFiles, dict[str, Any]]]
METHODS: dict[Any, Seen] = {
    COMPRESSED_TENSORS: narrow_bytes.view,
    gpt_oss.METHOD: gpt_oss.view,
    **dict.fromkeys((GPTQ, AWQ, AUTO_ROUND), gptq_awq.view),
    bitsandbytes.METHOD: bitsandbytes.view,
    modelopt.METHOD: modelopt.view,
    mlx.METHOD: mlx.view,
}


def in_our_words(files: WeightFiles, config: dict[str, Any], folder: Path) -> tuple[WeightFiles, dict[str, Any]]:
    """(Weight files, configuration) of a checkpoint, as our readers take them; as they are, where nothing has to be
    translated. Raises CheckpointError for a checkpoint of a known method that is damaged or cannot be read."""
    quantization = config.get("quantization_config") or mlx.entry(config) or modelopt.beside(folder)
    method = METHODS.get((quantization or {}).get("quant_method"))
    if quantization is None or method is None:
        coded = quantization is not None and quantization.get("quant_method") == fine_grained.METHOD
        return coded_heads.dense_behind(files, config) if coded else files, config
    found, told = method(files, quantization, folder)
    return found, {**config, "quantization_config": told}
