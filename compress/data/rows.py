"""Rows of datasets: the text or the conversation in each, by the names of its fields.

    text                                                      a text
    messages, conversations (and tools)                       a conversation
    prompt + completion                                       one text, or one conversation where they are messages
    instruction + input + output, instruction + context + response, question + answer
                                                              one text, joined by blank lines

A row whose fields are null or blank is empty: the text "".
"""

from collections.abc import Mapping
from typing import Any

CHATS = ("messages", "conversations")  # fields of a row that is a conversation
# Fields that make one text, in their order, and what stands between them. A field in the middle may be missing.
JOINED = {
    ("prompt", "completion"): "",
    ("instruction", "input", "output"): "\n\n",
    ("instruction", "context", "response"): "\n\n",
    ("question", "answer"): "\n\n",
}
COLUMNS = tuple(dict.fromkeys((*CHATS, "tools", *(name for names in JOINED for name in names))))  # besides `text`
KNOWN = "; ".join(("text", " or ".join(CHATS), *(" + ".join(names) for names in JOINED)))

Row = str | Mapping[str, Any]


def row_of(record: Any) -> tuple[str, Row] | None:
    """(The fields that were read, the row) of a record, which may also be a text itself; None for one of other
    fields."""
    if isinstance(record, str):
        return "", record
    if not isinstance(record, Mapping):
        return None
    fields = {name: value for name, value in record.items() if value is not None and value != ""}
    if isinstance(fields.get("text"), str):
        return "text", fields["text"]
    if (chat := next((name for name in CHATS if isinstance(fields.get(name), list)), None)) is not None:
        return chat, record
    for names, between in JOINED.items():
        parts = [fields[name] for name in names if name in fields]
        if names[0] in record and names[-1] in record and parts:
            return _joined(names, parts, between, record)
    known = [name for name in record if name in ("text", *COLUMNS)]
    return ("", "") if known and not any(name in fields for name in known) else None


def _joined(
    names: tuple[str, ...], parts: list[Any], between: str, record: Mapping[str, Any]
) -> tuple[str, Row] | None:
    """The row of several fields: texts, or lists of messages."""
    if all(isinstance(part, str) for part in parts):
        return " + ".join(names), between.join(parts)
    if all(isinstance(part, list) for part in parts):
        messages = [message for part in parts for message in part]
        return " + ".join(names), {CHATS[0]: messages, "tools": record.get("tools")}
    return None
