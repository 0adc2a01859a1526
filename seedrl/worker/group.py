"""One group: steps its environments, keeps the autoreset order, seeds, episode statistics; writes the rows of its slots.

The order is Gymnasium's next-step autoreset. A row holds the observation now, and reward and flags of the step that led to it; after
a row with `terminated` or `truncated` the answered action is ignored, the environment is reset, and its row has `first` set and
reward 0. A broken episode (an environment that raised, a number that is not finite) has no final row: its seat's next row is a
`first` one with `interrupted` set.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from seedrl.errors import EnvError
from seedrl.spec import EnvSpec, unflatten, unflatten_actions
from seedrl.transport.rows import FLOAT32_MAX
from seedrl.worker.envs import class_name, close_all, one_line, single_spaces, traceback_of
from seedrl.worker.seam import PLAIN, Seam, as_reward, stat_of, vector_stat_of

MAX_RESETS = 3  # in a row, of an environment whose very first observation is not finite
TRIAL, FIRST_REBUILD, PROBE = 0, 1, 2  # which seed of a seat, besides its first


def seat_seed(run_seed: int, evaluation: bool, worker: int, index: int, *extra: int) -> int:
    """The seed of one seat's first reset, below 2**31 as simulators in C want it; `extra` tells its trial and rebuilds apart."""
    sequence = np.random.SeedSequence([run_seed, int(evaluation), worker, index], spawn_key=extra)
    return int(sequence.generate_state(1)[0] >> 1)


@dataclass
class RebuildBudget:
    """How many environments a worker may rebuild within a window; one budget for all its groups.

    Attributes:
        max_rebuilds: allowed within `window_s`. spent: (time in s, message, traceback) of the rebuilds in the window.
    """

    max_rebuilds: int = 3
    window_s: float = 60.0
    spent: deque[tuple[float, str, str]] = field(default_factory=deque)

    def spend(self, now_s: float, message: str, traceback_text: str) -> tuple[str, str] | None:
        """None when one more may be rebuilt; otherwise the first message and traceback of those in the window."""
        while self.spent and self.spent[0][0] <= now_s - self.window_s:
            self.spent.popleft()
        self.spent.append((now_s, message, traceback_text))
        return None if len(self.spent) <= self.max_rebuilds else self.spent[0][1:]


@dataclass(frozen=True)
class Rules:
    """What a group does about faults.

    Attributes:
        on_nan: "error" or "drop_episode". budget: of rebuilds. where: "worker 3", for messages.
    """

    on_nan: str = "error"
    budget: RebuildBudget = field(default_factory=RebuildBudget)
    where: str = "worker"


