"""What `train` shows while it runs: one live panel on a terminal, plain lines elsewhere.

Whatever happens, a failure stays the last thing on the screen: on a terminal it stands under the
panel, in plain output it is said again after each line of figures, and at the end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from rich.console import Console, Group

_ABSENT = "–"
_MAX_FAILURE_LINES = 40


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


# name in a record, label, how it is written
FIELDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("env_steps", "steps", _count),
    ("steps_per_s", "steps/s", _count),
    ("return_mean", "mean return", "{:.2f}".format),
    ("length_mean", "mean length", "{:.1f}".format),
    ("batch_rows_mean", "mean batch", "{:.1f}".format),
    ("rtt_p99_us", "p99 round trip us", _count),
    ("lag_mean", "lag", "{:.2f}".format),
    ("learner_wait_time_fraction", "learner waits", _percent),
    ("actors_wait_time_fraction", "actors wait", _percent),
)


def time_left_s(
    record: Mapping[str, Any], elapsed_s: float, max_steps: int | None, max_seconds: float | None
) -> float | None:
    """Seconds until the run reaches the nearer of its two ends; None when it has none yet known."""
    ends = []
    if max_seconds is not None:
        ends.append(max_seconds - elapsed_s)
    if max_steps is not None and record.get("steps_per_s"):
        ends.append((max_steps - record["env_steps"]) / record["steps_per_s"])
    return max(0.0, min(ends)) if ends else None


def duration(seconds: float) -> str:
    """A duration as h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Panel:
    """The progress of a run; a context manager.

    Args:
        title: stands over the panel. max_steps, max_seconds: the run's ends, for the time left.
        stream: where to write, stdout by default; a panel is shown when it is a terminal.
        interval_s: at least so long between two plain lines. clock: monotonic, in seconds.
    """

    def __init__(
        self,
        title: str = "seedrl",
        *,
        max_steps: int | None = None,
        max_seconds: float | None = None,
        stream: TextIO | None = None,
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title, self._max_steps, self._max_seconds = title, max_steps, max_seconds
        self._stream = stream or sys.stdout
        self._interval_s, self._clock = interval_s, clock
        self._start_s = clock()
        self._last_line_s: float | None = None
        self._figures: list[tuple[str, str]] = []
        self._shown_at_end = True
        self._failure = ""
        self._num_failures = 0
        self._live = None
        self._closed = False
        if self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            self._console: Console = Console(file=self._stream, highlight=False, markup=False)
            # Without refreshing by itself it needs no thread: it changes only when there is news.
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def begin(self) -> None:
        """Time counts from now: what came before was preparation."""
        self._start_s = self._clock()

    def update(self, record: Mapping[str, Any]) -> None:
        """Shows the figures of a record (see `FIELDS`); what it lacks is shown as absent."""
        self._figures = self._figures_of(record)
        if self._live is not None:
            self._live.update(self._page(), refresh=True)
            return
        now_s = self._clock()
        if self._last_line_s is not None and now_s - self._last_line_s < self._interval_s:
            self._shown_at_end = False
            return
        self._last_line_s = now_s
        self._print_figures()

    def message(self, text: str, *, failure: bool = False) -> None:
        """Says something at once; a failure stays below all that follows, the first one with a count."""
        text = text.rstrip()
        if failure:
            self._num_failures += 1
            if self._num_failures == 1:
                self._failure = _shortened(text)
        if self._live is None:
            self._print(text)
            return
        if not failure:
            self._console.print(text, soft_wrap=True)
        self._live.update(self._page(), refresh=True)

    def close(self) -> None:
        """Leaves the last figures on the screen, below them a failure if there was one."""
        if self._closed:
            return
        self._closed = True
        if self._live is not None:
            self._live.stop()
        elif not self._shown_at_end:
            self._print_figures()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _figures_of(self, record: Mapping[str, Any]) -> list[tuple[str, str]]:
        figures = []
        for name, label, written in FIELDS:
            value = record.get(name)
            if value is None or value != value:  # nan is as good as absent
                figures.append((label, _ABSENT))
            else:
                figures.append((label, written(float(value))))
        elapsed_s = self._clock() - self._start_s
        left_s = time_left_s(record, elapsed_s, self._max_steps, self._max_seconds)
        figures.append(("time", duration(elapsed_s)))
        figures.append(("time left", _ABSENT if left_s is None else duration(left_s)))
        return figures

    def _page(self) -> Group:
        from rich.columns import Columns
        from rich.console import Group
        from rich.panel import Panel as Box
        from rich.text import Text

        cells = [
            Text.assemble((f"{label} ", "dim"), (value, "bold")) for label, value in self._figures
        ]
        page = [Box(Columns(cells, padding=(0, 3), equal=True), title=Text(self._title))]
        return (
            Group(*page, Text(self._last_words(), style="red")) if self._failure else Group(*page)
        )

    def _last_words(self) -> str:
        if self._num_failures < 2:
            return self._failure
        return f"{self._failure}\n({self._num_failures} failures; this was the first)"

    def _print_figures(self) -> None:
        self._shown_at_end = True
        self._print("  ".join(f"{label} {value}" for label, value in self._figures))
        if self._failure:
            self._print(self._last_words())

    def _print(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


def _shortened(text: str) -> str:
    """A failure that fits the screen: of a long traceback the first line and the last ones."""
    lines = text.split("\n")
    if len(lines) <= _MAX_FAILURE_LINES:
        return text
    left_out = len(lines) - _MAX_FAILURE_LINES
    kept = [lines[0], f"... {left_out} lines, see log.txt ...", *lines[1 - _MAX_FAILURE_LINES :]]
    return "\n".join(kept)
