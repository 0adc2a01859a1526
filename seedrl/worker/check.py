"""The trial of an environment before its first real step: what is wrong is refused by name, what is suspect is said once.

It plays some random steps with a seed of its own. The environment's first real reset, with its first seed, comes afterwards.
Evaluation seats are not tried: an environment may remember what was done to it.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from seedrl.errors import EnvError, SpecError
from seedrl.spec import EnvSpec, flatteners, leaf_spaces, unflatten, unflatten_action
from seedrl.transport.slab import own_rows
from seedrl.worker.envs import class_name, env_error, is_vector, single_spaces, spec_of
from seedrl.worker.group import not_next_step, require_next_step
from seedrl.worker.seam import PLAIN, Seam, as_reward

LEVELS = ("strict", "warn", "off")


def require_same_spec(env: Any, spec: EnvSpec, where: str) -> None:
    """SpecError, with both specs leaf by leaf, when an instance's own spaces are not those of `spec`."""
    difference = spec_of(env, spec.env_id, spec.action_mask, spec.stats).difference(spec)
    if difference:
        raise SpecError(
            what="this instance of the environment has other spaces than the run: "
            + "; ".join(difference),
            where=f"{where}, {class_name(env)}",
            do="declare the same spaces in every instance",
        )


def check_env(
    env: Any,
    spec: EnvSpec,
    seed: int,
    steps: int = 8,
    budget_s: float = 10.0,
    level: str = "strict",
    *,
    on_nan: str = "error",
    where: str = "worker",
) -> list[str]:
    """Plays `steps` random steps and looks at everything that comes back.

    Args:
        env: a gymnasium.Env or VectorEnv, reset afterwards by the caller. spec: what it must fit.
        seed: of this trial alone. budget_s: the trial is cut short after it, and says so.
        level: "strict" raises what is wrong; "warn" gives it back as a warning; "off" does nothing.
        on_nan: with "drop_episode" a number that is not finite is a warning.
    Returns: what is suspect, one line each.
    Raises: SpecError or EnvError, naming leaf and seat.
    """
    if level == "off":
        return []
    trial = _Trial(env, spec, seed, where, on_nan)
    try:
        trial.run(steps, time.monotonic() + budget_s)
    except (SpecError, EnvError) as error:
        if level == "strict":
            raise
        trial.warn(error.what)
    return trial.warnings


