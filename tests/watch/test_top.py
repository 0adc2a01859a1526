from __future__ import annotations

import io
import re

import pytest

from seedrl.watch.top import FIELDS, Panel, duration, time_left_s

RECORD = {
    "env_steps": 12345,
    "steps_per_s": 1000.0,
    "return_mean": 98.76,
    "length_mean": 43.21,
    "batch_rows_mean": 31.5,
    "rtt_p99_us": 480.0,
    "lag_mean": 1.25,
    "learner_wait_time_fraction": 0.07,
    "actors_wait_time_fraction": 0.93,
}


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "50")
    monkeypatch.setenv("TERM", "xterm")


def screen(written: str) -> list[str]:
    """The lines that a terminal shows after it was sent `written`: the few controls that we use."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\n|\r)", written):
        if part == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif part == "\r":
            pass  # what follows is always an erase, or a line from its start
        elif part.startswith("\x1b["):
            number, letter = part[2:-1], part[-1]
            if letter == "A":
                row = max(0, row - int(number or 1))
            elif letter == "K":
                lines[row] = ""
        else:
            lines[row] += part
    return [line.rstrip() for line in lines]


def test_a_plain_line_holds_every_figure() -> None:
    stream, clock = io.StringIO(), Clock()
    panel = Panel(stream=stream, clock=clock, max_steps=22345)
    clock.now_s = 65.0
    panel.update(RECORD)
    panel.close()
    assert stream.getvalue() == (
        "steps 12,345  steps/s 1,000  mean return 98.76  mean length 43.2  mean batch 31.5  "
        "p99 round trip us 480  lag 1.25  learner waits 7 %  actors wait 93 %  "
        "time 1:05  time left 0:10\n"
    )


def test_plain_lines_come_at_intervals_and_the_last_figures_at_the_end() -> None:
    stream, clock = io.StringIO(), Clock()
    with Panel(stream=stream, clock=clock, interval_s=5.0) as panel:
        for second in range(8):
            clock.now_s = second
            panel.update({"env_steps": second})
    steps = [line.split()[1] for line in stream.getvalue().splitlines()]
    assert steps == ["0", "5", "7"]


def test_what_a_record_lacks_is_shown_as_absent() -> None:
    stream = io.StringIO()
    Panel(stream=stream).update({"env_steps": 0, "return_mean": float("nan"), "lag_mean": None})
    assert "mean return –" in stream.getvalue() and "lag –" in stream.getvalue()


def test_a_failure_is_the_last_line_after_every_line_of_figures() -> None:
    stream, clock = io.StringIO(), Clock()
    panel = Panel(stream=stream, clock=clock, interval_s=1.0)
    panel.message("worker 1 failed: first", failure=True)
    assert stream.getvalue().splitlines()[-1] == "worker 1 failed: first"
    clock.now_s = 2.0
    panel.update(RECORD)
    assert stream.getvalue().splitlines()[-1] == "worker 1 failed: first"
    panel.message("worker 2 failed: second", failure=True)
    clock.now_s = 2.5
    panel.update(RECORD)  # too early for a line of its own
    panel.close()
    assert stream.getvalue().splitlines()[-2:] == [
        "worker 1 failed: first",
        "(2 failures; this was the first)",
    ]


def test_on_a_terminal_the_figures_are_replaced_in_place() -> None:
    stream = Terminal()
    with Panel("cartpole", stream=stream) as panel:
        panel.update({**RECORD, "env_steps": 111})
        panel.update({**RECORD, "env_steps": 222})
    shown = "\n".join(screen(stream.getvalue()))
    assert "cartpole" in shown and "steps 222" in shown and "111" not in shown
    assert all(label in shown for _, label, _ in FIELDS)


def test_on_a_terminal_messages_stay_above_the_panel() -> None:
    stream = Terminal()
    with Panel(stream=stream) as panel:
        panel.update(RECORD)
        panel.message("[bold]worker 3[/bold] attached")  # not to be read as markup
        panel.update(RECORD)
    shown = screen(stream.getvalue())
    assert shown[0] == "[bold]worker 3[/bold] attached"
    assert sum("mean return" in line for line in shown) == 1


def test_on_a_terminal_a_failure_stays_below_the_panel() -> None:
    stream = Terminal()
    with Panel(stream=stream) as panel:
        panel.message("Traceback: [red]\nEnvError: broke", failure=True)
        panel.update(RECORD)
        panel.message("worker 2 attached")
        panel.update(RECORD)
        during = [line for line in screen(stream.getvalue()) if line]
    after = [line for line in screen(stream.getvalue()) if line]
    for shown in (during, after):
        assert shown[-2:] == ["Traceback: [red]", "EnvError: broke"]
        assert sum("EnvError" in line for line in shown) == 1


def test_a_long_traceback_keeps_its_first_and_its_last_lines() -> None:
    stream = Terminal()
    with Panel(stream=stream) as panel:
        panel.message("\n".join(f"line {i}" for i in range(500)), failure=True)
    shown = [line for line in screen(stream.getvalue()) if line]
    assert shown[-1] == "line 499" and any(line == "line 0" for line in shown)
    assert len(shown) < 50


def test_closing_twice_does_nothing_more() -> None:
    stream = io.StringIO()
    panel = Panel(stream=stream)
    panel.update(RECORD)
    panel.close()
    before = stream.getvalue()
    panel.close()
    assert stream.getvalue() == before


def test_time_left_is_that_of_the_nearer_end() -> None:
    record = {"env_steps": 400, "steps_per_s": 10.0}
    assert time_left_s(record, 30.0, max_steps=1000, max_seconds=None) == 60.0
    assert time_left_s(record, 30.0, max_steps=None, max_seconds=50.0) == 20.0
    assert time_left_s(record, 30.0, max_steps=1000, max_seconds=50.0) == 20.0
    assert time_left_s(record, 30.0, max_steps=None, max_seconds=None) is None
    assert time_left_s({"env_steps": 0}, 1.0, max_steps=1000, max_seconds=None) is None
    assert time_left_s({**record, "env_steps": 2000}, 1.0, 1000, None) == 0.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (61, "1:01"), (3600, "1:00:00"), (90061, "25:01:01")],
)
def test_durations_are_written_as_clocks_do(seconds: float, text: str) -> None:
    assert duration(seconds) == text
