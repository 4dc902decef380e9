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
from compress.evaluation.report.content import Block, Picture, Report, ReportTable
from compress.evaluation.report.drawing import COLOURS, DARK, INK
from compress.evaluation.report.wording import CODE, NONE, clean

HOME = Path(__file__).parent
BESIDE = 5  # columns, at most, of a table beside a picture
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
    environment.filters |= {"rows": rows_of, "drawn": Markup, "breakable": breakable, "coded": with_code}
    template = environment.get_template(TEMPLATE)
    return template.render(report=report, style=Markup(modes + rules), version=VERSION, none_word=NONE) + "\n"


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


def rows_of(blocks: Sequence[Block]) -> Iterator[tuple[bool, list[Block]]]:
    """Blocks in order; (True, those that stand side by side where there is room): pictures, and small tables among
    them."""
    for small, found in groupby(blocks, key=_is_small):
        together = list(found)
        yield small and any(isinstance(block, Picture) for block in together), together


def _is_small(block: Block) -> bool:
    table = isinstance(block, ReportTable) and not block.folded and len(block.columns) <= BESIDE
    return table or isinstance(block, Picture)
