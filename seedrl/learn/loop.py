"""The learner process: sample, loss, optimise, publish; checkpoints and figures on the way.

`python -m seedrl.learn.loop --channel FD`: everything it needs comes as one message of the supervisor. SIGTERM asks it to stop:
it leaves the update it is in, unless that is being applied, writes a checkpoint, says so and ends.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from csrc_free_kernels.build import prefer
from seedrl import host
from seedrl.config import Config
from seedrl.errors import ConfigError, RunError, SeedrlError
from seedrl.learn.actor_critic import VTrace, learning_rate, make_optimizer
from seedrl.learn.algorithm import Algorithm, Loss, Network, rewarded
from seedrl.learn.ppo import PPO
from seedrl.learn.r2d2 import QLearning
from seedrl.policy.agent import make_agent, stored_extras
from seedrl.policy.base import Heads, Policy, extra_leaves_of, imported
from seedrl.spec import EnvSpec
from seedrl.store.batch import Batch
from seedrl.store.blocks import BlockStorage
from seedrl.store.board import BLOCKED, Board, EpisodeReader
from seedrl.store.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from seedrl.store.kept import KeptRows
from seedrl.store.memory import Shared, open_shared, require_device
from seedrl.store.plan import StorePlan
from seedrl.store.replay import ReplayReader
from seedrl.store.ring import RingReader
from seedrl.store.state import leaves
from seedrl.store.weights import Publisher, WeightsLayout
from seedrl.transport import doorbell
from seedrl.transport.channel import Channel

_RECENT_EPISODES = 100
_TIMED = (
    "rtt_ns",
    "env_step_ns",
)  # from publication to answer; from answer to publication: all of a group
_RATES = (
    "lag_max", "batch_rows_mean", "steps_per_s", "updates_per_s", "learner_wait_time_fraction", "actors_wait_time_fraction",
    "rtt_p50_us", "rtt_p99_us", "env_step_p50_us",
)  # fmt: skip
_DETERMINISTIC_LOG_UPDATES = 20  # by count, not by the clock, so that two runs write the same lines


def make_algorithm(network: Network, config: Config) -> Algorithm:
    """The algorithm that the configuration names. Raises: ConfigError when there is none, or it has no `losses`."""
    shipped: dict[str, Callable[[Network, Config], Algorithm]] = {
        "vtrace": VTrace,
        "ppo": PPO,
        "r2d2": QLearning,
        "dqn": QLearning,
    }
    name = config.algorithm.name
    if name in shipped:
        return shipped[name](network, config)
    module, _, attribute = name.rpartition(":")
    where = f"algorithm.name {name}"
    own = imported(module, attribute, where, "(network, config) -> algorithm")
    algorithm = own(network, config)
    if not callable(getattr(algorithm, "losses", None)):
        raise ConfigError(
            what=f"it gives a {type(algorithm).__name__}, which has no method losses", where=where,
            do="see docs/write-an-algorithm.md",
        )  # fmt: skip
    modes, mode = tuple(getattr(algorithm, "modes", ())), config.replay.mode
    if modes and mode not in modes:
        raise ConfigError(
            what=f"{attribute} learns from replay of mode {' or '.join(modes)}, not {mode}", where=f"{where}, replay.mode",
            do=f"set replay.mode to {modes[0]}",
        )  # fmt: skip
    lacking = sorted(set(getattr(algorithm, "extras", ())) - set(extra_leaves_of(network.policy)))
    if lacking:
        raise ConfigError(
            what=f"{attribute} wants the extra '{lacking[0]}' beside each row, which the policy does not store", where=f"{where}, policy.name",
            do="declare it in the policy's extra_leaves (docs/policy.md)",
        )  # fmt: skip
    return algorithm  # type: ignore[no-any-return]


class _Stop(Exception):
    """SIGTERM, at a moment when nothing is half done."""


class Learner:
    """The learner's state and its verbs; `update` reads like the architecture.

    Args:
        policy, heads, reader, publisher, board: see their modules.
        run_dir: where checkpoints go. report: takes each message for the supervisor.
    """

    def __init__(
        self, config: Config, spec: EnvSpec, policy: Policy, heads: Heads, reader: ReplayReader, publisher: Publisher, board: Board,
        run_dir: Path, channel: Channel,
    ) -> None:  # fmt: skip
        self.config, self.spec, self.policy = config, spec, policy.train()
        self.device = require_device(config.learner.device, "learner.device")
        self.network = Network(policy, heads, config, spec)
        self.algorithm = make_algorithm(self.network, config)
        self._parameters = list(policy.parameters())
        self.optimizer = make_optimizer(self._parameters, config.learner)
        self.reader, self.publisher, self.board = reader, publisher, board
        self.run_dir, self.channel = run_dir, channel
        self.updates = 0
        self.base_env_steps = self.base_episodes = 0  # of the runs that this one resumes
        self.env_steps = self.episodes = 0
        self.over: str | None = None
        self._episode_reader = EpisodeReader(board)
        self._recent: deque[np.ndarray] = deque(maxlen=_RECENT_EPISODES)
        self._evaluated: deque[np.ndarray] = deque(maxlen=_RECENT_EPISODES)
        self._critical = self._stop_wanted = False
        reader.wait = self._wait_for_data
        self._window = self._mark()
        self._sums: dict[str, float] = {}
        self._timed = {name: board.histograms[name].copy() for name in _TIMED}
        self._last_checkpoint_s = time.monotonic()
        self.restored: int | None = None  # unrolls that a resumed run found
        self.kept = None
        if isinstance(reader, RingReader) and config.replay.checkpoint:
            self.kept = KeptRows(run_dir / "replay", reader)
        self.total_updates = self._total_updates()

    def _total_updates(self) -> int | None:
        """Updates that `run.max_steps` allows, for schedules; None when the run has no such end."""
        steps, learner, replay = self.config.run.max_steps, self.config.learner, self.config.replay
        draws = 1.0 if replay.mode == "queue" else replay.samples_per_insert
        if steps is None or draws is None:
            return None
        return max(1, int(steps * draws) // (learner.batch_size * learner.stride_or_default))

    # ------------------------------------------------------------------------------------------------------ update

    def update(self) -> bool:
        """One update, if data comes within a second; False otherwise."""
        with self._undisturbed():
            batch = self.reader.sample(self.config.learner.batch_size, timeout_s=1.0)
        if batch is None:
            return False
        env = self.config.env
        batch = rewarded(batch.to(self.device), env.reward_scale, env.reward_clip)
        rate = learning_rate(self.updates, self.config.learner, self.total_updates)
        steps: list[dict[str, float]] = []
        for loss in self.algorithm.losses(self.network.normalised(batch)):
            self.optimizer.zero_grad(set_to_none=True)
            loss.total.backward()
            # from its first step on, an update is brought to an end before a stop
            self._critical = True
            steps.append(self._figures(loss, self.optimise(rate)))
            if self._stop_wanted:
                break
        if not steps:
            raise RunError(what=f"{self.config.algorithm.name} gave no loss for a batch", where="algorithm.name", do="yield one at least")  # fmt: skip
        self.network.observe(batch)
        if loss.priorities is not None:
            self.reader.update_priorities(batch.items, loss.priorities.cpu().numpy())
        with self._undisturbed():
            self.updates += 1
            self._note(batch, steps, rate)
            # before publishing: what a deterministic run counts must not depend on how fast the engine goes on
            self.env_steps = self.base_env_steps + self.board.get("env_steps")
            record = self.record() if self._due() else None
            self.publish()
        if record is not None:
            self.channel.send({"type": "metrics", "record": record})
            self.over = self.finished(record)
        return True

    def _due(self) -> bool:
        """Whether it is time for a record."""
        if self.config.run.deterministic:
            return self.updates % _DETERMINISTIC_LOG_UPDATES == 0
        return time.monotonic() - self._window["time_s"] >= self.config.run.log_every_s

    def optimise(self, rate: float) -> float:
        """Clips the gradients, applies them; returns their norm before clipping."""
        limit = self.config.learner.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(
            self._parameters, limit if limit is not None else float("inf")
        )
        norm_value = float(norm)
        if not np.isfinite(norm_value):
            raise RunError(
                what=f"the gradient's norm is {norm_value} at update {self.updates}", where="learner",
                do="lower learner.learning_rate, set learner.max_grad_norm, or check the policy",
            )  # fmt: skip
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return norm_value

    def publish(self) -> None:
        self.publisher.publish(self.policy, self.updates)
        self.reader.publish_version(self.updates)
        if self.total_updates is not None:
            self.reader.set_progress(self.updates / self.total_updates)

    # ------------------------------------------------------------------------------------------------------ figures

    def _mark(self) -> dict[str, float]:
        board = self.board
        return {
            "time_s": time.monotonic(), "updates": self.updates, "waited_ns": self.reader.waited_ns,
            "env_steps": board.get("env_steps"), "batches": board.fired,
            "rows": board.get("rows_acted") + board.get("evaluation_rows"),
            "blocked_ns": sum(map(board.get, BLOCKED)),
        }  # fmt: skip

    @staticmethod
    def _figures(loss: Loss, grad_norm: float) -> dict[str, float]:
        figures = {name: float(value) for name, value in loss.metrics.items()}
        return figures | {"grad_norm": grad_norm}

    def _note(self, batch: Batch, steps: list[dict[str, float]], rate: float) -> None:
        """Adds an update's figures to those of the next record: means over its steps."""
        lag = (self.updates - 1 - batch.version).float()
        figures = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
        figures |= {
            "optimizer_steps": float(len(steps)), "lag_mean": float(lag.mean()), "lag_max": float(lag.max()),
        }  # fmt: skip
        for name, value in figures.items():
            if name == "lag_max":
                self._sums[name] = max(self._sums.get(name, 0.0), value)
            else:
                self._sums[name] = self._sums.get(name, 0.0) + value
        self._rate = rate

    def record(self) -> dict[str, Any]:
        """One record of figures since the last one; the episodes' are of the last 100 that ended in training."""
        episodes = self._episode_reader.read()
        training = episodes[episodes[:, 1] == 0]
        self.episodes += len(training)
        self._recent.extend(training)
        self._evaluated.extend(episodes[episodes[:, 1] == 1])
        now, before = self._mark(), self._window
        self._window = now
        since = {name: now[name] - before[name] for name in now}
        seconds, updates = max(since["time_s"], 1e-9), max(since["updates"], 1)
        sums, self._sums = self._sums, {}
        lag_max = sums.pop("lag_max", 0.0)
        timed = {name: self.board.histograms[name].copy() for name in _TIMED}
        rtt, env_step = (timed[name].since(self._timed[name]) for name in _TIMED)
        self._timed = timed
        record: dict[str, Any] = {
            "env_steps": self.env_steps, "updates": self.updates, "policy_version": self.updates,
            "episodes": self.base_episodes + self.episodes,
            **{name: value / updates for name, value in sums.items()},
            "lag_max": lag_max, "learning_rate": getattr(self, "_rate", None),
            "batch_rows_mean": since["rows"] / max(since["batches"], 1),
            "interrupted_episodes": self.board.get("interrupted_episodes"),
            "steps_per_s": since["env_steps"] / seconds, "updates_per_s": since["updates"] / seconds,
            "learner_wait_time_fraction": min(1.0, since["waited_ns"] * 1e-9 / seconds),
            "actors_wait_time_fraction": min(1.0, since["blocked_ns"] * 1e-9 / seconds),
            "rtt_p50_us": rtt.percentile(50) * 1e-3, "rtt_p99_us": rtt.percentile(99) * 1e-3,
            "env_step_p50_us": env_step.percentile(50) * 1e-3,
        }  # fmt: skip
        record |= self.reader.figures()
        if not since["updates"]:  # a stretch in which nothing was learnt says nothing about speed
            for name in _RATES:
                record.pop(name)
        if self._recent:
            recent = np.stack(self._recent)
            record["return_mean"] = float(recent[:, 2].mean())
            record["length_mean"] = float(recent[:, 3].mean())
            for i, name in enumerate(self.spec.stats):
                column = recent[:, 5 + i]
                if np.isfinite(column).any():
                    record[f"stat_{name}"] = float(np.nanmean(column))
        if self._evaluated:
            record["evaluation_return_mean"] = float(np.stack(self._evaluated)[:, 2].mean())
        return record

    def finished(self, record: dict[str, Any]) -> str | None:
        """Why the run is over, or None."""
        run = self.config.run
        if run.max_steps is not None and self.env_steps >= run.max_steps:
            return f"max_steps {run.max_steps} reached"
        full = len(self._recent) == _RECENT_EPISODES
        if (
            run.stop_at_return is not None
            and full
            and record.get("return_mean", -np.inf) >= run.stop_at_return
        ):
            return f"mean return {record['return_mean']:.1f} reached {run.stop_at_return}"
        return None

    # --------------------------------------------------------------------------------------------------- checkpoints

    def checkpoint(self) -> Path:
        """Writes a checkpoint of this moment: between two updates."""
        with self._undisturbed():
            counters = {
                "updates": self.updates, "policy_version": self.updates, "env_steps": self.env_steps,
                "episodes": self.base_episodes + self.episodes,
            }  # fmt: skip
            saved = Checkpoint.of(
                self.policy, self.optimizer, self.config, self.spec, counters=counters, algorithm=self._own_tensors()
            )  # fmt: skip
            path = save_checkpoint(self.run_dir / "checkpoints", saved, self.config.run.keep)
            if self.kept is not None:
                self.kept.save()
            self._last_checkpoint_s = time.monotonic()
        return path

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        own: Callable[[], dict[str, torch.Tensor]] = getattr(self.algorithm, "tensors", dict)
        return own()

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continues where `checkpoint` was written: weights, moments, counters, random state."""
        checkpoint.load_into(self.policy, self.spec)
        checkpoint.load_optimizer(self.optimizer)
        checkpoint.load_algorithm(self._own_tensors())
        if self.kept is not None:
            self.restored = self.kept.restore()
        self.updates = checkpoint.counters["updates"]
        self.base_env_steps, self.base_episodes = (
            checkpoint.counters["env_steps"],
            checkpoint.counters["episodes"],
        )
        self.env_steps = self.base_env_steps
        self._window = self._mark()

    # ----------------------------------------------------------------------------------------------------------- run

    def run(self) -> None:
        """Updates until told to stop, or until the run has reached its end; then a last record and a checkpoint."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            self._loop()
        except _Stop:
            pass
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._stop_wanted = False
        self.env_steps = self.base_env_steps + self.board.get("env_steps")
        path = self.checkpoint()
        if self.kept is not None:
            self.kept.finish()
            self.kept.save()  # of now, in case the one before was still being written
            self.kept.finish()
        if (
            not self.config.run.deterministic
        ):  # of a moment when nothing moves: its counts fit each other
            self.channel.send({"type": "metrics", "record": self.record()})
        self.channel.send({
            "type": "stopped", "checkpoint": str(path), "updates": self.updates, "env_steps": self.env_steps,
            **self.reader.accounts(),
        })  # fmt: skip

    def _loop(self) -> None:
        while self.over is None:
            updated = self.update()
            if (
                updated
                and time.monotonic() - self._last_checkpoint_s >= self.config.run.checkpoint_every_s
            ):
                self.channel.send({"type": "checkpoint", "path": str(self.checkpoint())})
        self.channel.send({"type": "done", "reason": self.over})
        while True:  # acting goes on until the supervisor has stopped it
            signal.pause()

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """A stretch that a request to stop does not cut in two."""
        self._critical = True
        try:
            yield
        finally:
            self._critical = False
        self._leave_if_wanted()

    def _wait_for_data(self, bell: int, timeout_us: float | None) -> bool:
        """The reader's wait, which a request to stop ends; the rest of `sample` it does not, so that no row is half taken."""
        self._critical = False
        try:
            self._leave_if_wanted()
            return doorbell.wait(bell, timeout_us)
        finally:
            self._critical = True

    def _leave_if_wanted(self) -> None:
        if self._stop_wanted:
            raise _Stop

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self._critical:
            self._stop_wanted = True
        else:
            raise _Stop


