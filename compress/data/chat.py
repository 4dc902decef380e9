"""Conversations: rows of chat messages as the text that a tokenizer's chat template makes of them.

A row is what datasets hold: `messages` (role and content; tool calls and reasoning, if any), or `conversations` (from
and value), and `tools`. What a template has no place for is left out and counted; a role for which it writes nothing is
an error.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from compress.base.errors import InputError, first_line
from compress.base.sandbox import Limited, LimitError
from compress.data.rows import CHATS

Message = dict[str, Any]
Given = tuple[list[Message], list[Any] | None]  # messages, and tools
Template = Callable[[Given], str]
# Names of the field of a message that holds its reasoning, likeliest first.
REASONING = ("reasoning_content", "thinking", "reasoning")
# Roles of rows in `conversations`, as ShareGPT names them.
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "observation": "tool"}
MOST_WRITTEN, SPARE = 100, 2**20  # characters that a template makes of each that it is given, and more
MARK = "compress7marker"  # stands for the content of a message, to see whether a template writes it


class Conversations:
    """Conversations as texts of one tokenizer.

    left_out: {what the template has no place for: rows that lose it}.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(
                f"{source} holds chat messages, and the tokenizer has no chat template; give rows with a string field "
                "'text', or put the chat_template.jinja of the chat model beside the tokenizer"
            )
        self.tokenizer = tokenizer
        self.written = template_of(tokenizer)
        self.left_out: Counter[str] = Counter()
        self.roles: set[str] = set()

    def text(self, record: Mapping[str, Any], where: str) -> str:
        """The text of a conversation; "" for one without messages. Raises InputError, which names the row."""
        messages = messages_of(record, where)
        if not messages:
            return ""
        tools = tools_of(record, where)
        template = str(self.tokenizer.get_chat_template(tools=tools))
        if tools and not re.search(r"\btools\b", template):
            self.left_out["tools"] += 1
            tools = None
        place = next((name for name in REASONING if re.search(rf"[.'\"]{name}\b", template)), None)
        if place is None and any(map(_reasoning, messages)):
            self.left_out["reasoning"] += 1
        messages = [_plain(_with_reasoning(message, place), where) for message in messages]
        text = self._written(messages, tools, where)
        for i, message in enumerate(messages):
            if message["role"] not in self.roles and isinstance(message.get("content"), str):
                self._check_role(messages, i, tools, where)
        return text

    def _written(self, messages: Sequence[Message], tools: list[Any] | None, where: str) -> str:
        """The text that the template makes of messages."""
        problem: InputError | None = None
        # Arguments of calls are mappings, as transformers says, or strings, as OpenAI says: templates take one of both.
        for given in (_with_mappings(messages), messages):
            try:
                return self.written((list(given), tools))
            except InputError as error:
                problem = problem or error
                if isinstance(error, LimitError):
                    break
        assert problem is not None
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
        raise InputError(
            f"{where}: the tokenizer's chat template cannot write it (roles {roles}): {first_line(problem)}"
        )

    def _check_role(self, messages: Sequence[Message], i: int, tools: list[Any] | None, where: str) -> None:
        """Raises InputError for a message whose role the template passes over without a word."""
        marked = [*messages]
        marked[i] = {**messages[i], "content": MARK}
        if MARK not in self._written(marked, tools, where):
            raise InputError(
                f"{where}: the tokenizer's chat template writes nothing for the role {messages[i]['role']!r}; rename "
                "it, or leave such messages out"
            )
        self.roles.add(messages[i]["role"])

    def notes(self, source: str) -> list[str]:
        """Remarks on what the template has no place for."""
        return [
            f"calibration {source!r}: the chat template has no place for {what}, which {rows} conversations lose"
            for what, rows in sorted(self.left_out.items())
        ]


def template_of(tokenizer: Any, begin: bool = False) -> Template:
    """A function of (messages, tools) that returns the text which the chat template of a tokenizer or a processor makes
    of them; with `begin` up to where the assistant's next message starts. The template is code of the model's: it runs
    with limits. The function raises InputError for what the template raises, and for what goes beyond the limits."""

    def text(given: Given) -> str:
        messages, tools = given
        more: dict[str, Any] = {} if tools is None else {"tools": tools}
        more |= {"add_generation_prompt": True} if begin else {}
        written = str(tokenizer.apply_chat_template(messages, **more, tokenize=False))
        if len(written) > SPARE + MOST_WRITTEN * len(str(given)):
            raise InputError(f"it makes {len(written):,} characters of {len(str(given)):,}")
        return written

    return Limited(text)


def messages_of(record: Mapping[str, Any], where: str) -> list[Message]:
    """The messages of a row, each with a role. Raises InputError for a row of another form."""
    found = next(record[name] for name in CHATS if isinstance(record.get(name), list))
    messages: list[Message] = []
    for each in found:
        message = {k: v for k, v in each.items() if v is not None} if isinstance(each, Mapping) else {}
        if "from" in message and "role" not in message:
            name, value = message.pop("from"), message.pop("value", "")
            message |= {"role": ROLES.get(name, name) if isinstance(name, str) else name, "content": value}
        content = message.get("content", "")
        parts = isinstance(content, list) and all(isinstance(part, Mapping) for part in content)
        if not isinstance(message.get("role"), str) or not (isinstance(content, str) or parts):
            raise InputError(
                f"{where}: message {len(messages) + 1} is no message; give a role and a content (text, or a list of "
                "parts): {'role': 'user', 'content': '...'}"
            )
        messages.append({"content": "", **message})
    return messages


def tools_of(record: Mapping[str, Any], where: str) -> list[Any] | None:
    """The tools of a row, a list or the JSON text of one; None where it has none. Raises InputError for others."""
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError:
            raise InputError(f"{where}: 'tools' is neither a list nor the JSON text of one") from None
    if tools and not isinstance(tools, list):
        raise InputError(f"{where}: 'tools' is {type(tools).__name__}; give a list of tools")
    return tools or None


def is_text(part: Mapping[str, Any]) -> bool:
    """True for a part of a message's content that is text."""
    return isinstance(part.get("text"), str) and part.get("type", "text") == "text"


def _plain(message: Message, where: str) -> Message:
    """A message whose parts of text are one text. Raises InputError for parts of another kind."""
    content = message["content"]
    if isinstance(content, str):
        return message
    other = next((part.get("type") for part in content if not is_text(part)), None)
    if other is not None:
        raise InputError(f"{where}: a message holds {other!r}, and this model is shown text alone; leave it out")
    return {**message, "content": "".join(part["text"] for part in content)}


def _reasoning(message: Message) -> str | None:
    return next((message[name] for name in REASONING if isinstance(message.get(name), str) and message[name]), None)


def _with_reasoning(message: Message, place: str | None) -> Message:
    """A message with its reasoning under that name, or without it."""
    found = _reasoning(message)
    rest = {name: value for name, value in message.items() if name not in REASONING}
    return rest if found is None or place is None else {**rest, place: found}


def _with_mappings(messages: Sequence[Message]) -> list[Message]:
    """Messages whose tool calls have their arguments as mappings, where they are the JSON text of one."""
    return [
        {**message, "tool_calls": [_with_mapping(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _with_mapping(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        found = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": found}} if isinstance(found, dict) else call
