"""A report as one page of HTML that needs nothing else: no network, no script, no font.

Names and texts come from files that anybody may have written. The template escapes all of them, a content security
policy keeps a browser from running or fetching anything whatever it holds, and only pictures that we drew go in as
they are.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from compress.base.version import VERSION
from compress.checkpoint.files import write_named
from compress.evaluation.report.content import Block, Picture, Report
from compress.evaluation.report.drawing import COLOURS, DARK, INK
from compress.evaluation.report.wording import CODE, clean

HOME = Path(__file__).parent
TEMPLATE, SHEET = "page.html", "page.css"


def as_html(report: Report) -> str:
    """The page."""
    rules = (HOME / SHEET).read_text(encoding="utf-8").replace("\n", "")
    modes = (
        f":root{{{COLOURS}}}@media screen and (prefers-color-scheme:dark){{:root{{{DARK}}}}}{INK}"  # paper stays white
    )
    environment = Environment(
        loader=FileSystemLoader(HOME),
        autoescape=True,
        finalize=without_controls,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"runs": picture_runs, "drawn": Markup, "breakable": breakable, "coded": with_code}
    template = environment.get_template(TEMPLATE)
    return template.render(report=report, style=Markup(modes + rules), version=VERSION) + "\n"


def write_page(path: Path, report: Report) -> None:
    """Write the page; it appears when it is complete. Raises InputError where the file cannot be written."""
    write_named(path, as_html(report))


def without_controls(value: object) -> object:
    """Text without invisible control characters; markup and other values unchanged."""
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def breakable(text: str) -> Markup:
    """A name that may go on in the next line behind a dot, a slash or an underscore, escaped."""
    return Markup(re.sub(r"(?<!<)([._/])(?=[^\W\d])", r"\1<wbr>", str(with_code(text))))


def with_code(text: str) -> Markup:
    """Escaped text, with words between backticks as code."""
    return Markup(CODE.sub(r"<code>\1</code>", str(escape(clean(text)))))


def picture_runs(blocks: Sequence[Block]) -> Iterator[tuple[bool, list[Block]]]:
    """Blocks in order, pictures that follow each other together: they stand side by side where there is room."""
    for pictures, found in groupby(blocks, key=lambda block: isinstance(block, Picture)):
        yield pictures, list(found)
