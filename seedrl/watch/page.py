"""The page of `seedrl top`: a running server's figures of the last seconds, and in words what limits it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Group

_BAR = 24
_MOST_WORKERS = 24
_LEARNER = (
    "return_mean",
    "lag_mean",
    "learner_wait_time_fraction",
    "actors_wait_time_fraction",
    "queued_rows",
    "replay_rows",
    "samples_per_insert",
)


def _us(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def headline(figures: Mapping[str, Any]) -> list[str]:
    """What stands over the tables, and is all that is said where there is no terminal."""
    taken = figures["slots"] - figures["free_slots"]
    return [
        f"{figures['pace']}: {figures['env_id']}, {figures['steps_per_s']:,.0f} steps/s, {figures['batches_per_s']:,.0f} batches/s, "
        f"{taken} of {figures['slots']} slots taken ({figures['waiting_slots']} wait for the engine), version {figures['policy_version']}",
        f"limited by: {figures['limited_by']} ({figures['why']})",
    ]


def page(figures: Mapping[str, Any]) -> Group:
    """All of it, for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    first, limit = headline(figures)
    times = Table(box=None, padding=(0, 2))
    for column in ("us", "p50", "p99", "p99.9", "max"):
        times.add_column(column, justify="left" if column == "us" else "right")
    rows = {**figures["stage_us"], "round trip": figures["rtt_us"], "environment step": figures["env_step_us"], "descheduled": figures["deschedule_us"]}  # fmt: skip
    for name, row in rows.items():
        times.add_row(name, *(_us(row[part]) for part in ("p50", "p99", "p999", "max")))
    sizes = Table(box=None, padding=(0, 2))
    sizes.add_column("rows of a batch, up to", justify="right")
    sizes.add_column("batches")
    most = max(figures["batch_rows"].values(), default=1)
    for size, count in figures["batch_rows"].items():
        sizes.add_row(size, f"{'█' * max(1, round(_BAR * count / most)) if count else ''} {count}")
    workers = Table(box=None, padding=(0, 2))
    for column in ("worker", "slots", "step us", "round trip us", "environment", "host"):
        workers.add_column(column)
    for worker in figures["workers"][:_MOST_WORKERS]:
        mark = ", remote" if worker["remote"] else ""
        workers.add_row(
            str(worker["worker"]), str(worker["slots"]), _us(worker["env_step_us"]), _us(worker["rtt_us"]),
            worker["env"], f"{worker['host']} pid {worker['pid']}{mark}",
        )  # fmt: skip
    left_out = len(figures["workers"]) - _MOST_WORKERS
    more = [Text(f"and {left_out} more workers", style="dim")] if left_out > 0 else []
    record = figures["record"]
    names = [*_LEARNER, *sorted(name for name in record if name.startswith("blocked_by_"))]
    learner = [f"{name} {record[name]:.4g}" for name in names if isinstance(record.get(name), int | float)]  # fmt: skip
    return Group(Text(first, style="bold"), Text(limit, style="yellow"), Text("  ".join(learner)), Text(), times, Text(), sizes, Text(), workers, *more)  # fmt: skip
