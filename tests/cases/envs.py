"""Small troublesome environments, one for each row of CASES.md that needs one (numpy and gymnasium only).

Use them as `module:callable` with this folder on PYTHONPATH: `--env envs:Counting --env-kwargs '{"lengths": [1, 8]}'`.
Each docstring says what the environment does and what a correct engine makes of it. The environments complain by raising
`WrongUse` when the engine mistreats them, so a mistreatment is an ordinary fault that the run must report.
`flag="/some/path"` limits a fault to whichever instance first creates that file: one fault a run, not one a seat.
`python envs.py` steps every class and prints one line each.
"""

from __future__ import annotations

import multiprocessing
import os
import time

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class WrongUse(RuntimeError):
    """The engine did something to the environment that it must never do."""


def _mine(flag: str | None) -> bool:
    """True when there is no flag, or when this call is the one that created it."""
    if flag is None:
        return True
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


class Case(gym.Env):
    """Ten steps, observation all zeros, reward 1; the base of the others."""

    metadata = {"render_modes": [], "render_fps": 10}
    length = 10

    def __init__(self, render_mode: str | None = None):
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.t = 0
        self.episode = -1

    def observe(self):
        return np.zeros(4, np.float32)

    def pay(self, action):
        return 1.0

    def ends(self):
        """(terminated, truncated) after the step just taken."""
        return self.t >= self.length, False

    def info(self):
        return {}

    def begin(self):
        """Called at each reset, before the first observation."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.episode += 1
        self.begin()
        return self.observe(), self.info()

    def step(self, action):
        self.t += 1
        reward = self.pay(action)
        terminated, truncated = self.ends()
        return self.observe(), reward, terminated, truncated, self.info()


# ---------------------------------------------------------------------------------------------- faults of the simulator


class RaisesInStep(Case):
    """The `at`-th step of the instance's life raises `ValueError("simulator lost its licence")`, in one instance (`flag`) or all.

    Right with a flag: the message itself (not a TypeError from unpacking a missing result), the class and the seat reach the log;
    the instance is closed and rebuilt; every other seat keeps stepping; the broken episode ends as a marked fault, is not in the
    mean return, and its rows join no other episode's; the run's summary counts one environment fault.
    Right without a flag: after a bounded number of rebuilds the run ends, exit 1, with that message in one line.
    """

    def __init__(self, at: int = 37, flag: str | None = None, render_mode=None):
        super().__init__(render_mode)
        self.at, self.flag, self.age = at, flag, 0

    def step(self, action):
        self.age += 1
        if self.age == self.at and _mine(self.flag):
            raise ValueError("simulator lost its licence")
        return super().step(action)


class RaisesInInit(Case):
    """The constructor raises `ImportError("libsim.so.3: cannot open shared object file")`.

    Right: `train` and `attach` end within 30 s with that message in one line and exit 1 or 2; never "0 steps/s" for ever.
    """

    def __init__(self, really: bool = True, render_mode=None):
        if really:
            raise ImportError("libsim.so.3: cannot open shared object file")
        super().__init__(render_mode)


class Hangs(Case):
    """One instance (the first to create `flag`) never returns from its 50th step.

    Right: the other workers keep at least 90 % of the throughput that they had; no batch waits past its deadline; within the lease
    timeout the seats of the hung worker are taken away and the log names worker, seat and how long it has been silent; `train`
    replaces the worker (the flag exists by then, so the new one is healthy); Ctrl-C still ends everything within 10 s.
    """

    def __init__(
        self, flag: str | None = None, after: int = 50, seconds: float = 1e9, render_mode=None
    ):
        super().__init__(render_mode)
        self.flag, self.after, self.seconds, self.age = flag, after, seconds, 0

    def step(self, action):
        self.age += 1
        if self.flag is not None and self.age == self.after and _mine(self.flag):
            time.sleep(self.seconds)
        return super().step(action)


class SometimesSlow(Case):
    """A step of 2 s once in 200 steps and a reset of 3 s once in 20 episodes; otherwise free of cost.

    Right: nobody is declared dead; the round trip of the other workers keeps its p99 below the hard deadline; nothing times out.
    """

    def __init__(
        self, every: int = 200, step_s: float = 2.0, reset_s: float = 3.0, render_mode=None
    ):
        super().__init__(render_mode)
        self.every, self.step_s, self.reset_s, self.age = every, step_s, reset_s, 0

    def reset(self, *, seed=None, options=None):
        if self.episode >= 0 and self.episode % 20 == 0:
            time.sleep(self.reset_s)
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.age += 1
        if self.age % self.every == 0:
            time.sleep(self.step_s)
        return super().step(action)


def _simulate(pipe, stubborn: bool):
    while True:
        try:
            pipe.send(pipe.recv() + 1)
        except EOFError:
            if not stubborn:
                return
            time.sleep(3600)


class SpawnsChild(Case):
    """The simulator is a child process of its own; `stubborn` makes the child outlive the closing of its pipe.

    Right: it runs (a worker that is a daemonic `multiprocessing` process may have no children: AssertionError); after the run ends,
    by itself, by Ctrl-C, or by kill -9 of the supervisor or of the worker, no process started by the run is left after 10 s.
    """

    def __init__(self, stubborn: bool = False, render_mode=None):
        super().__init__(render_mode)
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.child = context.Process(target=_simulate, args=(other, stubborn))
        self.child.start()
        other.close()

    def step(self, action):
        self.pipe.send(self.t)
        if self.pipe.recv() != self.t + 1:
            raise WrongUse("the child answered another step")
        return super().step(action)

    def close(self):
        self.pipe.close()
        self.child.terminate()
        self.child.join()


class CountsThreads(Case):
    """The reward is the number of native threads in the worker's process after a matrix product.

    Right: mean reward a step at most 4 on a machine of any size (BLAS and OpenMP pools are limited to one thread in a worker).
    """

    def pay(self, action):
        a = np.ones((256, 256), np.float32)
        (a @ a).sum()
        return float(len(os.listdir("/proc/self/task")))


class ClockJumps(Case):
    """Moves the process's wall clock (`time.time`) an hour forth and back every 100 steps.

    Right: no seat is lost, no timeout fires, steps/s is unchanged, and `time_s` in metrics.jsonl only grows.
    """

    _real = staticmethod(time.time)

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.age = 0

    def step(self, action):
        self.age += 1
        if self.age % 100 == 0:
            shift = 3600.0 if (self.age // 100) % 2 else -3600.0
            time.time = lambda: self._real() + shift
        return super().step(action)

    def close(self):
        time.time = self._real


# ------------------------------------------------------------------------------------------- episodes and the arithmetic


class GhostStep(Case):
    """Seven steps of reward 1; raises `WrongUse` when stepped after the end of an episode, or before the first reset.

    Right: it never raises; mean return 7, mean length 7 exactly; the row of the reset carries reward 0 and no trained transition;
    `env_steps` grows by 7 an episode.
    """

    length = 7
    over = True

    def reset(self, *, seed=None, options=None):
        self.over = False
        return super().reset(seed=seed, options=options)

    def step(self, action):
        if self.over:
            raise WrongUse("step() after the end of the episode")
        out = super().step(action)
        self.over = out[2] or out[3]
        return out


class ConstantReward(Case):
    """Constant observation, reward 1, ten steps, ended by `end` = "truncated" or "terminated". Use gamma 0.9, no reward scaling.

    Right value of the only observation: 10.0 when truncated (a time limit is not an end), 4.14 when terminated (the mean over the
    ten steps of (1 - 0.9^k) / 0.1). Within 5 % after 30 s of training, with V-trace, PPO and R2D2 alike.
    """

    def __init__(self, end: str = "truncated", render_mode=None):
        super().__init__(render_mode)
        self.end = end

    def ends(self):
        over = self.t >= self.length
        return over and self.end == "terminated", over and self.end == "truncated"


class FirstStepJackpot(Case):
    """Three steps; the observation is the step as one-hot (the last one is index 3); only the first step pays, 100.

    Right value at index 0: 100; at indices 1 and 2: 0 (within 5), for both ends. A return that runs on into the next episode gives
    about 0.9 * 100 at index 2. With n-step returns n = 2, 5 and 10 alike.
    """

    length = 3

    def __init__(self, end: str = "terminated", render_mode=None):
        super().__init__(render_mode)
        self.end = end

    def observe(self):
        return np.eye(4, dtype=np.float32)[self.t]

    def pay(self, action):
        return 100.0 if self.t == 1 else 0.0

    def ends(self):
        over = self.t >= self.length
        return over and self.end == "terminated", over and self.end == "truncated"


class Counting(Case):
    """Observation (seat tag, episode, step); reward = step; the lengths of the episodes go round `lengths`; ends alternate.

    Right: whatever is sampled from the store, after any number of wraps of the ring, is consecutive in step within one (seat, episode),
    or has the boundary masked; the row after the newest is never the oldest; the reward beside step t is t; a final row is followed
    by no trained transition; episodes of 1 step and episodes of ten blocks both appear.
    """

    def __init__(self, lengths=(1, 7, 8, 9, 80), tag: float | None = None, render_mode=None):
        super().__init__(render_mode)
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.lengths = list(lengths)
        self.tag = float(int.from_bytes(os.urandom(2), "little")) if tag is None else tag

    def observe(self):
        return np.array([self.tag, self.episode, self.t], np.float32)

    def pay(self, action):
        return float(self.t)

    def ends(self):
        over = self.t >= self.lengths[self.episode % len(self.lengths)]
        return over and self.episode % 2 == 0, over and self.episode % 2 == 1


class OneStep(Case):
    """Episodes of one step: the observation is a one-hot of four, the right action is its index, reward 1 or 0.

    Right: greedy mean return at least 0.95 within 60 s; episodes = env_steps; recurrent policies and every replay mode included;
    the acting policy is the learnt one (policy lag stays bounded, and the acting log-probabilities follow the learner's).
    """

    length = 1

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.action_space = spaces.Discrete(4)
        self.answer = 0

    def begin(self):
        self.answer = int(self.np_random.integers(4))

    def observe(self):
        return np.eye(4, dtype=np.float32)[self.answer]

    def pay(self, action):
        return float(int(action) == self.answer)


class AllZero(Case):
    """Reward 0 always, observation 0 always: every temporal-difference error soon becomes 0.

    Right with prioritised replay: no division by zero, no NaN in weights, losses or metrics for a minute; sampling stays possible
    and close to uniform; the sum at the root of the tree equals the sum of its leaves.
    """

    def pay(self, action):
        return 0.0


class CueRecall(Case):
    """The first observation shows a cue (+1 or -1), the next six are blank, the last action must repeat the cue (1 for +1).

    Right: with a recurrent core mean return at least 0.95; with `policy.core=none` at most 0.65.
    """

    length = 7

    def begin(self):
        self.cue = int(self.np_random.integers(2))

    def observe(self):
        obs = np.zeros(4, np.float32)
        obs[0] = (2 * self.cue - 1) if self.t == 0 else 0
        obs[1] = float(self.t == self.length - 1)
        return obs

    def pay(self, action):
        return float(self.t == self.length and int(action) == self.cue)


# ----------------------------------------------------------------------------------------------------- spaces and types


class NestedSpaces(Case):
    """Dict of Tuple of Discrete, 2-D MultiDiscrete, MultiBinary, Box and image; MultiDiscrete actions [3, 5], checked by `contains`.

    Right: trains; each action is an integer array of shape (2,) inside the space; mean return at least 18 of 20 after 60 s (the right
    action is read off the two cards), so that each leaf arrives in its own place. `Blackjack-v1` (a Tuple) works too.
    """

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.observation_space = spaces.Dict(
            {
                "cards": spaces.Tuple((spaces.Discrete(3), spaces.Discrete(5))),
                "grid": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
                "flags": spaces.MultiBinary(6),
                "position": spaces.Box(-1.0, 1.0, (2,), np.float32),
                "camera": spaces.Box(0, 255, (8, 8, 3), np.uint8),
            }
        )
        self.action_space = spaces.MultiDiscrete([3, 5])
        self.cards = (0, 0)

    def observe(self):
        rng = self.np_random
        self.cards = (int(rng.integers(3)), int(rng.integers(5)))
        return {
            "cards": (np.int64(self.cards[0]), np.int64(self.cards[1])),
            "grid": np.array([[1, 2], [3, 4]], np.int64),
            "flags": rng.integers(0, 2, 6, dtype=np.int8),
            "position": rng.uniform(-1, 1, 2).astype(np.float32),
            "camera": rng.integers(0, 256, (8, 8, 3), dtype=np.uint8),
        }

    def pay(self, action):
        action = np.asarray(action)
        if not self.action_space.contains(action):
            raise WrongUse(f"action {action!r} is not in {self.action_space}")
        return float(action[0] == self.cards[0]) + float(action[1] == self.cards[1])


class ScalarSpaces(Case):
    """Observation and action are 0-dimensional boxes, `Box(shape=())`; reward -(action - observation)^2.

    Right: trains without NaN; the action arrives as a number or a 0-d array, never of shape (1,); mean reward a step above -0.05.
    """

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.observation_space = spaces.Box(-1.0, 1.0, (), np.float32)
        self.action_space = spaces.Box(-2.0, 2.0, (), np.float32)
        self.shown = np.float32(0)

    def observe(self):
        self.shown = np.float32(self.np_random.uniform(-1, 1))
        return np.array(self.shown, np.float32)

    def pay(self, action):
        if np.shape(action) != ():
            raise WrongUse(f"action of shape {np.shape(action)}, the space's is ()")
        return -float((action - self.shown) ** 2)


class UnsupportedSpaces(Case):
    """A leaf that has no fixed shape: `kind` = "text", "sequence" or "graph", inside a Dict beside an ordinary box.

    Right: refused before anything starts, exit 2, one line that names the leaf ("observation.note"), its type, and what to do
    (a wrapper that maps it to a Box). Never a pickled or padded leaf in silence.
    """

    def __init__(self, kind: str = "text", render_mode=None):
        super().__init__(render_mode)
        leaf = {
            "text": spaces.Text(16),
            "sequence": spaces.Sequence(spaces.Discrete(3)),
            "graph": spaces.Graph(spaces.Box(-1, 1, (2,)), None),
        }[kind]
        self.observation_space = spaces.Dict(
            {"plain": spaces.Box(-1.0, 1.0, (4,), np.float32), "note": leaf}
        )
        self.note = leaf

    def observe(self):
        return {"plain": np.zeros(4, np.float32), "note": self.note.sample()}


class TightBox(Case):
    """Actions in Box([0, -2], [230, 0]), checked on each step; the target is (200, -1.5); reward 1 - mean(|error| / range).

    Right: it never raises, in training, random warm-up or evaluation; after 60 s mean reward a step at least 0.9, so the policy can
    reach the far end of an asymmetric range (scaled or squashed, not only clipped around 0).
    """

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.low, self.high = np.array([0, -2], np.float32), np.array([230, 0], np.float32)
        self.action_space = spaces.Box(self.low, self.high, dtype=np.float32)

    def pay(self, action):
        action = np.asarray(action)
        if action.shape != (2,) or not np.all((action >= self.low) & (action <= self.high)):
            raise WrongUse(f"action {action!r} is outside {self.action_space}")
        return float(1 - np.mean(np.abs(action - [200, -1.5]) / (self.high - self.low)))


class ShapeChanges(Case):
    """Declares observations of shape (4,); from its 20th step on returns shape (5,). With `per_instance`, every second instance in a
    process declares and returns (6,) instead.

    Right: an error that names the leaf, the declared and the returned shape and the seat; no byte lands in a neighbour's slot; with
    `per_instance` the worker is refused at the handshake, with both specifications in the message.
    """

    made = 0

    def __init__(self, per_instance: bool = False, at: int = 20, render_mode=None):
        super().__init__(render_mode)
        self.width = 6 if per_instance and ShapeChanges.made % 2 else 4
        self.observation_space = spaces.Box(-1.0, 1.0, (self.width,), np.float32)
        self.at, self.per_instance, self.age = at, per_instance, 0
        ShapeChanges.made += 1

    def step(self, action):
        self.age += 1
        return super().step(action)

    def observe(self):
        return np.zeros(
            5 if self.age >= self.at and not self.per_instance else self.width, np.float32
        )


class RewardTypes(Case):
    """The reward 1 as `kind`: "python", "int", "bool", "float64", "zero_d", "one_element" (shape (1,)) or "two_elements".

    Right: mean return 10 exactly for all kinds but the last, also across a reset row (whose reward is a plain 0); "two_elements" is
    refused with its shape in the message. No broadcasting anywhere: 32 seats give 32 rewards.
    """

    def __init__(self, kind: str = "one_element", render_mode=None):
        super().__init__(render_mode)
        self.reward = {
            "python": 1.0,
            "int": 1,
            "bool": np.bool_(True),
            "float64": np.float64(1),
            "zero_d": np.array(1.0),
            "one_element": np.array([1.0]),
            "two_elements": np.array([1.0, 1.0]),
        }[kind]

    def pay(self, action):
        return self.reward


class NotFinite(Case):
    """Once (`flag`) or every 500 steps, the reward or one component of the observation (`where`) is `value`: "nan" or "inf".

    Right: the parameters and the recurrent state of every other seat stay finite; the bad row's episode is dropped and counted; the
    log names seat, leaf, episode and step once, not once a row; a policy that was already good stays good.
    """

    def __init__(
        self,
        where: str = "reward",
        value: str = "nan",
        at: int = 500,
        flag: str | None = None,
        render_mode=None,
    ):
        super().__init__(render_mode)
        self.where, self.value, self.at, self.flag, self.age = where, float(value), at, flag, 0

    def step(self, action):
        self.age += 1
        obs, reward, terminated, truncated, info = super().step(action)
        if self.age % self.at == 0 and _mine(self.flag):
            if self.where == "reward":
                reward = self.value
            else:
                obs = obs.copy()
                obs[2] = self.value
        return obs, reward, terminated, truncated, info


class MaskedActions(Case):
    """Six actions of which one to three are legal on each row; the mask (int8) is in the observation ("action_mask") or in the info.

    Right: no illegal action ever, in acting, random warm-up, epsilon-greedy, greedy and sampled evaluation; entropy and log-probability
    are those of the masked distribution, finite even when one action is legal (entropy 0, log-probability 0); the learner masks with
    the row's own mask, not the next one's.
    """

    def __init__(self, where: str = "observation", render_mode=None):
        super().__init__(render_mode)
        self.action_space = spaces.Discrete(6)
        self.where = where
        if where == "observation":
            self.observation_space = spaces.Dict(
                {"observation": self.observation_space, "action_mask": spaces.MultiBinary(6)}
            )
        self.mask = np.ones(6, np.int8)

    def observe(self):
        self.mask = np.zeros(6, np.int8)
        self.mask[self.np_random.choice(6, int(self.np_random.integers(1, 4)), replace=False)] = 1
        plain = super().observe()
        return (
            {"observation": plain, "action_mask": self.mask.copy()}
            if self.where == "observation"
            else plain
        )

    def info(self):
        return {"action_mask": self.mask.copy()} if self.where == "info" else {}

    def pay(self, action):
        # self.mask still is the mask of the row that the action answers: observe() comes after pay()
        if not self.mask[int(action)]:
            raise WrongUse(f"action {int(action)} is masked by {self.mask}")
        return 1.0


class FlippedViews(Case):
    """Images as views: mirrored (negative strides), transposed, and reversed along an axis of length 1 (a stride that
    `ascontiguousarray` leaves negative); `inplace` returns the same array each time and overwrites it on the next step.

    Right: the stored pixel (row, column) of step t is (10 * row + column + t) mod 256 for each, no copy error, no later step's values.
    """

    def __init__(self, kind: str = "mirrored", render_mode=None):
        super().__init__(render_mode)
        self.kind = kind
        self.observation_space = spaces.Box(0, 255, (1, 8, 8), np.uint8)
        self.base = (10 * np.arange(8)[:, None] + np.arange(8)[None, :]).astype(np.uint8)
        self.held = np.zeros((1, 8, 8), np.uint8)

    def observe(self):
        picture = (self.base + np.uint8(self.t)).reshape(1, 8, 8)
        if self.kind == "mirrored":
            return np.ascontiguousarray(picture[:, :, ::-1])[:, :, ::-1]
        if self.kind == "transposed":
            return np.ascontiguousarray(picture.transpose(0, 2, 1)).transpose(0, 2, 1)
        if self.kind == "unit_axis":
            return picture[::-1]
        self.held[...] = picture
        return self.held


class TwoImages(Case):
    """The same 16x16 pictures as uint8 0..255 or float32 0..1 (`kind`); the action names the bright half, reward 1 or 0, one step.

    Right: both kinds reach a greedy mean return of 0.95 in the same number of steps (within a factor of 1.5): each is scaled once, to
    the same range, on the device; the stored leaf keeps its own dtype. Twice scaled, uint8 shows only 0..0.004 and does not learn.
    """

    length = 1

    def __init__(self, kind: str = "uint8", render_mode=None):
        super().__init__(render_mode)
        self.kind = kind
        self.observation_space = (
            spaces.Box(0, 255, (1, 16, 16), np.uint8)
            if kind == "uint8"
            else spaces.Box(0.0, 1.0, (1, 16, 16), np.float32)
        )
        self.bright = 0

    def observe(self):
        self.bright = int(self.np_random.integers(2))
        picture = self.np_random.integers(0, 100, (1, 16, 16))
        picture[:, :, 8 * self.bright : 8 * self.bright + 8] += 120
        return (
            picture.astype(np.uint8) if self.kind == "uint8" else (picture / 255).astype(np.float32)
        )

    def pay(self, action):
        return float(int(action) == self.bright)


# -------------------------------------------------------------------------------------- seeds, metrics, evaluation, files


class SeedEcho(Case):
    """The observation is four numbers drawn at the reset from the environment's own generator; `log=FOLDER` appends each to a file.

    Right, read from the logs: two runs with `--seed 7` give the same set of first observations; `--seed 8` shares none of them; no two
    seats share one, whatever the number of workers; and no seat repeats an observation in its later episodes (the seed goes to the
    first reset only).
    """

    length = 3
    made = 0

    def __init__(self, log: str | None = None, render_mode=None):
        super().__init__(render_mode)
        self.path = None if log is None else os.path.join(log, f"{os.getpid()}-{SeedEcho.made}.txt")
        SeedEcho.made += 1

    def begin(self):
        self.drawn = self.np_random.uniform(-1, 1, 4).astype(np.float32)
        if self.path is not None:
            with open(self.path, "a") as file:
                print(*(f"{x:.6f}" for x in self.drawn), file=file)

    def observe(self):
        return self.drawn.copy()


class RawReturn(Case):
    """Rewards 10, -3, 1 repeated three times (24 in all), nine steps; a life is lost every three steps (`info["lives"]`).

    Right, with reward clipping to 1 and life-loss handling switched on or off: the reported and evaluated mean return is 24 exactly and
    the mean length 9 exactly: what the environment paid, not what the learner was shown; one episode, not three.
    """

    length = 9

    def pay(self, action):
        return (10.0, -3.0, 1.0)[(self.t - 1) % 3]

    def info(self):
        return {"lives": 3 - self.t // 3}


class SameAnswer(Case):
    """Shows observation A on every even step and B on every odd one; pays 1 when the action equals the first action that this instance
    ever got for that observation, else 0.

    Right: greedy evaluation of any feed-forward checkpoint, however little trained, has mean return = min return = 10; sampled
    evaluation of an untrained one has less. So greedy means greedy: no sampling, no epsilon, no dropout, no training-mode layer.
    """

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.given = {}

    def observe(self):
        return np.full(4, 1.0 if self.t % 2 else -1.0, np.float32)

    def pay(self, action):
        return float(self.given.setdefault((self.t - 1) % 2, int(action)) == int(action))


class Renders(Case):
    """Five steps; `render()` gives a 64x64 picture whose grey level is 40 * step; raises `WrongUse` when rendered without a render mode.

    Right: `eval --episodes 2 --video DIR` writes two films of six frames each: the first frame is the reset's (level 0), the last is the
    final observation's (level 200), none of the next episode; without `--video` render() is never called; a missing encoder is named
    with the package that brings it, before the first episode is played.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    length = 5

    def render(self):
        if self.render_mode != "rgb_array":
            raise WrongUse("render() without a render mode")
        return np.full((64, 64, 3), 40 * self.t, np.uint8)


class FatInfos(Case):
    """Each info carries 100 keys never used before and a 10 kB array.

    Right: the memory of each process is flat over five minutes (slope below 1 MB an hour after warm-up); no metric is made of unknown
    keys; the throughput is that of the environment alone.
    """

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.age = 0

    def info(self):
        self.age += 1
        return {"array": np.zeros(2500, np.float32)} | {
            f"key-{self.age}-{i}": i for i in range(100)
        }


gym.register(
    id="CasesRegistered-v0", entry_point=f"{__name__}:Case"
)  # reached as `--env envs:CasesRegistered-v0`

CASES = [
    c
    for c in list(globals().values())
    if isinstance(c, type) and issubclass(c, Case) and c is not Case
]


def _selfcheck():
    safe = {
        "RaisesInInit": {"really": False},
        "SometimesSlow": {"step_s": 0.0, "reset_s": 0.0},
        "RaisesInStep": {"at": 10**9},
        "ShapeChanges": {"at": 10**9},
    }
    variants = {
        "RewardTypes": [
            {"kind": k}
            for k in ("python", "int", "bool", "float64", "zero_d", "one_element", "two_elements")
        ],
        "ConstantReward": [{"end": e} for e in ("truncated", "terminated")],
        "FlippedViews": [{"kind": k} for k in ("mirrored", "transposed", "unit_axis", "inplace")],
        "TwoImages": [{"kind": k} for k in ("uint8", "float32")],
        "UnsupportedSpaces": [{"kind": k} for k in ("text", "sequence", "graph")],
        "MaskedActions": [{"where": w} for w in ("observation", "info")],
        "ShapeChanges": [{"at": 10**9}, {"per_instance": True}, {"per_instance": True}],
        "NotFinite": [
            {"where": w, "value": v, "at": 10**9}
            for w in ("reward", "observation")
            for v in ("nan", "inf")
        ],
        "SpawnsChild": [{"stubborn": False}],
    }
    for case in CASES:
        for kwargs in variants.get(case.__name__, [safe.get(case.__name__, {})]):
            mode = "rgb_array" if "rgb_array" in case.metadata["render_modes"] else None
            env = case(render_mode=mode, **kwargs)
            obs, info = env.reset(seed=1)
            returns, total = [], 0.0
            for _ in range(60):
                assert env.observation_space.contains(obs), (case, obs)
                mask = obs.get("action_mask") if isinstance(obs, dict) else info.get("action_mask")
                action = (
                    env.action_space.sample(mask) if mask is not None else env.action_space.sample()
                )
                obs, reward, terminated, truncated, info = env.step(action)
                total += float(np.sum(reward))
                if mode:
                    env.render()
                if terminated or truncated:
                    returns.append(total)
                    total = 0.0
                    obs, info = env.reset()
            env.close()
            print(
                f"{case.__name__:18s} {kwargs!s:48s} episodes {len(returns):3d} mean return {np.mean(returns or [np.nan]):8.3f}"
            )
    env = gym.make("CasesRegistered-v0")
    env.reset(seed=1)
    env.step(0)
    print("CasesRegistered-v0 made and stepped")


if __name__ == "__main__":
    _selfcheck()
