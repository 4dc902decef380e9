"""A report as Markdown, as GitHub and the hub show it: the same sections, tables in place of pictures."""

import re
from collections.abc import Iterator

from compress.evaluation.report.content import Article, Block, Continuation, Report, ReportTable, Section, Words
from compress.evaluation.report.wording import CODE, clean

SPECIAL = re.compile(r"([\\`*\[\]<>|~&$])|(?<!\w)_|_(?!\w)")


def as_markdown(report: Report) -> str:
    """The whole text."""
    lines = [f"# {plain(report.title)}", "", *([plain(report.about), ""] if report.about else [])]
    lines += [plain(report.verdict), ""]
    for part in report.overview:
        lines += section(part, 2)
    for article in report.articles:
        if len(report.articles) > 1:
            lines += [f"## {plain(article.name)}", "", plain(article.recipe), "", plain(article.verdict), ""]
        lines += body(article, 2 if len(report.articles) == 1 else 3)
    return "\n".join(lines).rstrip("\n") + "\n"


def body(article: Article, level: int) -> list[str]:
    """The figures that are seen first, and the sections of a run."""
    tiles = ReportTable(("", "", ""), [(tile.label, tile.value, tile.detail) for tile in article.tiles])
    lines = table(tiles) if article.tiles else []
    for part in article.sections:
        lines += section(part, level)
    return lines


def section(part: Section, level: int) -> list[str]:
    """A heading, and those of its blocks that Markdown can show."""
    lines = [f"{'#' * level} {plain(part.title)}", ""]
    for block in part.blocks:
        lines += _block(block)
    return lines


def _block(block: Block) -> list[str]:
    if isinstance(block, Words):
        return [plain(block.text), ""]
    if isinstance(block, ReportTable):
        return table(block)
    return list(_continuation(block)) if isinstance(block, Continuation) else []


def plain(text: str) -> str:
    """Text that means nothing to Markdown or HTML but for `code`, on one line; addresses are not made links."""
    parts = CODE.split(" ".join(clean(text).split()))
    found = "".join(f"`{part}`" if i % 2 else _escaped(part) for i, part in enumerate(parts))
    return "\\" + found if re.match(r"(#|>|[-+]\s|\d+[.)]\s|={3}|-{3})", found) else found


def _escaped(text: str) -> str:
    return SPECIAL.sub(lambda found: "\\" + found[0], text).replace("://", ":&#47;/")


def table(block: ReportTable) -> list[str]:
    """Rows between bars; a folded one in `details`."""
    rules = [":--" if block.is_words(i) else "--:" for i in range(len(block.columns))]
    rows = [block.columns, rules, *block.rows]
    lines = [f"| {' | '.join(each if row is rules else plain(each) for each in row)} |" for row in rows]
    title = plain(block.title)
    if block.folded:
        return [f"<details><summary>{title}</summary>", "", *lines, "", "</details>", ""]
    return [*([f"**{title}**", ""] if title else []), *lines, ""]


def _continuation(block: Continuation) -> Iterator[str]:
    """Fenced, by more backticks than any text has in a row."""
    sides = [("prompt", block.prompt, "")]
    sides += [] if block.reference is None else [("original", block.shared, block.reference)]
    sides += [("this model", block.shared, block.model)]
    for called, shared, rest in sides:
        text = f"{shared}⟦{rest}⟧" if rest else shared
        longest = max((len(run) for run in re.findall("`+", text)), default=0)
        fence = "`" * max(3, longest + 1)
        yield from (f"{called}:", "", f"{fence}text", text, fence, "")
