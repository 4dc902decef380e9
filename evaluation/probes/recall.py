"""Facts to recall from a long context: windows of a text with facts hidden in it and questions about them at the end.

    fact    one sentence for each name, anywhere in the text                  "a needle in a haystack"
    order   four notes on each topic; asked for the first, the second ...     after MRCR
    pair    no text but a long list of keys and values; asked for some values  key-value retrieval

All questions of a window stand at its end, each followed by its right answer, and only the answers are predicted. So
one forward asks for facts at many distances, and models that are too small to answer in words show by the likelihood of
the right answer whether they have read it. Distances, in tokens from a fact to its question, are spread evenly over
powers of two.

Sources: Kamradt 2023, "Needle In A Haystack" (github.com/gkamradt/LLMTest_NeedleInAHaystack); for keys and values Liu
et al. 2024, "Lost in the Middle" (arXiv 2307.03172); for MRCR Vodrahalli et al. 2024, "Michelangelo" (arXiv
2409.12640).

Departs from these: scored by the tokens of the right answer instead of by what is written freely.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from compress.base.errors import InputError
from compress.data.text import bare_tokens
from compress.evaluation.probes.rows import Row, rows_text
from compress.evaluation.quality.breakdowns import NEAR
from compress.evaluation.quality.texts import Text
from compress.evaluation.quality.windows import Windows

KINDS = ("fact", "order", "pair")
ASKED = 12  # most questions of a window
TOKENS_OF_ONE = 128  # of the window for each question, at least
SHORTEST = 256  # tokens of a window: below, questions leave little room
FIRST = (
    "amber brisk coral dusty eager frozen golden hollow ivory jolly keen lunar mellow noble olive proud quiet rapid "
    "silver tidy urban vivid wooden young"
)
SECOND = (
    "anchor badger candle dragon engine falcon garden harbor island jacket kettle lantern market needle orchard pepper "
    "quarry ribbon saddle temple valley willow"
)
PLACES = ("first", "second", "third", "fourth")


class Fact(NamedTuple):
    """A sentence to hide, a question, and the answer to it."""

    sentence: str
    question: str
    answer: str


Encode = Callable[[str], list[int]]
Coded = tuple[Fact, list[int]]  # with the tokens of its sentence
Placed = tuple[list[int], dict[Fact, int]]  # tokens, and the place of each fact among them


def recall_text(windows: Windows, tokenizer: Any, of_a_kind: int) -> Text:
    """`of_a_kind` windows of each kind, as long as those of a text, which they are made of. Raises InputError for
    windows that are too short."""
    if windows.length < SHORTEST:
        raise InputError(f"recall in windows of {windows.length} tokens; allowed: {SHORTEST} or more (--length)")

    encode, ids = partial(bare_tokens, tokenizer), windows.ids_N.tolist()
    begun = [] if windows.skipped is None else [windows.skipped]
    rows: list[Row] = []
    parts: list[str] = []
    for kind in KINDS:
        for i in range(of_a_kind):
            dice = random.Random(f"{kind} {i}")
            begin = len(rows) * 997 * len(windows.spans) % len(ids)  # another place for every window
            turned = ids[begin:] + ids[:begin]
            filler = turned * math.ceil(windows.length / len(turned))
            row, found = _window(kind, filler, windows.length, dice, encode, begun)
            rows.append(row)
            parts += found
    return rows_text(f"{len(rows)} windows of facts to recall", "recall", rows, parts)


def _window(
    kind: str, filler: list[int], length: int, dice: random.Random, encode: Encode, begun: list[int]
) -> tuple[Row, list[str]]:
    """(Pieces of a window, of which answers are predicted; the part of each answer)."""
    facts = _facts(kind, dice)
    groups = [next(facts) for _ in range(min(ASKED, length // TOKENS_OF_ONE))]
    asked = [dice.choice(group) for group in groups]
    dice.shuffle(asked)
    ends = [(fact, encode(fact.question), encode(fact.answer)) for fact in asked]
    room = length - len(begun) - sum(len(question) + len(answer) for _, question, answer in ends)
    hidden = [[(fact, encode(fact.sentence)) for fact in group] for group in groups]
    if room < sum(len(sentence) for group in hidden for _, sentence in group):
        raise InputError(f"facts to recall do not fit in windows of {length} tokens; give a longer --length")
    if kind == "pair":
        body, places = _listed([fact for group in hidden for fact in group], facts, filler, room, dice, encode)
    else:
        body, places = _hidden(hidden, filler, room, dice)
    row, parts, done = [(begun + body, False)], [], len(body)
    for fact, question, answer in ends:
        row += [(question, False), (answer, True)]
        parts.append(f"{kind}, {_distance(done + len(question) - places[fact])}")
        done += len(question) + len(answer)
    return row, parts


def _facts(kind: str, dice: random.Random) -> Iterator[list[Fact]]:
    """Facts without end, those that are kept in their order together."""
    for round_of in count():
        names = [f"{a} {b}" if round_of == 0 else f"{a} {b} {round_of}" for a in FIRST.split() for b in SECOND.split()]
        dice.shuffle(names)
        for name in names:
            numbers = [str(dice.randrange(10_000, 100_000)) for _ in PLACES]
            if kind == "order":
                note = "it has the number"
                yield [
                    Fact(f"\nA note on the {name}: {note} {n}.\n", f"\nThe {place} note on the {name}: {note}", f" {n}")
                    for place, n in zip(PLACES, numbers, strict=True)
                ]
            elif kind == "fact":
                sentence = f"\nThe code of the {name} is"
                yield [Fact(f"{sentence} {numbers[0]}.\n", sentence, f" {numbers[0]}")]
            else:
                yield [Fact(f"\n{name}: {numbers[0]}", f"\n{name}:", f" {numbers[0]}")]


def _hidden(groups: Sequence[list[Coded]], filler: list[int], room: int, dice: random.Random) -> Placed:
    """A text with facts hidden in it: as many far from its end as near, by powers of two. Groups are mixed, and each
    keeps its order."""
    text = filler[: room - sum(len(sentence) for group in groups for _, sentence in group)]
    turns = [turn for group in groups for turn in [iter(group)] * len(group)]
    dice.shuffle(turns)
    backs = sorted((2 ** dice.uniform(5, max(5.0, math.log2(len(text) + 1))) for _ in turns), reverse=True)
    body: list[int] = []
    places, taken = {}, 0
    for turn, back in zip(turns, backs, strict=True):
        upto = max(taken, len(text) - math.floor(back))
        body += text[taken:upto]
        taken, (fact, sentence) = upto, next(turn)
        places[fact] = len(body)
        body += sentence
    return body + text[taken:], places


def _listed(
    asked: Sequence[Coded],
    others: Iterator[list[Fact]],
    filler: list[int],
    room: int,
    dice: random.Random,
    encode: Encode,
) -> Placed:
    """A list of keys and values: as many of those that are asked for far from its end as near, by powers of two. What
    the lines leave free stands before them, as text."""
    lines: list[Coded] = []
    free = room - sum(len(line) for _, line in asked)
    while True:
        [fact] = next(others)
        line = encode(fact.sentence)
        if len(line) > free:
            break
        lines.append((fact, line))
        free -= len(line)
    for each in asked:
        lines.insert(len(lines) - math.floor(2 ** dice.uniform(0, math.log2(len(lines) + 1)) - 1), each)
    body, places = list(filler[:free]), {}
    for fact, line in lines:
        places[fact] = len(body)
        body += line
    return body, places


def _distance(tokens: int) -> str:
    """The band of a distance in words, as positions have them."""
    low, high = 0, NEAR
    while tokens >= high:
        low, high = high, 2 * high
    return f"{low:,} to {high:,} tokens back"
