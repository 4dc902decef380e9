"""Tool calls: 50 short conversations, each with a question, a call, its result and an answer in words.

A conversation is written by the model's chat template. Where that has no place for tools, they are described in the
system message, and calls are JSON between <tool_call> tags; where there is no template, each message begins with its
role. What the assistant says is predicted: `calls`, with all that the template writes around them, and `prose`.

The conversations and their functions were written for this purpose (`tools.json`).
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from compress.data.chat import Message, template_of
from compress.data.text import bare_tokens, check_context
from compress.evaluation.probes.rows import rows_text
from compress.evaluation.quality.generations import parting
from compress.evaluation.quality.texts import Text

FILE = Path(__file__).with_suffix(".json")
OFFERED = 3  # functions in each conversation
ROLES = {"user": "User", "assistant": "Assistant", "system": "System", "tool": "Tool"}


@cache
def conversations() -> list[dict[str, Any]]:
    """Rows of `messages` and `tools`."""
    content = json.loads(FILE.read_text(encoding="utf-8"))
    tools, rows = content["tools"], []
    names = [tool["function"]["name"] for tool in tools]
    for each in content["conversations"]:
        first = names.index(each["name"])
        offered = sorted((first + i) % len(tools) for i in range(OFFERED))
        call = {"type": "function", "function": {"name": each["name"], "arguments": each["arguments"]}}
        messages: list[Message] = [
            {"role": "user", "content": each["user"]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": each["name"], "content": json.dumps(each["result"])},
            {"role": "assistant", "content": each["answer"]},
        ]
        rows.append({"messages": messages, "tools": [tools[i] for i in offered]})
    return rows


def tools_text(tokenizer: Any, config: Any) -> Text:
    """The conversations as windows, whose items are the assistant's messages. Raises InputError where they are longer
    than the model's context."""
    write = _writer(tokenizer)
    rows, parts = [], []
    for row in conversations():
        pieces = list(_pieces(row, write))
        rows.append([(bare_tokens(tokenizer, text), spoken is not None) for text, spoken in pieces])
        parts += [spoken for _, spoken in pieces if spoken is not None]
    text = rows_text(f"{len(rows)} conversations with tool calls", "tools", rows, parts)
    check_context("the set of tool calls", text.windows.length, config)
    return text


def _pieces(row: dict[str, Any], write: Any) -> Iterator[tuple[str, str | None]]:
    """(Text, the part that it is of; None for what is not said by the assistant), in their order."""
    messages, done = row["messages"], 0
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            whole = write(messages[: i + 1], row["tools"], False)
            before = write(messages[:i], row["tools"], True)
            begun = len(before) if whole.startswith(before) else parting(before, whole) or 0
            yield whole[done:begun], None
            yield whole[begun:], "calls" if message.get("tool_calls") else "prose"
            done = len(whole)


def _writer(tokenizer: Any) -> Any:
    """A function of messages, tools and whether the assistant's next message is begun, that returns their text."""
    if not getattr(tokenizer, "chat_template", None):
        return lambda messages, tools, begin: _plainly(_in_words(messages, tools), begin)
    written = {begin: template_of(tokenizer, begin) for begin in (False, True)}
    if re.search(r"\btools\b", str(tokenizer.get_chat_template(tools=[]))):
        return lambda messages, tools, begin: written[begin]((messages, tools))
    return lambda messages, tools, begin: written[begin]((_in_words(messages, tools), None))


def _in_words(messages: list[Message], tools: list[Any]) -> list[Message]:
    """Messages for a template that has no place for tools."""
    listed = "\n".join(json.dumps(tool["function"]) for tool in tools)
    words = "You may call these functions, by JSON between <tool_call> and </tool_call>:\n"
    written: list[Message] = [{"role": "system", "content": words + listed}]
    for message in messages:
        content = message["content"]
        for call in message.get("tool_calls", ()):
            content += f"<tool_call>{json.dumps(call['function'])}</tool_call>"
        if message["role"] == "tool":
            written.append({"role": "user", "content": f"<tool_response>{content}</tool_response>"})
        else:
            written.append({"role": message["role"], "content": content})
    return written


def _plainly(messages: list[Message], begin: bool) -> str:
    """Messages where there is no template."""
    text = "".join(f"{ROLES[message['role']]}: {message['content']}\n\n" for message in messages)
    return text + f"{ROLES['assistant']}: " if begin else text