# ---------------------------------------------------------------------------------------------------------- process


def open_store(
    config: Config, spec: EnvSpec, policy: Policy, num_slots: int, ready: Mapping[str, Any], fds: Sequence[int], bell: int,
    engine_bell: int, run_dir: Path | None = None,
) -> tuple[ReplayReader, Publisher]:  # fmt: skip
    """The learner's ends of what it shares with the engine: rows to read, weights to publish.

    Args: ready: `replay_handle` and `replay_device`, as the engine said. fds: of the control, the weights and, on the CPU, the rows. run_dir: for what
        the store keeps in a file.
    """
    control_fd, weights_fd, *replay_fd = fds
    like = policy.initial_state(1)
    stored = Heads(spec.action, config.policy.action_distribution).stored_specs()
    extras = stored_extras(config, policy)
    plan = StorePlan.of(config, spec, stored, leaves(like), num_slots, extras)
    shared = Shared(replay_fd[0] if replay_fd else None, ready["replay_handle"])
    memory = open_shared(torch.device(ready["replay_device"]), plan.blocks.nbytes, shared)
    control = host.map_shared(control_fd, plan.control.nbytes)
    storage = BlockStorage(plan.blocks, memory)
    reader = plan.reader(storage, control, bell, engine_bell, like, run_dir)
    weights = WeightsLayout.of(policy)
    return reader, Publisher(host.map_shared(weights_fd, weights.nbytes), weights)


