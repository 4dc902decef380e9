"""A page of plots that needs no network: what is drawn and plotly's script are inside it."""

import html
from importlib.util import find_spec
from pathlib import Path

from compress.checkpoint.files import write_whole
from compress.checkpoint.ours import GENERATOR
from compress.errors import InputError, install

STYLE = "body{font-family:sans-serif;max-width:1200px;margin:2em auto;padding:0 1em}pre{white-space:pre-wrap}"


def check_plotly() -> None:
    """Raises InputError where plotly is not installed: before the work whose figures it is to show."""
    if find_spec("plotly") is None:
        raise InputError(f"--html needs plotly; {install('report')}")


def write_page(path: Path, heading: str, body: str) -> None:
    """Write the page. heading is plain text, body is HTML. Raises InputError where the file cannot be written."""
    title = html.escape(heading)
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{GENERATOR}"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>{body}</body></html>\n"
    )
    write_text(path, page)


def write_text(path: Path, text: str) -> None:
    """Write a file that appears when it is complete. Raises InputError where it cannot be written."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
