"""The time that is left: from the steps themselves, not from what was before them."""

import io
import re

import pytest
from commands import Outcome, StopAfterOne, command, fast_gptq, make_llama
from models import tokens
from rich.console import Console
from rich.progress import Progress

import compress
from compress.cli import progress
from compress.cli.progress import Lines, ProgressBar, TimeLeft, columns
from compress.engine import block_loop
from compress.engine.walk import block

STEPS = [(0, ""), (0, ""), (1, "a"), (2, "b"), (2, ""), (3, "c"), (4, "d")]
TIMES = [0, 50, 60, 75, 75, 76, 77]  # start-up until 50; what is after b takes a second each
LEFT = [None, None, 30, 25, None, 1, 0]


class Clock:
    """Time that passes when it is told to."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(progress, "loading", lambda: 0.0)
    return clock


def test_lines_say_the_time_that_steps_like_these_take(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines("work")
    for clock.now, (done, what) in zip(TIMES, STEPS, strict=True):
        lines.step(done, 4, what)
    assert capsys.readouterr().err.splitlines() == [
        "work: 0/4",
        "work: 1/4 a, 30 s left",
        "work: 2/4 b, 25 s left",
        "work: 3/4 c, 1 s left",
        "work: 4/4 d",
    ]


def test_verification_is_time_left_too(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Libraries take 5 s, and reading the model as many; a fresh process does both again, and a little more."""
    monkeypatch.setattr(progress, "loading", lambda: 5.0)
    shown = Progress(console=Console(file=io.StringIO()))
    lines, bar = Lines("work"), ProgressBar("work", shown)
    for each in (lines, bar):
        each.verifies()
    for clock.now, (done, what) in zip((0, 5, 15, 25), [(0, ""), (0, ""), (1, "a"), (2, "b")], strict=True):
        lines.step(done, 2, what)
        bar.step(done, 2, what)
    assert capsys.readouterr().err.splitlines() == ["work: 0/2", "work: 1/2 a, 24 s left", "work: 2/2 b, 14 s left"]
    bar.phase("verify")
    clock.now += 4
    assert str(TimeLeft().render(shown.tasks[0])) == "0:00:10"