def build(start: dict[str, Any], fds: list[int], channel: Channel) -> Learner:
    """The learner of a start message."""
    config, spec = Config.model_validate(start["config"]), EnvSpec.from_dict(start["spec"])
    board_fd, bell, engine_bell, *store_fds = fds
    prefer(config.run.kernels)
    torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.run.seed)
    device = require_device(config.learner.device, "learner.device")
    policy, heads = make_agent(config, spec, start["num_slots"])
    policy = policy.to(device)
    run_dir = Path(start["run_dir"])
    reader, publisher = open_store(
        config, spec, policy, start["num_slots"], start, store_fds, bell, engine_bell, run_dir
    )
    board = Board(host.map_shared(board_fd, Board.nbytes(len(spec.stats))), len(spec.stats))
    learner = Learner(config, spec, policy, heads, reader, publisher, board, run_dir, channel)
    if start.get("resume"):
        checkpoint = load_checkpoint(Path(start["resume"]))
        learner.resume(checkpoint)
        channel.send({
            "type": "resumed", "path": str(checkpoint.path), "restored": learner.restored,
            **checkpoint.counters,
        })  # fmt: skip
    return learner


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    host.die_with_parent(arguments.parent)
    channel = Channel.from_fd(arguments.channel)
    try:
        received = channel.receive()
        if received is None:
            return 1
        learner = build(*received, channel)
        learner.publish()
        parameters = sum(parameter.numel() for parameter in learner.policy.parameters())
        channel.send({"type": "ready", "parameters": parameters})
        learner.run()
        return 0
    except SeedrlError as error:
        channel.send({"type": "failed", **error.to_wire()})
        return error.exit_code
    except Exception as error:  # a fault of ours or of the user's policy: shown whole in the log, one line on the screen
        traceback.print_exc()
        failure = RunError(
            what=f"the learner failed: {type(error).__name__}: {error}",
            traceback_text=traceback.format_exc(),
        )
        channel.send({"type": "failed", **failure.to_wire()})
        return 1


if __name__ == "__main__":
    sys.exit(main())