class _Trial:
    """One trial. A single environment is looked at as a batch of one."""

    def __init__(self, env: Any, spec: EnvSpec, seed: int, where: str, on_nan: str) -> None:
        self.env, self.spec, self.seed, self.on_nan = env, spec, seed, on_nan
        self.where = f"{where}, {class_name(env)}"
        self.warnings: list[str] = []
        self.vector = is_vector(env)
        self.size = int(env.num_envs) if self.vector else 1
        observation_space, self.action_space = single_spaces(env)
        self.view = own_rows(spec, [self.size])[0]
        self.seam = Seam(spec, observation_space, self.view, self.where)
        self.getters = flatteners(observation_space)
        self.boxes = [
            (leaf, inner.low, inner.high)
            for leaf, (_, _, inner) in zip(
                spec.observation, leaf_spaces(observation_space, "observation"), strict=True
            )
            if leaf.kind == "box"
        ]
        self.action_getters = flatteners(self.action_space)
        self.to_action = unflatten_action(self.action_space)
        self.rng = np.random.default_rng(seed)
        self.over = [False] * self.size
        self.age = [0] * self.size
        self.moved = False  # some observation differed from the one before
        self.held: list[Any] = []  # the arrays of the row before, as the environment returned them
        self.held_values: list[np.ndarray] = []

    def warn(self, line: str) -> None:
        if line not in self.warnings:
            self.warnings.append(line)

    def run(self, steps: int, deadline_s: float) -> None:
        """Resets, then steps; a single environment is reset again after the end of an episode."""
        if self.vector:
            require_next_step(self.env, self.where)
        self.action_space.seed(self.seed)
        self._observe(*self._reset(self.seed))
        for step in range(steps):
            if time.monotonic() > deadline_s:
                self.warn(
                    f"the trial was cut short after {step} of {steps} steps: the environment is slow"
                )
                return
            if self.over[0] and not self.vector:
                self.over, self.age = [False], [0]
                self._observe(*self._reset(None))
            else:
                self._step()
        if steps > 1 and not self.moved:
            self.warn(f"the observation did not change in {steps} random steps")

    def _call(self, name: str, count: int, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        try:
            out = getattr(self.env, name)(*args, **kwargs)
        except (Exception, SystemExit) as error:
            raise env_error(error, f"{self.where}, {name} in the trial") from error
        if not isinstance(out, tuple) or len(out) != count:
            got = f"{len(out)} values" if isinstance(out, tuple) else f"a {type(out).__name__}"
            raise EnvError(
                what=f"{name}() returned {got}; Gymnasium's returns {count}",
                where=self.where,
                do="wrap the environment to Gymnasium's present interface",
            )
        return out

    def _reset(self, seed: int | None) -> tuple[Any, ...]:
        return self._call("reset", 2, seed=seed)

    def _step(self) -> None:
        columns = [self._random_action(seat) for seat in range(self.size)]
        if self.vector:
            stacked = [np.stack(leaves) for leaves in zip(*columns, strict=True)]
            action: Any = unflatten(self.action_space, stacked)
        else:
            action = self.to_action(columns[0])
        obs, reward, terminated, truncated, info = self._call("step", 5, action)
        rewards = self._per_seat(reward, "reward") if self.vector else [reward]
        ends = [
            self._per_seat(value, name) if self.vector else [value]
            for name, value in (("terminated", terminated), ("truncated", truncated))
        ]
        after_end = self.over
        self.over = [self._ended(t, c) for t, c in zip(*ends, strict=True)]
        for seat in range(self.size):
            value = self._reward(rewards[seat])
            if self.vector and after_end[seat]:
                if value != 0 or self.over[seat]:
                    raise not_next_step(self.where)
                self.age[seat] = 0
                continue
            self.age[seat] += 1
        self._final_observation(info)
        if not self.vector:
            self._time_limit(bool(terminated), bool(truncated), info)
        self._observe(obs, info)

    def _random_action(self, seat: int) -> list[np.ndarray]:
        """Leaf values of a random action, legal under the seat's mask."""
        sample = self.action_space.sample()
        leaves = [np.asarray(get(sample)) for get in self.action_getters]
        if not self.spec.mask_size:
            return leaves
        segments = iter(self.spec.mask_segments)
        for index, leaf in enumerate(self.spec.action):
            if leaf.num_logits:
                chosen = []
                for start in leaf.start:
                    begin, stop = next(segments)
                    assert self.view.mask is not None
                    legal = np.flatnonzero(self.view.mask[seat, begin:stop])
                    chosen.append(start + int(self.rng.choice(legal)))
                leaves[index] = np.array(chosen, leaf.dtype).reshape(leaf.shape)
        return leaves

    def _per_seat(self, values: Any, name: str) -> list[Any]:
        array = np.asarray(values)
        if array.shape != (self.size,):
            raise EnvError(
                what=f"the {name} of the batch has shape {list(array.shape)}, not [{self.size}]",
                where=self.where,
                do=f"return a {name} a seat",
            )
        return list(array.tolist())

    def _reward(self, reward: Any) -> float:
        value = as_reward(reward, lambda: self.where)
        if isinstance(reward, np.ndarray):
            self.warn(
                f"the reward is a {reward.dtype} array of shape {reward.shape}; taken as a number"
            )
        elif isinstance(reward, np.float64) or reward.__class__ not in PLAIN:
            self.warn(f"the reward is a numpy {type(reward).__name__}; stored as float32")
        if not np.isfinite(value):
            self._not_finite(f"the reward is {value}")
        return value

    def _ended(self, terminated: Any, truncated: Any) -> bool:
        for name, value in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(value, bool | np.bool_):
                self.warn(f"'{name}' is a {type(value).__name__}, not a bool")
        return bool(terminated) or bool(truncated)

    def _not_finite(self, what: str) -> None:
        if self.on_nan == "error":
            raise EnvError(
                what=what,
                where=self.where,
                do="mend the environment, or set env.on_nan=drop_episode to drop such episodes",
            )
        self.warn(what)

    def _time_limit(self, terminated: bool, truncated: bool, info: Any) -> None:
        """A time limit told as a termination would be trained as an end of the world."""
        if not terminated or truncated:
            return
        limit = getattr(getattr(self.env, "spec", None), "max_episode_steps", None)
        if isinstance(info, dict) and info.get("TimeLimit.truncated"):
            self.warn(
                "the info says TimeLimit.truncated, the step says terminated; it counts as terminated"
            )
        elif limit is not None and self.age[0] >= limit:
            self.warn(
                f"the episode terminated at its time limit of {limit} steps; a time limit is `truncated`"
            )

    def _final_observation(self, infos: Any) -> None:
        """Under next-step autoreset the final observation is the row itself, never an info."""
        if self.vector and any(self.over) and isinstance(infos, dict):
            for key in ("final_obs", "final_observation"):
                if key in infos:
                    raise not_next_step(f"{self.where}: infos['{key}'] is there")

    def _observe(self, obs: Any, info: Any) -> None:
        """Checks one observation: types, then finite, then inside its space; and what became of the arrays of the one before."""
        self._look_for_reuse(obs)
        if self.vector:
            self.seam.write_batch(obs)
        else:
            self.seam.write(0, obs)
        if not self.seam.finite():
            seat, name = self.seam.not_finite()[0]
            self._not_finite(f"leaf '{name}' of seat {seat} holds a number that is not finite")
        self.seam.check_ranges()
        if self.seam.mask_in_info:
            if self.vector:
                self.seam.write_batch_info_mask(info)
            else:
                self.seam.write_info_mask(0, info)
        self.seam.finish_masks(self.over)
        for leaf, low, high in self.boxes:
            column = self.view.obs[leaf.name]
            with np.errstate(invalid="ignore"):
                outside = (column < low) | (column > high)
            if outside.any():
                raise SpecError(
                    what=f"leaf '{leaf.name}' holds {column[outside][0]:g}, outside its space {leaf.text_in_full()}",
                    where=self.where,
                    do="declare the range that the environment has, or clip; env.check=warn lets it pass",
                )
        values = [self.view.obs[leaf.name].copy() for leaf in self.spec.observation]
        if self.held_values and any(
            not np.array_equal(a, b) for a, b in zip(values, self.held_values, strict=True)
        ):
            self.moved = True
        self.held_values = values

    def _look_for_reuse(self, obs: Any) -> None:
        """Says once when an array that was returned before is returned again with other contents."""
        try:
            arrays = [get(obs) for get in self.getters]
        except (KeyError, IndexError, TypeError):
            return  # said by the seam
        for leaf, now, before, value in zip(
            self.spec.observation, arrays, self.held, self.held_values, strict=False
        ):
            if (
                now is before
                and isinstance(now, np.ndarray)
                and not np.array_equal(now, value.reshape(now.shape))
            ):
                self.warn(
                    f"leaf '{leaf.name}' is the same array at each step, changed in place; it is copied"
                )
        self.held = arrays
