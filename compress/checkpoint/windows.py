"""Layers whose attention sees a window of the last tokens only, and readers that have none."""

from typing import Any

FULL, LOCAL = "full_attention", "sliding_attention"


def missing_window(config: Any, reader: str) -> str | None:
    """A line about a window that a reader lacks; None where there is none, or no longer text is possible."""
    window = getattr(config, "sliding_window", None)
    slides = window and LOCAL in (getattr(config, "layer_types", None) or [LOCAL])
    if not slides or not getattr(config, "use_sliding_window", True) or window >= config.max_position_embeddings:
        return None
    return (
        f"attention sees the last {window} tokens; {reader} has no such window and sees all: "
        f"the same up to {window} tokens"
    )


def all_but_each(nth: int, layers: int) -> list[str]:
    """The kinds of so many layers of which all but each nth have a window."""
    return [LOCAL if (i + 1) % nth else FULL for i in range(layers)]


def window_period(layer_types: list[str]) -> int | None:
    """n where all layers but each nth have a window; None where other layers have, or all."""
    if FULL not in layer_types:
        return None
    nth = layer_types.index(FULL) + 1
    return nth if layer_types == all_but_each(nth, len(layer_types)) else None