class _Rows:
    """The part that a group of single environments and a native vector environment share: accounts and faults.

    `faults` collects {"type": "fault", "kind": "raised" | "not_finite", "group", "seat", "env", "message", "traceback", "leaf",
    "episode", "step"} until the worker's loop has sent them.
    """

    def __init__(
        self, env: Any, spec: EnvSpec, view: Any, rules: Rules, group: int, size: int
    ) -> None:
        self.spec, self.rules, self.group, self.size = spec, rules, group, size
        self.where = f"{rules.where}, group {group}"
        self.faults: list[dict[str, Any]] = []
        self.observation_space, self.action_space = single_spaces(env)
        self.env_class = class_name(env)
        self._returns, self._lengths = np.zeros(size, np.float64), np.zeros(size, np.int64)
        self._reward64, self._magnitude = np.zeros(size, np.float64), np.zeros(size, np.float64)
        self._episodes = [-1] * size  # index of the seat's present episode
        self._over = [False] * size  # the seat's last row was a final one
        self.bind(view)

    def bind(self, view: Any) -> None:
        """Writes to these rows from now on: at the start, and after the worker has attached again."""
        self.view = view
        self._seam = Seam(self.spec, self.observation_space, view, self.where)
        self._actions_in = [view.action[leaf.name] for leaf in self.spec.action]

    def _carry_over(self, before: Any) -> None:
        """Writes first rows that go on where the rows `before` stood: the observation of then, in the middle of its episode."""
        view = self.view
        for name, column in before.obs.items():
            view.obs[name][...] = column
        if view.mask is not None:
            view.mask[...] = before.mask
        self._clear_flags()
        view.first[...] = 1
        self._reward64[...] = 0.0

    def _at(self, seat: int) -> tuple[int, int]:
        """(episode, step that it is taking) of a seat; step 0 is the reset."""
        episode = self._episodes[seat]
        if self._over[seat] or episode < 0:
            return episode + 1, 0
        return episode, int(self._lengths[seat]) + 1

    def place(self, seat: int) -> str:
        """Where a seat stands: "worker 3, group 1, seat 5, episode 12, step 40"."""
        episode, step = self._at(seat)
        return f"{self.where}, seat {seat}, episode {episode}, step {step}"

    def _fault(
        self, seat: int, kind: str, message: str, traceback_text: str = "", leaf: str = ""
    ) -> None:
        episode, step = self._at(seat)
        self.faults.append(
            {
                "type": "fault", "kind": kind, "group": self.group, "seat": seat, "env": self.env_class,
                "message": message, "traceback": traceback_text, "leaf": leaf,
                "episode": episode, "step": step,
            }
        )  # fmt: skip

    def _clear_flags(self) -> None:
        self.view.flags[...] = 0

    def _publish_accounts(self) -> None:
        view = self.view
        view.reward[...] = self._reward64
        view.episode_return[...] = self._returns
        view.episode_length[...] = self._lengths

    def _rewards_finite(self) -> bool:
        """Whether every reward is a finite float32; NaN compares false."""
        return bool(np.maximum.reduce(np.abs(self._reward64, out=self._magnitude)) <= FLOAT32_MAX)

    def _not_finite(self) -> list[tuple[int, str, float | None]]:
        """(seat, leaf or "reward", the reward if it is that) of each row that must not be published."""
        bad = np.flatnonzero(~(np.abs(self._reward64) <= FLOAT32_MAX)).tolist()
        rows: dict[int, tuple[str, float | None]] = {
            seat: ("reward", float(self._reward64[seat])) for seat in bad
        }
        for seat, leaf in self._seam.not_finite():
            rows.setdefault(seat, (leaf, None))
        return [(seat, leaf, value) for seat, (leaf, value) in sorted(rows.items())]

    def _report_not_finite(self, seat: int, leaf: str, value: float | None) -> None:
        """Notes the fault, or raises it where the run wants an error."""
        what = (
            f"the reward is {value}"
            if value is not None
            else f"leaf '{leaf}' holds a number that is not finite"
        )
        if self.rules.on_nan == "error":
            raise EnvError(
                what=what,
                where=self.place(seat),
                do="mend the environment, or set env.on_nan=drop_episode to drop such episodes",
            )
        self._fault(seat, "not_finite", what, leaf=leaf)

    def _spend(self, seat: int, error: BaseException) -> None:
        """Notes an exception of the environment; raises it when the worker has rebuilt as often as it may."""
        message, traceback_text = one_line(error), traceback_of(error)
        self._fault(seat, "raised", message, traceback_text)
        budget = self.rules.budget
        first = budget.spend(time.monotonic(), message, traceback_text)
        if first is not None:
            raise EnvError(
                what=first[0],
                where=f"{self.place(seat)}, {self.env_class}: {len(budget.spent)} faults in {budget.window_s:g} s",
                do="mend the environment, or raise env.max_rebuilds",
                traceback_text=first[1],
            ) from error