def test_other_work_has_a_pace_of_its_own(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint, then its export, which says nothing before its first step."""
    lines = Lines("work")
    for clock.now, done, total in ((0, 1, 2), (100, 2, 2), (110, 1, 3), (111, 2, 3)):
        lines.step(done, total, "a")
    assert capsys.readouterr().err.splitlines()[2:] == ["work: 1/3 a", "work: 2/3 a, 1 s left"]


def test_of_many_steps_a_line_per_hundredth_or_ten_seconds_is_said(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """1,000 steps of 10 ms, then 300 of 9 s: neither a line per step nor minutes without one."""
    lines = Lines("train")
    for steps, seconds, most, least in ((1000, 0.01, 101, 99), (300, 9, 160, 140)):
        lines.step(0, steps, "")
        for done in range(1, steps + 1):
            clock.now += seconds
            lines.step(done, steps, f"step {done}")
        said = capsys.readouterr().err.splitlines()
        assert least <= len(said) <= most
        assert said[-1] == f"train: {steps}/{steps} step {steps}"


def test_a_bar_counts_down_however_long_a_step_takes(clock: Clock) -> None:
    shown = Progress(console=Console(file=io.StringIO()))
    bar, column = ProgressBar("work", shown), TimeLeft()
    for clock.now, left, (done, what) in zip(TIMES, LEFT, STEPS, strict=True):
        bar.step(done, 4, what)
        words = "-:--:--" if left is None else f"0:00:{left:02}"
        assert str(column.render(shown.tasks[0])) == words, what
        if left:
            clock.now += 1
            assert str(column.render(shown.tasks[0])) == f"0:00:{left - 1:02}"


def test_a_note_breaks_between_words_and_a_full_bar_stands_for_what_comes_after() -> None:
    out = io.StringIO()
    shown = Progress(console=Console(file=out, width=40, force_terminal=True))
    bar = ProgressBar("work", shown)
    bar.step(2, 2, "b")
    assert shown.finished
    bar.note("what is said after the steps are done takes two lines here, and no word is broken")
    bar.phase("verify")
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        "note: what is said after the steps are",
        "done takes two lines here, and no word",
        "is broken",
    ]
    assert (shown.tasks[0].total, shown.tasks[0].description) == (None, "verify")


def test_a_row_of_a_bar_with_its_speed_fits_80_columns(clock: Clock) -> None:
    out = io.StringIO()
    shown = Progress(*columns(), get_time=clock.monotonic, auto_refresh=False, console=Console(file=io.StringIO()))
    bar = ProgressBar("quantize", shown)
    bar.tokens(65536)
    for done in range(13):
        bar.step(done, 30, f"model.layers.{done - 1}" if done else "")
        clock.now += 4
    Console(file=out, width=80).print(shown)
    row, *others = out.getvalue().splitlines()
    assert not others
    assert re.sub("━+", "━", row).split() == [
        *("quantize", "model.layers.11", "━", "12/30", "0:00:52", "0:01:08", "16,384", "tokens/s"),
    ]


def test_the_speed_is_that_of_the_work_at_hand(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens of blocks, then an export, of which nobody knows tokens."""
    lines = Lines("work")
    lines.tokens(20)
    for clock.now, done in ((0, 0), (2, 1), (8, 2)):
        lines.step(done, 2, "a" if done else "")
    lines.tokens(0)
    for clock.now, done in ((9, 0), (10, 1)):
        lines.step(done, 2, "b" if done else "")
    said = ["work: 0/2", "work: 1/2 a, 10 tokens/s, 2 s left", "work: 2/2 a, 5.0 tokens/s", "work: 1/2 b, 1 s left"]
    assert capsys.readouterr().err.splitlines() == said


def test_the_time_left_is_right_within_a_quarter_after_a_tenth_of_uneven_blocks(clock: Clock) -> None:
    """Blocks that differ by 40 %, after a start-up that takes as long as ten of them."""
    pace, seconds = progress.Pace(), [10 + 4 * ((7 * i) % 5) / 4 for i in range(40)]
    pace.left(0, 40, "")
    clock.now = 120
    pace.left(0, 40, "")
    for done, each in enumerate(seconds, 1):
        clock.now += each
        left = pace.left(done, 40, "block")
        if 4 <= done < 40:
            assert left == pytest.approx(sum(seconds[done:]), rel=0.25)


def test_a_bar_forgets_the_name_of_a_step_when_other_work_begins() -> None:
    shown = Progress(console=Console(file=io.StringIO()))
    bar = ProgressBar("train", shown)
    named = []
    for done, total, what in ((0, 0, ""), (12, 16, "range test"), (12, 16, ""), (0, 6, ""), (1, 6, "step 1")):
        bar.step(done, total, what)
        named.append(shown.tasks[0].description)
    assert named == ["train", "train range test", "train range test", "train", "train step 1"]


@pytest.mark.parametrize(
    ("steps", "left"),
    [([(0, 2), (1, 2), (2, 2)], "work ━ 2/2 0:00:09"), ([(0, 0)], ""), ([(0, 2), (1, 2)], "work a ━ 1/2 0:00:06")],
)
def test_what_stays_of_a_bar_is_the_work_that_it_counted_and_its_time(
    steps: list[tuple[int, int]], left: str, clock: Clock
) -> None:
    """Whatever came after the last step: it is not 0 of an unknown number."""
    shown = Progress(*columns(), get_time=clock.monotonic, auto_refresh=False, console=Console(file=io.StringIO()))
    bar = ProgressBar("work", shown)
    for done, total in steps:
        bar.step(done, total, "a")
        clock.now += 3
    if steps[-1] == (2, 2):
        bar.phase("verify")
    bar.finish()
    out = io.StringIO()
    Console(file=out, width=80).print(shown)
    words = re.sub("━+", "━", " ".join(out.getvalue().split()))
    assert words.startswith(left) if left else not words


def test_a_phase_says_whose_time_is_left_and_goes_on_where_it_was(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two recipes of a sweep: the second phase has more behind it, a part tells no time, and the sweep has its own."""
    lines = Lines("sweep")
    lines.step(0, 3, "")
    for name in ("a", "b"):
        lines.phase("quantize", "unknown", name)
        for done in (0, 1, 2):
            lines.step(done, 4, "block" if done else "")
            clock.now += 5
        lines.phase("learning rate", "part")
        lines.step(1, 2, "tried")
        lines.phase("sweep")
        lines.step(1 + (name == "b"), 3, name)
    quantized = ["quantize: 1/4 block, 15 s left to quantize", "quantize: 2/4 block, 10 s left to quantize"]
    of_recipe = ["quantize: 0/4", *quantized, "learning rate: 1/2 tried"]
    assert capsys.readouterr().err.splitlines() == [
        *("sweep: 0/3", "quantize: a", *of_recipe, "sweep: 1/3 a, 30 s left"),
        *("quantize: b", *of_recipe, "sweep: 2/3 b, 15 s left"),
    ]


def test_a_run_times_its_new_blocks_alone(clock, monkeypatch, tmp_path, capsys) -> None:
    """The first forward takes a minute, a block ten seconds, an embedding and a block of an earlier run none."""

    def taking(seconds, function):
        def slowly(*arguments, **options):
            clock.now += seconds
            return function(*arguments, **options)

        return slowly

    monkeypatch.setattr(block_loop, "capture_stack", taking(60, block_loop.capture_stack))
    monkeypatch.setattr(block, "suspended_forward", taking(10, block.suspended_forward))
    options = {"calibration": tokens(4), "verify": False, "output": tmp_path / "out"}
    passes = [compress.Embeddings(scheme="w4a16", group_size=16), fast_gptq(group_size=16)]

    class StopInTheEnd(StopAfterOne):
        def step(self, done: int, total: int, what: str) -> None:
            super().step(done - 3, total, what)

    model = make_llama(num_hidden_layers=4)
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(model, passes, reporter=StopInTheEnd(), **options)
    model = make_llama(num_hidden_layers=4)
    compress.quantize(model, passes, reporter=Lines("run"), resume=True, **options)
    lines = capsys.readouterr().err.splitlines()
    assert "note: going on with an earlier run of out: 4 of 6 steps are done" in lines
    said = [line.removeprefix("run: ") for line in lines if line.startswith("run: ")]
    assert said == [
        "0/6",
        "1/6 model.embed_tokens",
        "2/6 lm_head",
        "3/6 model.layers.0",
        "4/6 model.layers.1",
        "5/6 model.layers.2, 6.4 tokens/s, 10 s left",  # 4 samples of 16 tokens in ten seconds
        "6/6 model.layers.3, 6.4 tokens/s",
    ]


def test_verifying_shows_no_bars_of_other_libraries(llama_w4) -> None:
    assert command("verify", llama_w4) == Outcome(0, "12 layers bit for bit; transformers compared\n", "")
