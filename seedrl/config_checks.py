"""What cannot be, field against field: each check yields the keys concerned, what is wrong, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seedrl.config import Config, Learner, Replay

ALGORITHMS = ("vtrace", "ppo", "r2d2", "dqn")
Q_LEARNING = ("r2d2", "dqn")
_PPO_ONLY = ("synchronous", "epochs", "minibatches", "clip_range", "value_clip_range", "target_kl")
_Q_ONLY = (
    "n_step", "double", "dueling", "value_rescale", "target_period", "epsilon", "epsilon_exponent", "priority_mix",
)  # fmt: skip
_RING_ONLY = ("min_fill", "samples_per_insert", "max_uses")
_EXPONENT_ENDS = ("priority_exponent_end", "importance_exponent_end")
_PRIORITY_ONLY = (
    "priority_exponent", "importance_exponent", "weights_over", "initial_priority", *_EXPONENT_ENDS,
)  # fmt: skip


def contradictions(config: Config) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """What cannot be, field against field: (keys concerned, what is wrong, what to do)."""
    workers, batching, learner = config.workers, config.batching, config.learner
    if config.replay.device not in (None, "cpu", config.engine.device):
        what = f"replay.device {config.replay.device} is neither the engine's ({config.engine.device}) nor cpu"
        do = "leave replay.device out, or set it to cpu"
        yield ("replay.device", "engine.device"), what, do
    if batching.max_batch is not None and batching.min_batch > batching.max_batch:
        what = f"min_batch {batching.min_batch} is more than max_batch {batching.max_batch}"
        do = f"lower min_batch, or raise max_batch to {batching.min_batch} or more"
        yield ("batching.min_batch", "batching.max_batch"), what, do
    buckets = batching.buckets
    if any(size < 1 for size in buckets) or sorted(set(buckets)) != buckets:
        yield ("batching.buckets",), f"{buckets} are no sizes that rise", "give rows, each more than the one before"  # fmt: skip
    if workers.envs_per_worker % workers.groups:
        what = f"{workers.envs_per_worker} environments cannot be shared out evenly over {workers.groups} groups"
        up = -(-workers.envs_per_worker // workers.groups) * workers.groups
        yield (
            ("workers.groups", "workers.envs_per_worker"),
            what,
            f"set envs_per_worker to {up}, or groups to 1",
        )
    yield from replay_contradictions(config.replay, learner)
    yield from _learning_contradictions(config)
    unroll_rows, capacity = learner.batch_size * learner.unroll_length, config.replay.capacity
    if config.replay.mode == "queue" and capacity is not None and capacity < unroll_rows:
        what = f"replay.capacity {capacity} rows hold no batch of {learner.batch_size} x {learner.unroll_length}"
        yield (
            ("replay.capacity", "learner.batch_size"),
            what,
            f"set more than {unroll_rows} rows, or leave it out",
        )
    if config.policy.separate_value and config.policy.core != "none":
        what = f"separate_value has no part in the {config.policy.core}, without which it would be blind to what was"
        yield ("policy.separate_value", "policy.core"), what, "set policy.core to none, or separate_value to false"  # fmt: skip
    algorithm, slots = config.algorithm, workers.num * workers.envs_per_worker
    if algorithm.iterates and learner.batch_size != slots:
        what = f"a synchronous iteration is one unroll of each of the {slots} environments, not {learner.batch_size} unrolls"
        do = f"set learner.batch_size to {slots}, or algorithm.synchronous to false"
        yield ("learner.batch_size", "algorithm.synchronous", "algorithm.name"), what, do
    for owners, names in ((("ppo",), _PPO_ONLY), (Q_LEARNING, _Q_ONLY)):
        for name in names if algorithm.name not in owners else ():
            if getattr(algorithm, name) != type(algorithm).model_fields[name].default:
                known = " or ".join(owners)
                what = f"{name} belongs to {known}, not to {algorithm.name}"
                yield (f"algorithm.{name}", "algorithm.name"), what, f"set algorithm.name to {known}, or leave it out"  # fmt: skip
    if algorithm.kwargs and algorithm.name in ALGORITHMS:
        what = f"{algorithm.name} has fields, no keywords"
        yield ("algorithm.kwargs",), what, "set the fields, or name an algorithm of your own"
    if algorithm.iterates and (algorithm.rho_bar, algorithm.c_bar) != (1, 1):
        what = "rho_bar and c_bar correct for lag, which a synchronous iteration has none of"
        yield ("algorithm.rho_bar", "algorithm.c_bar", "algorithm.synchronous"), what, "leave them out, or set algorithm.synchronous to false"  # fmt: skip
    if config.run.deterministic and workers.num != 1:
        what = f"a deterministic run has one worker, not {workers.num}: the order in which several come in is chance"
        yield (
            ("run.deterministic", "workers.num"),
            what,
            "set workers.num to 1, or run.deterministic to false",
        )
    if config.run.deterministic and config.replay.mode != "queue":
        what = f"what {config.replay.mode} replay draws depends on how far acting is at the time, which no two runs share"
        yield ("run.deterministic", "replay.mode"), what, "set run.deterministic to false"
    if learner.schedule != "constant" and config.run.max_steps is None:
        what = f"a {learner.schedule} schedule needs to know the end of the run"
        yield ("learner.schedule",), what, "set run.max_steps, or the schedule to constant"
    if learner.schedule != "constant" and config.replay.mode != "queue" and config.replay.samples_per_insert is None:  # fmt: skip
        what = f"a {learner.schedule} schedule needs to know how many updates the steps make"
        yield ("learner.schedule", "replay.samples_per_insert"), what, "set replay.samples_per_insert, or the schedule to constant"  # fmt: skip
    for name in _EXPONENT_ENDS:
        if getattr(config.replay, name) is not None and (config.run.max_steps is None or config.replay.samples_per_insert is None):  # fmt: skip
            what = f"{name} needs to know how many updates the run has"
            yield (f"replay.{name}", "run.max_steps", "replay.samples_per_insert"), what, "set run.max_steps and replay.samples_per_insert, or leave it out"  # fmt: skip
    evaluation = config.evaluation
    if evaluation.every_s and not (evaluation.slots and evaluation.episodes):
        lacking = "slots" if not evaluation.slots else "episodes"
        what = f"an evaluation every {evaluation.every_s:g} s with evaluation.{lacking} 0 plays nothing"
        do = f"set evaluation.{lacking}, or leave every_s out"
        yield ("evaluation.every_s", f"evaluation.{lacking}"), what, do


def _learning_contradictions(config: Config) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Of what is kept with how it is learnt from."""
    replay, learner, algorithm = config.replay, config.learner, config.algorithm
    once = ("vtrace", "ppo")
    if algorithm.name in once and replay.mode != "queue":
        what = f"{algorithm.name} learns from rows of its own, recent policy, each once; {replay.mode} keeps old ones and draws them again"
        yield ("algorithm.name", "replay.mode"), what, "set replay.mode to queue, or algorithm.name to dqn or r2d2"  # fmt: skip
    if algorithm.name in once and learner.stride not in (None, learner.unroll_length):
        what = f"overlapping unrolls would teach {algorithm.name} the same step twice"
        yield ("learner.stride", "algorithm.name"), what, "leave learner.stride out"
    if algorithm.name in Q_LEARNING and replay.mode == "queue":
        what = f"{algorithm.name} learns from rows that are kept, which queue does not"
        yield ("algorithm.name", "replay.mode"), what, "set replay.mode to prioritized or uniform"
    if algorithm.normalise_returns and algorithm.values_actions:
        what = f"the target network of {algorithm.name} would value by other moments than the network that learns"
        yield (
            ("algorithm.normalise_returns", "algorithm.name"),
            what,
            "set algorithm.value_rescale, or env.reward_scale",
        )
    if replay.initial_priority == "acting" and not algorithm.values_actions:
        what = f"first priorities are errors of the values of actions, which {algorithm.name} has none of"
        yield ("replay.initial_priority", "algorithm.name"), what, "set replay.initial_priority to largest, or algorithm.name to dqn or r2d2"  # fmt: skip
    if algorithm.name == "dqn" and config.policy.core != "none":
        what = f"dqn has no memory, the policy a {config.policy.core}"
        yield ("algorithm.name", "policy.core"), what, "set algorithm.name to r2d2, or policy.core to none"  # fmt: skip