class Group(_Rows):
    """A group of single environments.

    Args:
        envs: one a seat. spec: the server's. view: the group's rows.
        make: builds one more environment of the kind. seed: (seat, extra ...) -> seed, as of `seat_seed`.
        rules: on faults. group: its index in the worker.
    """

    def __init__(
        self,
        envs: Sequence[Any],
        spec: EnvSpec,
        view: Any,
        *,
        make: Callable[[], Any],
        seed: Callable[..., int],
        rules: Rules,
        group: int = 0,
    ) -> None:
        super().__init__(envs[0], spec, view, rules, group, len(envs))
        self.envs = list(envs)
        self._make, self._seed = make, seed
        self._steps = [env.step for env in self.envs]
        self._rewards = [0.0] * self.size
        self._rebuilt = [0] * self.size
        self._split_actions = unflatten_actions(self.action_space)

    def reset(self, seeded: bool = True) -> None:
        """Resets every environment and writes first rows; `seeded` only at the very first reset of their lives."""
        self._clear_flags()
        for seat in range(self.size):
            self.view.at_seat[0] = seat
            self._begin(seat, self._seed(seat) if seeded else None, interrupted=False)
        self._account()

    def go_on(self, before: Any) -> None:
        """Writes first rows after a lease was lost: episodes go on where they stood in the rows `before`, those at their end are reset."""
        self._carry_over(before)
        self._rewards[:] = [0.0] * self.size
        self._lengths -= 1  # `_account` counts one row
        for seat in range(self.size):
            if self._over[seat]:
                self._begin(seat, None, interrupted=False)
        self._account()

    def step(self) -> None:
        """Takes the answered actions, steps or resets each environment, and completes the group's next rows."""
        seam, over, rewards = self._seam, self._over, self._rewards
        column, dtype, shape = seam.single_column, seam.single_dtype, seam.single_shape
        at_seat = self.view.at_seat
        mask_in_info, write, array, plain = seam.mask_in_info, seam.write, np.ndarray, PLAIN
        actions = self._split_actions(self._actions_in)
        self._clear_flags()
        seat = -1
        for step, action in zip(self._steps, actions, strict=True):
            seat += 1
            at_seat[0] = seat
            if over[seat]:
                self._begin(seat, None, interrupted=False)
                continue
            try:
                obs, reward, terminated, truncated, info = step(action)
                ended = bool(terminated or truncated)
            except (Exception, SystemExit) as error:
                self._rebuild(seat, error, interrupted=True)
                continue
            if obs.__class__ is array and obs.dtype is dtype and obs.shape == shape:
                column[seat] = obs  # type: ignore[index]
            else:
                write(seat, obs)
            if reward.__class__ in plain:
                rewards[seat] = reward  # type: ignore[call-overload]
            else:
                rewards[seat] = as_reward(reward, partial(self.place, seat))
            if ended:
                self._end(seat, terminated, truncated, info)
            if mask_in_info:
                seam.write_info_mask(seat, info)
        self._account()

    def _begin(self, seat: int, seed: int | None, *, interrupted: bool) -> None:
        """Resets one environment and writes its first row; one that raises is rebuilt."""
        env = self.envs[seat]
        try:
            obs, info = env.reset(seed=seed) if seed is not None else env.reset()
        except (Exception, SystemExit) as error:
            self._rebuild(seat, error, interrupted=interrupted)
            return
        self._episodes[seat] += 1
        self._lengths[seat] = -1  # `_account` counts one row
        self._seam.write(seat, obs)
        if self._seam.mask_in_info:
            self._seam.write_info_mask(seat, info)
        self.view.first[seat] = 1
        if interrupted:
            self.view.interrupted[seat] = 1
        self._rewards[seat] = 0.0
        self._returns[seat] = 0.0
        self._over[seat] = False

    def _end(self, seat: int, terminated: Any, truncated: Any, info: Any) -> None:
        """The row is the final one of its episode."""
        if terminated:
            self.view.terminated[seat] = 1
        if truncated:
            self.view.truncated[seat] = 1
        self._over[seat] = True
        for column, name in enumerate(self.spec.stats):
            self.view.stats[seat, column] = stat_of(info, name)

    def _rebuild(self, seat: int, error: BaseException, *, interrupted: bool) -> None:
        """The environment raised: a new one takes its seat; `interrupted` when that broke an episode."""
        while True:
            self._spend(seat, error)
            close_all([self.envs[seat]], timeout_s=2.0)
            try:
                env = self._make()
            except Exception as next_error:
                error = next_error
                continue
            break
        self.envs[seat], self._steps[seat] = env, env.step
        self._rebuilt[seat] += 1
        self._begin(
            seat, self._seed(seat, FIRST_REBUILD, self._rebuilt[seat]), interrupted=interrupted
        )

    def _account(self) -> None:
        """Looks at the rows of the whole group, counts them into their episodes, and writes the figures."""
        seam, reward64 = self._seam, self._reward64
        reward64[:] = self._rewards
        if not self._rewards_finite() or not seam.finite():
            self._drop_not_finite()
        seam.check_ranges()
        seam.finish_masks(self._over)
        self._returns += reward64
        self._lengths += 1
        self._publish_accounts()

    def _drop_not_finite(self) -> None:
        """Resets the seats whose rows are not finite, again when a first row is not."""
        for _ in range(1 + MAX_RESETS):
            bad = self._not_finite()
            for seat, leaf, value in bad:
                self._over[seat] = False  # the final row of a dropped episode is none
                self._report_not_finite(seat, leaf, value)
                view = self.view
                broken = bool(view.interrupted[seat]) if view.first[seat] else True
                view.terminated[seat] = view.truncated[seat] = 0
                self._begin(seat, None, interrupted=broken)
            if not bad:
                return
            self._reward64[:] = self._rewards
        raise never_finite(bad[0][1], f"{self.where}, seat {bad[0][0]}")


