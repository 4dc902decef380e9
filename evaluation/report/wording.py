"""Figures as people read them: with as many digits as their error leaves, and a word for missing ones."""

import math
import re
import unicodedata

from compress.evaluation.document import Figure

Z95 = 1.959964  # standard errors on either side that hold 95 % of a normal distribution
NOT_MEASURED = "not measured"
NONE = "–"  # noqa: RUF001 - in a table, for a value that does not apply
MOST_DIGITS = 6
MOST_PLACES = 7  # behind the point
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
STEP = 1024.0
LONG = 400  # characters of a name
PERCENTILE = re.compile(r"(kl|delta_p)_p(\d+)$")
SHARES = ("same_top", "accuracy", "reference_accuracy", "accuracy_difference", "agreement")
# Text shown as code: no character that could be markup in any format.
CODE = re.compile(r"(?<!`)`([\w-][\w .,:=/+-]*)`(?!`)")
POINTS = "delta_p"  # figures that are differences of probabilities

# Names of a text's figures, in the order in which they are shown.
LABELS = {
    "perplexity": "perplexity",
    "reference_perplexity": "perplexity of the original",
    "perplexity_difference": "difference of the two",
    "perplexity_ratio": "ratio of the two",
    "log_perplexity_ratio": "ln of the ratio",
    "correlation": "correlation of ln likelihoods",
    "kl_mean": "KL, mean (nats per token)",
    "kl_median": "KL, median",
    "kl_p99": "KL, 99 % are below",
    "kl_max": "KL, largest",
    "delta_p_mean": "change of p(token), mean",
    "delta_p_rms": "change of p(token), RMS",
    "same_top": "same first choice",
}


def clean(text: str) -> str:
    """Other people's text, safe to show: control characters and overrides of the direction of writing, which a reader
    cannot see but a browser or terminal obeys, are written as escapes; line feeds and tabs stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" or unicodedata.category(c) == "Zs" else escape(c) for c in text)


def escape(character: str) -> str:
    """A character as Python escapes it."""
    return character.encode("unicode_escape").decode("ascii")


def name(text: str) -> str:
    """A name on one line, of bounded length."""
    line = clean(text).replace("\n", "\\n").replace("\t", "\\t")
    return line if len(line) <= LONG else line[: LONG - 3] + "..."


def number(value: float | None, digits: int = 4) -> str:
    """A number with so many significant digits, never in more than nine characters."""
    if value is None:
        return NOT_MEASURED
    if not math.isfinite(value):
        return "infinite" if value > 0 else "not a number" if math.isnan(value) else "-infinite"
    if value == 0:
        return "0"
    power = math.floor(math.log10(abs(value)))
    if not -4 <= power < MOST_DIGITS:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - power)}f}"


def decimals(error: float) -> int:
    """Decimal places that leave an error two digits."""
    return max(0, 1 - math.floor(math.log10(error)))


def with_error(figure: Figure | None, scale: float = 1.0, unit: str = "") -> str:
    """A figure ± its standard error; or with its interval in brackets where only that is known."""
    if figure is None:
        return NOT_MEASURED
    value, error = figure.value * scale, None if figure.error is None else figure.error * scale
    if error is None and figure.interval is not None:
        low, high = (number(end * scale, 3) for end in figure.interval)
        return f"{number(value)} ({low} to {high}){unit}"
    if error is None or not math.isfinite(value) or not math.isfinite(error) or error <= 0:
        return number(value) + unit
    places = decimals(error)
    if places > MOST_PLACES:
        return f"{value:.3e} ± {error:.1e}{unit}"
    return f"{value:,.{places}f} ± {error:,.{places}f}{unit}"


def bounds(figure: Figure | None) -> tuple[float, float] | None:
    """The 95 % interval of a figure; None where neither that nor its error is known."""
    if figure is not None and figure.interval is not None:
        return figure.interval
    if figure is None or figure.error is None or not 0 <= figure.error < math.inf:
        return None
    return figure.value - Z95 * figure.error, figure.value + Z95 * figure.error


def interval(figure: Figure | None, scale: float = 1.0, unit: str = "") -> str:
    """The 95 % interval in words."""
    found = bounds(figure)
    if found is None or figure is None:
        return NONE
    error = figure.error or (found[1] - found[0]) / (2 * Z95)
    places = decimals(error * scale) if error else MOST_DIGITS
    low, high = (f"{value * scale:,.{places}f}" if places <= MOST_DIGITS else f"{value * scale:.2e}" for value in found)
    return f"{low} to {high}{unit}"


def share(value: float | None, digits: int = 3) -> str:
    """A share, 0 to 1, in percent."""
    return NOT_MEASURED if value is None else f"{number(100 * value, digits)} %"


def data(count: float | None, digits: int | None = None) -> str:
    """Bytes in the largest unit that leaves a whole number of them. digits: significant ones, of an estimate."""
    if count is None:
        return NOT_MEASURED
    value, unit = float(count), UNITS[0]
    for unit in UNITS:
        if abs(value) < STEP or unit == UNITS[-1]:
            break
        value /= STEP
    if unit == UNITS[0]:
        return f"{value:.0f} {unit}"
    return f"{value:.2f} {unit}" if digits is None else f"{number(value, digits)} {unit}"


def count(value: int | None) -> str:
    """A whole number with separators of thousands."""
    return NOT_MEASURED if value is None else f"{value:,}"


def scale_of(key: str) -> tuple[float, str]:
    """(factor, unit) for display: shares and differences of probabilities in percent."""
    return (100.0, " %") if key in SHARES or key.startswith(POINTS) else (1.0, "")


def figure_words(key: str, figure: Figure | None) -> str:
    """A figure of a text ± its standard error."""
    return with_error(figure, *scale_of(key))


def figure_interval(key: str, figure: Figure | None) -> str:
    """The 95 % interval of a text's figure."""
    return interval(figure, *scale_of(key))


def label_of(key: str) -> str:
    """The name of a figure for display."""
    if key in LABELS:
        return LABELS[key]
    found = PERCENTILE.match(key)
    if found is None:
        return key.replace("kl_", "KL, ").replace("delta_p_", "change of p, ").replace("_", " ")
    of, digits = found.groups()
    percent = float(f"0.{digits}") * 100
    return f"{'KL' if of == 'kl' else 'change of p'}, {percent:.4g} % are below"
