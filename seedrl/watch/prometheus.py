"""The figures of a run for Prometheus: a page over HTTP, read from the board when it is asked for. Names and meanings: docs/metrics.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from seedrl.errors import AddressError
from seedrl.metrics import Histogram
from seedrl.store.board import STAGES, Board

# seconds: 10 us to 10 s; an edge is as exact as the board's histograms, within 2 %
_SECONDS = [digit * 10.0**power for power in range(-5, 1) for digit in (1, 2, 5)] + [10.0]
_ROWS = [2.0**power for power in range(13)]
_TIMES = {
    "round_trip": ("rtt_ns", "From a group's rows being published until its actions were there, per group and step."),
    "environment_step": ("env_step_ns", "From a group's actions being there until its next rows were published, per group and step."),
    "deschedule": ("deschedule_ns", "Wall time of a batch less the engine thread's own time: the system ran something else."),
}  # fmt: skip
_COUNTS = {
    "environment_steps": ("env_steps", "Steps of training environments; a reset is none."),
    "rows_acted": ("rows_acted", "Rows of training that were answered."),
    "rows_stored": ("rows_stored", "Rows that are in replay for good, as parts of whole unrolls."),
    "evaluation_rows": ("evaluation_rows", "Rows of evaluation that were answered."),
    "interrupted_episodes": ("interrupted_episodes", "Episodes that broke off: in no mean."),
}
_FIRED = ("full", "all_ready", "wait", "hard_deadline")
_DROPPED = ("worker_died", "detached", "shutdown")
_BLOCKED = ("room", "lag")


def parse(listen: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT. Raises: AddressError."""
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:\s/]+):(\d{1,5})", listen)
    if found is None or int(found[2]) >= 65536:
        raise AddressError(
            what=f"'{listen}' is not HOST:PORT", where="run.metrics_listen", do="use 127.0.0.1:9400, say"
        )  # fmt: skip
    return found[1].strip("[]"), int(found[2])


class Figures(Collector):
    """What one page holds.

    Args: board. slots: seats in all. record: the learner's newest record of figures, as of metrics.jsonl.
    """

    def __init__(self, board: Board, slots: int, record: Callable[[], Mapping[str, Any]]) -> None:
        self._board, self._slots, self._record = board, slots, record

    def collect(self) -> Iterator[Metric]:
        get, histograms = self._board.get, self._board.histograms
        for name, (counter, text) in _COUNTS.items():
            yield CounterMetricFamily(f"seedrl_{name}", text, value=get(counter))
        batches = CounterMetricFamily("seedrl_batches", "Batches, by what made them fire.", labels=["reason"])  # fmt: skip
        for reason in _FIRED:
            batches.add_metric([reason], get(f"fired_{reason}"))
        dropped = CounterMetricFamily("seedrl_rows_dropped", "Rows of unrolls that never became whole, by why.", labels=["reason"])  # fmt: skip
        for reason in _DROPPED:
            dropped.add_metric([reason], get(f"dropped_{reason}"))
        blocked = CounterMetricFamily("seedrl_blocked_seconds", "Time in which acting waited for the learner, by what held it.", labels=["by"])  # fmt: skip
        for by in _BLOCKED:
            blocked.add_metric([by], get(f"blocked_{by}_ns") * 1e-9)
        yield from (batches, dropped, blocked)
        yield GaugeMetricFamily("seedrl_slots", "Seats in all.", value=self._slots)
        yield GaugeMetricFamily("seedrl_live_slots", "Seats that are taken.", value=get("live_slots"))  # fmt: skip
        yield GaugeMetricFamily("seedrl_policy_version", "Version that acts now.", value=get("policy_version"))  # fmt: skip
        stages = HistogramMetricFamily("seedrl_batch_seconds", "Time of a batch, by stage.", labels=["stage"])  # fmt: skip
        for stage in STAGES:
            stages.add_metric([stage], *_buckets(histograms[f"{stage}_ns"], _SECONDS, 1e-9))
        yield stages
        for name, (histogram, text) in _TIMES.items():
            buckets, total = _buckets(histograms[histogram], _SECONDS, 1e-9)
            yield HistogramMetricFamily(f"seedrl_{name}_seconds", text, buckets, total)
        buckets, total = _buckets(histograms["batch_rows"], _ROWS, 1.0)
        yield HistogramMetricFamily("seedrl_batch_rows", "Rows of a batch.", buckets, total)
        newest = GaugeMetricFamily("seedrl_record", "The newest line of metrics.jsonl, by name.", labels=["name"])  # fmt: skip
        for name, value in self._record().items():
            if isinstance(value, int | float):
                newest.add_metric([name], value)
        yield newest


def _buckets(
    histogram: Histogram, edges: list[float], unit: float
) -> tuple[list[tuple[str, float]], float]:
    """(cumulative counts by edge, sum), in `unit`s of the histogram's whole numbers."""
    counts, count, total = histogram.cumulative([round(edge / unit) for edge in edges])
    buckets = [(repr(edge), float(n)) for edge, n in zip(edges, counts, strict=True)]
    return [*buckets, ("+Inf", float(count))], total * unit


class Page:
    """The page, served by a thread from `Page(...)` to `close`. Raises: AddressError when the address cannot be had."""

    def __init__(self, listen: str, figures: Figures) -> None:
        host, port = parse(listen)
        registry = CollectorRegistry()
        registry.register(figures)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise AddressError(
                what=f"cannot serve figures at {listen}: {error.strerror or error}", where="run.metrics_listen",
                do="choose another port, or stop whoever has that one (ss -ltnp shows it)",
            ) from None  # fmt: skip
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