def replay_contradictions(
    replay: Replay, learner: Learner
) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """What cannot be of the store alone, whoever learns from it; as `contradictions`."""
    if learner.stride is not None and learner.stride > learner.unroll_length:
        what = f"with a stride of {learner.stride} rows, those between unrolls of {learner.unroll_length} would never be learnt from"
        yield ("learner.stride", "learner.unroll_length"), what, f"set at most {learner.unroll_length}, or leave it out"  # fmt: skip
    if replay.mode == "queue":
        for name in _RING_ONLY:
            if getattr(replay, name) is not None:
                what = f"{name} is of rows that are kept; queue has each once"
                yield (f"replay.{name}", "replay.mode"), what, "set replay.mode to uniform, prioritized or recent, or leave it out"  # fmt: skip
        for name in ("host_gib", "file_gib"):
            if getattr(replay, name):
                yield (
                    (f"replay.{name}", "replay.mode"),
                    "queue keeps no rows that could leave the device",
                    "set replay.mode to uniform, prioritized or recent, or leave it out",
                )
        if replay.remover != "oldest":
            what = f"queue gives its rows to the learner, and has none for {replay.remover} to choose from"
            yield ("replay.remover", "replay.mode"), what, "set replay.mode to uniform, prioritized or recent, or leave it out"  # fmt: skip
    elif replay.capacity is None:
        what = f"{replay.mode} keeps as many rows as there is room for, and nobody said how many"
        yield ("replay.capacity", "replay.mode"), what, "set replay.capacity, in rows"
    if replay.remover != "oldest" and any(replay.bytes_behind):
        what = f"rows behind the device go in the order in which they came, not by {replay.remover}"
        yield ("replay.remover", "replay.host_gib", "replay.file_gib"), what, "set replay.remover to oldest, or host_gib and file_gib to 0"  # fmt: skip
    if replay.compress and not any(replay.bytes_behind):
        yield ("replay.compress",), "there is nothing to compress: rows on the device are as they are", "set replay.host_gib or replay.file_gib, or leave it out"  # fmt: skip
    if replay.remover == "lowest_priority" and replay.mode != "prioritized":
        what = f"lowest_priority goes by priorities, which {replay.mode} has none of"
        yield ("replay.remover", "replay.mode"), what, "set replay.mode to prioritized, or replay.remover to oldest"  # fmt: skip
    uses = replay.max_uses_or_default
    if uses is not None and replay.samples_per_insert is not None and replay.samples_per_insert > uses:  # fmt: skip
        what = f"{replay.samples_per_insert:g} draws of each unroll, which is gone after {uses}"
        yield ("replay.samples_per_insert", "replay.max_uses", "replay.mode"), what, "raise max_uses, or lower samples_per_insert"  # fmt: skip
    if replay.ratio_tolerance is not None and replay.samples_per_insert is None:
        what = "there is a tolerance, and no ratio"
        yield ("replay.ratio_tolerance",), what, "set replay.samples_per_insert, or leave it out"
    for name in _PRIORITY_ONLY if replay.mode != "prioritized" else ():
        if getattr(replay, name) != type(replay).model_fields[name].default:
            what = f"{name} is of priorities, which {replay.mode} has none of"
            yield (f"replay.{name}", "replay.mode"), what, "set replay.mode to prioritized, or leave it out"  # fmt: skip