class VectorGroup(_Rows):
    """A native vector environment as one group; its autoreset mode must be next-step.

    Args: as of `Group`, with one vector environment; seed: (seat, extra ...) -> seed.
    """

    def __init__(
        self,
        env: Any,
        spec: EnvSpec,
        view: Any,
        *,
        make: Callable[[], Any],
        seed: Callable[..., int],
        rules: Rules,
        group: int = 0,
    ) -> None:
        super().__init__(env, spec, view, rules, group, int(env.num_envs))
        from gymnasium import spaces

        require_next_step(env, self.where)
        self.envs = [env]
        self._make, self._seed, self._rebuilt = make, seed, 0
        self._nested = isinstance(self.action_space, spaces.Dict | spaces.Tuple)

    def reset(self, seeded: bool = True) -> None:
        """Resets the environment and writes first rows; `seeded` only at the very first reset of its life."""
        self._clear_flags()
        self._begin_all(self._seeds() if seeded else None, interrupted=False)
        self._finish()

    def go_on(self, before: Any) -> None:
        """Writes first rows after a lease was lost: as of `Group`; all are reset when one is at its end, as it cannot be reset alone."""
        if any(self._over):
            self.reset(False)
            return
        self._carry_over(before)
        self._finish()

    def step(self) -> None:
        """Takes the answered actions, steps the environment, and completes the group's next rows."""
        view, over = self.view, self._over
        actions: Any = [column.copy() for column in self._actions_in]
        actions = unflatten(self.action_space, actions) if self._nested else actions[0]
        self._clear_flags()
        try:
            obs, reward, terminated, truncated, infos = self.envs[0].step(actions)
        except (Exception, SystemExit) as error:
            self._rebuild(error)
            self._finish()
            return
        self._write_batch(obs, infos)
        self._reward64[:] = self._batch(reward, "reward", "biuf")
        np.not_equal(self._batch(terminated, "terminated", "bui"), 0, out=view.terminated)
        np.not_equal(self._batch(truncated, "truncated", "bui"), 0, out=view.truncated)
        self._returns += self._reward64
        self._lengths += 1
        self._over = (view.terminated | view.truncated).tolist()
        if any(over):
            for seat in np.flatnonzero(over).tolist():
                if self._reward64[seat] or self._over[seat]:
                    raise not_next_step(f"{self.where}, {self.env_class}")
                self._mark_first(seat, interrupted=False)
        if self.spec.stats and any(self._over):
            for seat in np.flatnonzero(self._over).tolist():
                for column, name in enumerate(self.spec.stats):
                    view.stats[seat, column] = vector_stat_of(infos, name, seat)
        if not self._rewards_finite() or not self._seam.finite():
            self._drop([seat for seat, *_ in self._complain()])
        self._finish()

    def _finish(self) -> None:
        self._seam.check_ranges()
        self._seam.finish_masks(self._over)
        self._publish_accounts()

    def _batch(self, values: Any, name: str, kinds: str) -> np.ndarray:
        array = np.asarray(values)
        if array.shape != (self.size,) or array.dtype.kind not in kinds:
            raise EnvError(
                what=f"the {name} of the batch is {array.dtype} {list(array.shape)}, not one a seat [{self.size}]",
                where=f"{self.where}, {self.env_class}",
                do=f"return a {name} of shape [{self.size}]",
            )
        return array

    def _write_batch(self, obs: Any, infos: Any) -> None:
        self._seam.write_batch(obs)
        if self._seam.mask_in_info:
            self._seam.write_batch_info_mask(infos)

    def _complain(self) -> list[tuple[int, str, float | None]]:
        bad = self._not_finite()
        for seat, leaf, value in bad:
            # the step is counted already, unless the row is a first one
            counted = 1 - int(self.view.first[seat])
            self._over[seat] = False
            self._lengths[seat] -= counted
            self._report_not_finite(seat, leaf, value)
            self._lengths[seat] += counted
        return bad

    def _drop(self, seats: list[int]) -> None:
        """Resets the seats whose rows are not finite: these alone where Gymnasium's own classes can, otherwise all."""
        from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

        env = self.envs[0]
        if not isinstance(env.unwrapped, AsyncVectorEnv | SyncVectorEnv):
            self._begin_all(None, interrupted=True)
            return
        mask = np.zeros(self.size, bool)
        mask[seats] = True
        try:
            obs, infos = env.reset(options={"reset_mask": mask})
        except (Exception, SystemExit) as error:
            self._rebuild(error)
            return
        self._seam.write_batch(obs)
        if self._seam.mask_in_info:
            for seat in seats:
                self._seam.write_info_mask(seat, {"action_mask": infos["action_mask"][seat]})
        self._require_finite()
        for seat in seats:
            self._mark_first(seat, interrupted=True)

    def _require_finite(self) -> None:
        for seat, leaf in self._seam.not_finite():
            raise never_finite(leaf, f"{self.where}, seat {seat}")

    def _mark_first(self, seat: int, interrupted: bool) -> None:
        """The seat's row is the first of a new episode."""
        view = self.view
        view.terminated[seat] = view.truncated[seat] = 0
        view.first[seat], view.interrupted[seat] = 1, interrupted
        self._reward64[seat] = self._returns[seat] = 0.0
        self._lengths[seat] = 0
        self._episodes[seat] += 1
        self._over[seat] = False

    def _seeds(self, *extra: int) -> Any:
        """A seed a seat for Gymnasium's own classes, which take a list; one number for others."""
        from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

        if isinstance(self.envs[0].unwrapped, AsyncVectorEnv | SyncVectorEnv):
            return [self._seed(seat, *extra) for seat in range(self.size)]
        return self._seed(0, *extra)

    def _begin_all(self, seed: Any, *, interrupted: bool) -> None:
        """Resets the whole environment; `interrupted` marks those seats that were within an episode."""
        first = self.view.first.tolist()  # of rows not published yet
        broken = [
            interrupted and not (over or new) for over, new in zip(self._over, first, strict=True)
        ]
        try:
            obs, infos = self.envs[0].reset(seed=seed)
        except (Exception, SystemExit) as error:
            self._rebuild(error, within=interrupted)
            return
        self._write_batch(obs, infos)
        self._require_finite()
        for seat in range(self.size):
            self._mark_first(seat, broken[seat])

    def _rebuild(self, error: BaseException, *, within: bool = True) -> None:
        """A new vector environment takes the seats; nobody can tell which seat raised, so seat 0 stands for all."""
        while True:
            self._spend(0, error)
            close_all(self.envs, timeout_s=2.0)
            try:
                self.envs = [self._make()]
            except Exception as next_error:
                error = next_error
                continue
            break
        self._rebuilt += 1
        self._begin_all(self._seeds(FIRST_REBUILD, self._rebuilt), interrupted=within)


def require_next_step(env: Any, where: str) -> None:
    """EnvError naming the autoreset mode of a vector environment that has another than next-step, or does not say."""
    mode = env.metadata.get("autoreset_mode")
    name = getattr(mode, "value", mode)
    if name != "NextStep":
        raise EnvError(
            what=f"the autoreset mode of the vector environment is {name or 'not declared'}",
            where=f"{where}, {class_name(env)}",
            do="make it with autoreset_mode=AutoresetMode.NEXT_STEP and say so in metadata['autoreset_mode']",
        )


def not_next_step(where: str) -> EnvError:
    """Of a vector environment that says next-step and does something else."""
    return EnvError(
        what="the row after an episode's end is a step of the next one, not its reset",
        where=where,
        do="make the vector environment with autoreset_mode=AutoresetMode.NEXT_STEP",
    )


def never_finite(leaf: str, where: str) -> EnvError:
    """Of an environment whose first observation is not finite either."""
    return EnvError(
        what=f"leaf '{leaf}' is not finite even after a reset",
        where=where,
        do="mend the environment's reset",
    )
