"""Images to calibrate on: a folder of them, with or without texts, or rows of chat messages that show some.

Beside an image of a folder may lie its text, NAME.txt, or `metadata.jsonl` may have it (fields file_name and text), as
`datasets` reads image folders.
"""

import base64
import binascii
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.base.errors import InputError, first_line, install
from compress.base.regular_files import json_line, regular
from compress.data.chat import Message, messages_of
from compress.data.documents import Documents, read_documents

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
METADATA = "metadata.jsonl"
MOST_PIXELS = 2**26  # 200 MB as RGB, ten times as much on the way to a model's input; its file may have 4 KB
LEVELS = ("*", "*/*")  # images of a folder, and of the folders in it, such as one for each class
# Fields of a part of a message that says where its image is.
PLACES = ("path", "image", "url", "image_url")
INLINE = "data:"  # an image in the row itself, as base64


@dataclass(frozen=True)
class Sample:
    """An image with its text ("" for none), or a conversation that shows images. where: names it in messages."""

    where: str
    image: str | None = None
    text: str = ""
    messages: tuple[Message, ...] = ()
    images: tuple[str, ...] = ()


def samples_of(source: str) -> list[Sample] | None:
    """The images of a folder, or the conversations of a file that shows some; None for text. Raises InputError."""
    path = Path(source)
    try:
        if source != "demo" and path.is_dir():
            return _of_folder(path) or None
        if path.suffix != ".jsonl" or not path.is_file():
            return None
    except OSError:
        return None  # text is looked for under that name, and says what is wrong with it
    documents = read_documents(source, "calibration")
    return _of_rows(documents, path.parent) if any(_shows(row, where) for where, row in documents.rows) else None


def _of_folder(folder: Path) -> list[Sample]:
    """The images in a folder and the folders in it, in the order of their paths."""
    paths = sorted(path for level in LEVELS for path in folder.glob(level) if path.suffix.lower() in IMAGES)
    texts = _metadata(folder / METADATA) if paths and (folder / METADATA).is_file() else {}
    samples = []
    for path in paths:
        beside = path.with_suffix(".txt")
        text = texts.get(str(path.relative_to(folder)), "")
        if not text and beside.is_file():
            _, words = read_documents(str(beside), "calibration").rows[0]
            text = str(words).strip()
        samples.append(Sample(str(path), str(path), text))
    return samples


def _metadata(path: Path) -> dict[str, str]:
    """{image: its text} of the file that image folders of `datasets` have."""
    texts = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            row = json_line(line, f"{path} line {number}")
            if not isinstance(row, Mapping) or not isinstance(row.get("file_name"), str):
                raise InputError(f"{path} line {number} has no string field 'file_name'")
            texts[row["file_name"]] = str(row.get("text") or "")
    return texts


def _shows(row: str | Mapping[str, Any], where: str) -> bool:
    return isinstance(row, Mapping) and (bool(row.get("images")) or any(True for _ in _image_parts(row, where)))


def _image_parts(row: Mapping[str, Any], where: str) -> Iterator[Mapping[str, Any]]:
    for message in messages_of(row, where):
        for part in message["content"] if isinstance(message["content"], list) else ():
            if str(part.get("type", "")).startswith("image"):
                yield part


def _of_rows(documents: Documents, folder: Path) -> list[Sample]:
    """The conversations of a file, those without an image among them."""
    samples = []
    for where, row in documents.rows:
        if isinstance(row, str):
            raise InputError(
                f"{where} is plain text among conversations that show images; give it in a file of its own"
            )
        rest = iter(row["images"] if isinstance(row.get("images"), list) else ())
        places = []
        messages = [_uniform(message) for message in messages_of(row, where)]
        for part in [p for message in messages for p in message["content"] if p.get("type") == "image"]:
            given = next((part[name] for name in PLACES if part.get(name)), None) or next(rest, None)
            places.append(_place(given, where, folder))
        if next(rest, None) is not None:
            raise InputError(f"{where} has more 'images' than its messages have parts of the type 'image'")
        for message in messages:  # templates expect an image without its place
            message["content"] = [{"type": "image"} if p.get("type") == "image" else p for p in message["content"]]
        samples.append(Sample(where, messages=tuple(messages), images=tuple(places)))
    return samples


def _uniform(message: Message) -> Message:
    """A message whose content is a list of parts, with images of one type."""
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    named = [{**part, "type": "image"} if str(part.get("type", "")).startswith("image") else part for part in parts]
    return {**message, "content": named}


def _place(given: Any, where: str, folder: Path) -> str:
    """The place of an image: a path, or the image itself. Raises InputError for none, and for an address in the web."""
    given = given.get("url", given.get("path")) if isinstance(given, Mapping) else given
    if not isinstance(given, str):
        raise InputError(f"{where}: an image has no place; give its 'path', or a list of paths in the field 'images'")
    if given.startswith(INLINE):
        return given
    if "://" in given and not given.startswith("file://"):
        raise InputError(f"{where}: the image {given} is in the web; fetch it, and give its path")
    return str(folder / given.removeprefix("file://"))


def check_pillow() -> None:
    """Raises InputError where images cannot be read."""
    try:
        import PIL  # noqa: F401 - whether it is there
    except ImportError:
        raise InputError(f"images are read by Pillow, which is not installed; {install('images')}") from None


def read_image(place: str, where: str) -> Any:
    """An image of PIL, in RGB. Raises InputError for what is no image."""
    from PIL import Image

    name = place[: len(INLINE)] + "..." if place.startswith(INLINE) else place
    held: Any = regular(Path(place), "image") if not place.startswith(INLINE) else None
    try:
        if held is None:
            held = io.BytesIO(base64.b64decode(place.partition(",")[2], validate=True))
        with Image.open(held) as image:
            if image.width * image.height > MOST_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels; at most {MOST_PIXELS:,} are read: shrink it")
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, binascii.Error, Image.DecompressionBombError) as error:
        at = "" if where == name else f"{where}: "
        raise InputError(f"{at}{name} cannot be read as an image ({first_line(error)})") from None


def spread(samples: Sequence[Sample], count: int | None) -> list[Sample]:
    """At most so many of the samples, spread evenly."""
    if count is None or count >= len(samples):
        return [*samples]
    return [samples[round(i * (len(samples) - 1) / max(count - 1, 1))] for i in range(count)]
