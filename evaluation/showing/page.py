"""A report as one page of HTML that needs nothing else: no network, no script, no font.

Names and texts come from files that anybody may have written. The template escapes all of them, a content security
policy keeps a browser from running or fetching anything whatever it holds, and only pictures that we drew go in as
they are.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from compress.evaluation.drawing import COLOURS, DARK, INK
from compress.evaluation.showing.content import Block, Picture, Report
from compress.version import VERSION

HOME = Path(__file__).parent
TEMPLATE, SHEET = "page.html", "page.css"


def as_html(report: Report) -> str:
    """The page."""
    rules = (HOME / SHEET).read_text(encoding="utf-8").replace("\n", "")
    modes = (
        f":root{{{COLOURS}}}@media screen and (prefers-color-scheme:dark){{:root{{{DARK}}}}}{INK}"  # paper stays white
    )
    environment = Environment(
        loader=FileSystemLoader(HOME), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"runs": picture_runs, "drawn": Markup}
    template = environment.get_template(TEMPLATE)
    return template.render(report=report, style=Markup(modes + rules), version=VERSION) + "\n"  # noqa: S704


def picture_runs(blocks: Sequence[Block]) -> Iterator[tuple[bool, list[Block]]]:
    """Blocks in order, pictures that follow each other together: they stand side by side where there is room."""
    for pictures, found in groupby(blocks, key=lambda block: isinstance(block, Picture)):
        yield pictures, list(found)
