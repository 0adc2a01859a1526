"""The closed configuration: every field with its unit, range and the reason for its default, in one place.

`load_config` reads a YAML file and `key=value` arguments. What is misspelt, of the wrong type or impossible is refused
with the file's line and the nearest right spelling; `help_config` and `dump_yaml` are made from the same fields.
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic.functional_validators import AfterValidator

from seedrl.config_checks import ALGORITHMS, Q_LEARNING, contradictions
from seedrl.config_words import DEVICE_PATTERN, choices, is_mapping, item_type, takes
from seedrl.config_yaml import Node, nearest, parse, parse_inline, to_text, value_of
from seedrl.errors import ConfigError

COMMAND_LINE = "command line"
DEFAULT_SERVED_SLOTS = 256  # of batching.max_slots
_SUFFIXES = (".yaml", ".yml")
_HERE = Path(__file__).resolve().parent


def _plain(value: Any) -> Any:
    """`value` if YAML and msgpack can carry it and give it back equal; ValueError otherwise."""
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("keys must be text")
        for item in value.values():
            _plain(item)
    elif isinstance(value, list):
        for item in value:
            _plain(item)
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise ValueError(
            f"{type(value).__name__} is neither text, number, true, false, null, list nor mapping"
        )
    return value


def _algorithm_name(name: str) -> str:
    if name not in ALGORITHMS and ":" not in name:
        raise ValueError(f"there is no algorithm '{name}'; known: {', '.join(ALGORITHMS)}; your own is module:callable")  # fmt: skip
    return name


Kwargs = Annotated[dict[str, Any], AfterValidator(_plain)]
AlgorithmName = Annotated[str, AfterValidator(_algorithm_name)]
Units = Annotated[int, Field(ge=1, le=65_536)]


class Section(BaseModel):
    """A part of the configuration that admits no unknown key, no value of another type and no NaN."""

    model_config = ConfigDict(
        extra="forbid", strict=True, validate_assignment=True, populate_by_name=True, allow_inf_nan=False,
        ser_json_inf_nan="constants",
    )  # fmt: skip


# A table: a field, and below it what it is.
# fmt: off


class Env(Section):
    """The environment, and what happens when it breaks its word."""

    id: str = Field("CartPole-v1", min_length=1, description=
        "A Gymnasium id, `module:callable`, or `package:id` where importing the package registers the id. CartPole "
        "needs nothing installed.")
    kwargs: Kwargs = Field(default_factory=dict, description=
        "Keywords of the environment's constructor. None, as most have defaults of their own.")
    check: Literal["strict", "warn", "off"] = Field("strict", description=
        "What a trial before the first real step does with a finding. strict, as a broken environment costs hours "
        "later.")
    check_steps: int = Field(8, ge=0, le=10_000, description=
        "Random steps of that trial for each environment; 0 tries none. 8 cost milliseconds and find most faults of "
        "dtype, shape and reward.")
    on_nan: Literal["error", "drop_episode"] = Field("error", description=
        "What a number that is not finite does: it ends the run, or the episode. error, so that no fault goes unseen.")
    action_mask: str | None = Field(None, min_length=1, description=
        "Where legal actions stand: `info` for info['action_mask'], or the name of an observation leaf. null finds "
        "info['action_mask'] by itself.")
    stats: list[str] = Field(default_factory=list, max_length=64, description=
        "Keys of info whose numbers go into the metrics at an episode's end. None, as each costs a column.")
    max_rebuilds: int = Field(3, ge=0, le=1_000_000, description=
        "Environments that a worker may make anew within rebuild_window_s before the run fails. A few, for rare "
        "crashes; not a loop of them.")
    rebuild_window_s: float = Field(60.0, gt=0, le=86_400, description=
        "Seconds over which max_rebuilds counts. A minute tells a rare crash from a steady one.")
    frame_stack: int = Field(1, ge=1, le=64, description=
        "Observations that the policy sees at once: the newest and those before it, along a new first dimension. The environment sends single ones, and replay "
        "keeps each once; leave out a wrapper that stacks. 1; 4 for Atari.")
    reward_scale: float = Field(1.0, gt=0, le=1e9, description=
        "The learner multiplies rewards by this, before reward_clip; metrics show them as they are. 1, as it changes what a value means; 0.1 or less "
        "where returns are in the thousands.")
    reward_clip: float | None = Field(None, gt=0, description=
        "The learner clips rewards to [-this, this]; metrics show them as they are. null, as clipping changes what is "
        "optimised.")


class Workers(Section):
    """The processes that step environments."""

    num: int = Field(2, ge=1, le=1024, description=
        "Worker processes. 2 fit on a small machine; about one for each core left by engine and learner is a good "
        "start.")
    envs_per_worker: int = Field(16, ge=1, le=4096, description=
        "Environments of each worker. 16 make batches worth a forward pass.")
    groups: int = Field(2, ge=1, le=64, description=
        "Parts into which a worker's environments fall; one is stepped while another waits for actions. 2 hide that "
        "wait; 1 saves wake-ups.")
    lease_s: float = Field(120.0, ge=1, le=86_400, description=
        "Seconds without a step after which a worker's seats are given back, and a worker of the run's own is started anew; more "
        "than the slowest step or reset. 120 outlasts most simulators.")


class Batching(Section):
    """When a batch of ready environments is answered."""

    max_batch: int | None = Field(None, ge=1, le=65_536, description=
        "Most rows of one batch; at least a group of a worker. null takes all that are ready.")
    min_batch: int = Field(1, ge=1, le=65_536, description=
        "Rows below which a batch waits for hard_deadline_us instead of max_wait_us. 1, as waiting seldom pays on a "
        "small machine.")
    max_wait_us: int = Field(0, ge=0, le=10_000_000, description="Longest in microseconds that a ready row waits for company. 0: what comes in while a batch runs makes the next one, and two groups of a worker stay out of step.")
    hard_deadline_us: int = Field(20_000, ge=1, le=60_000_000, description=
        "Microseconds after which even a batch below min_batch is answered. 20 ms keeps one slow worker from stopping "
        "the others.")
    buckets: list[int] = Field(default_factory=list, max_length=64, description=
        "Sizes in rows, rising, to which batches on a GPU are padded, each with a graph of its own; nothing is padded on the CPU. []: all slots, halves of "
        "that, down to 8.")
    max_slots: int | None = Field(None, ge=1, le=65_536, description=
        "Seats in all. null: what the run itself fills with train, 256 with serve.")


class PolicySection(Section):
    """The network that acts and learns."""

    name: str = Field("default", min_length=1, description=
        "A registered policy, or `module:callable` of your own. default: encoder, core, policy head and value head.")
    encoder: Literal["auto", "mlp", "nature", "impala", "nested"] = Field("auto", description=
        "The network before the core. auto decides by the observation's leaves: mlp for vectors, a CNN for images, "
        "nested for several.")
    hidden: list[Units] = Field(default_factory=lambda: [64, 64], max_length=16, description=
        "Units of each layer of the MLP; the last is also the width behind a small CNN. Two of 64 suit control tasks.")
    activation: Literal["tanh", "relu", "elu", "gelu", "silu"] = Field("tanh", description=
        "Between the layers of the MLP. tanh is the steadiest with small networks.")
    core: Literal["none", "lstm", "gru"] = Field("none", description=
        "Recurrent part, for tasks that need memory. none, as it costs speed.")
    core_size: int = Field(128, ge=1, le=16_384, description="Units of the core. 128 remember short episodes.")
    separate_value: bool = Field(False, description=
        "The value has an encoder of its own, and no part in the policy's. false, as one is quicker; true learns from fewer steps where "
        "returns are large, mostly with ppo.")
    action_distribution: Literal["squashed", "clipped"] = Field("squashed", description=
        "How a Gaussian sample enters a bounded box: tanh, or clipping. squashed, as it is smooth at the bounds.")
    normalise_observations: bool = Field(False, description=
        "Boxes of floats are brought to mean 0 and deviation 1, by all that the learner has seen, and cut at 10 deviations. false, as it pays only where "
        "entries differ in scale.")
    kwargs: Kwargs = Field(default_factory=dict, description="Keywords for a policy of your own. None.")


class Engine(Section):
    """The process that answers environments."""

    device: str = Field("cpu", pattern=DEVICE_PATTERN, description=
        "Where the policy acts: cpu, cuda or cuda:N. cpu, which every machine has.")
    threads: int = Field(1, ge=1, le=1024, description=
        "Torch's threads. 1, as small networks lose more to their handover than they gain.")
    precision: Literal["float32", "bfloat16", "float16"] = Field("float32", description=
        "Of the forward pass in acting; log-probabilities are recorded as they were computed, so that V-trace corrects for what the learner computes "
        "otherwise. float32; bfloat16 pays on a GPU, and on a CPU that has instructions for it (avx512_bf16, amx_bf16); float16 has finer steps and "
        "ends at 65504.")
    graphs: bool = Field(True, description=
        "Whether a GPU runs the step as a CUDA graph, which costs the host one launch a batch. true; false for a policy that looks at its numbers in forward.")
    compile: bool = Field(False, description=
        "Whether torch.compile compiles the policy for acting. false: it takes a minute at the start, and wants a C++ compiler on the CPU; true for large networks.")
    slow_batch_ms: float | None = Field(1000.0, gt=0, le=3_600_000, description=
        "Milliseconds beyond which a batch is said with its stages, the worst one every ten seconds. null: never.")


class Replay(Section):
    """Where rows wait for the learner."""

    mode: Literal["queue", "uniform", "prioritized", "recent"] = Field("queue", description=
        "Which unrolls come next. queue: each once, oldest first, as V-trace and PPO want. The others keep rows until newer ones need the "
        "room: uniform, prioritized (by what the learner made of them last), recent (the newest first).")
    capacity: int | None = Field(None, ge=1, le=1 << 40, description=
        "Rows that are kept. null: with queue, the fewest that never stop the run, and one more batch; the others want a number.")
    min_fill: int | None = Field(None, ge=1, le=1 << 40, description=
        "Rows before which nothing is learnt; not with queue. null: one unroll. Some thousands keep the first updates from a few episodes.")
    samples_per_insert: float | None = Field(None, gt=0, le=1_000_000, description=
        "How often each unroll is drawn, on average: whoever is ahead waits; not with queue, which is 1. null: as fast as each can.")
    ratio_tolerance: float | None = Field(None, ge=0, le=1e12, description=
        "Draws by which samples_per_insert may be off, either way. null: twice the fewest with which nobody waits for ever.")
    max_uses: int | None = Field(None, ge=1, le=1_000_000, description=
        "Draws of an unroll, after which it is gone; not with queue. null: 1 with recent, any number with the others.")
    remover: Literal["oldest", "oldest_version", "lowest_priority"] = Field("oldest", description=
        "What makes room for new rows; not with queue. oldest: the block that was filled longest ago; oldest_version: the one that the oldest policy began, where some "
        "environments are much slower than others; lowest_priority, with prioritized: the one whose unrolls matter least, so that the others stay for up to four times as long.")
    initial_priority: Literal["largest", "acting"] = Field("largest", description=
        "prioritized: what new unrolls have. largest: the largest so far, so that each is drawn soon; acting: by the values of the policy that "
        "acted, as in Ape-X, which costs two columns.")
    priority_exponent: float = Field(0.6, ge=0, le=10, description=
        "prioritized: priorities are raised to this; 0 draws uniformly. 0.6 as in Prioritized Experience Replay; R2D2 takes 0.9.")
    priority_exponent_end: float | None = Field(None, ge=0, le=10, description=
        "prioritized: to what priority_exponent goes evenly, by the run's end. null: it stays.")
    importance_exponent: float = Field(0.4, ge=0, le=1, description=
        "prioritized: how far weights correct for uneven draws; 1 in full. 0.4 as in the paper; R2D2 takes 0.6.")
    importance_exponent_end: float | None = Field(None, ge=0, le=1, description=
        "prioritized: to what importance_exponent goes evenly, by the run's end; 1 in the first paper. null: it stays, as in Ape-X and R2D2.")
    weights_over: Literal["batch", "store"] = Field("batch", description=
        "prioritized: whose largest weight is 1. batch, as is usual; store makes weights of different batches comparable.")
    checkpoint: bool = Field(True, description=
        "Whether rows that are kept are written beside the checkpoints, and read by --resume; not with queue. true: a restart goes on with them; "
        "false where they are many and quickly made anew.")
    cross_episodes: bool = Field(True, description=
        "Whether an unroll goes on behind an episode's end, with the next one's rows. true wastes no row; false learns from none of them.")
    block_length: int | None = Field(None, ge=1, le=65_536, description=
        "Rows of a block. null: with queue the greatest common divisor of unroll_length, burn_in and stride, so the fewest blocks; with the "
        "others at least 16.")
    device: str | None = Field(None, pattern=DEVICE_PATTERN, description=
        "Where rows lie: engine.device, or cpu where a GPU's memory is too small. null: engine.device, as rows are born there.")
    host_gib: float = Field(0.0, ge=0, le=1e6, description=
        "GiB of the host's memory for rows that have left replay.device; not with queue. 0: none. What is there is drawn as well, and fetched while the "
        "learner works on the batch before.")
    file_gib: float = Field(0.0, ge=0, le=1e6, description=
        "GiB of a file for rows that have left host_gib, in the run directory; it has no name and goes with the run. 0: none.")
    compress: bool = Field(False, description=
        "Whether rows of these two are compressed by LZ4, leaf by leaf, where a trial makes them 1.3 times smaller. false, as it needs seedrl[lz4]; true for frames.")
    max_lag: int | None = Field(None, ge=1, le=1_000_000, description=
        "Nothing is learnt from more updates late than this: with queue acting stops in time, with the others older unrolls are dropped. "
        "null: unbounded, as V-trace corrects for lag; 1 when run.deterministic, with queue.")

    @property
    def bytes_behind(self) -> tuple[int, int]:
        """Of the host's memory, and of a file."""
        return int(self.host_gib * (1 << 30)), int(self.file_gib * (1 << 30))

    @property
    def max_uses_or_default(self) -> int | None:
        return 1 if self.max_uses is None and self.mode == "recent" else self.max_uses


class Algorithm(Section):
    """The loss."""

    name: AlgorithmName = Field("vtrace", description=
        "vtrace: the actor-critic of IMPALA, which bears lag and learns from each step once; the fastest where steps cost little. ppo: "
        "several passes over each step, for where they cost much. dqn, r2d2: learn the values of actions from rows that are kept, r2d2 with "
        "memory. Or `module:callable` of your own.")
    kwargs: Kwargs = Field(default_factory=dict, description="Keywords for an algorithm of your own. None.")
    gamma: float = Field(0.99, ge=0, le=1, description="Discount of each step. 0.99 looks some 100 steps ahead.")
    rho_bar: float = Field(1.0, gt=0, description=
        "Bound of the ratio in the value target. 1 aims at the value of the policy itself.")
    c_bar: float = Field(1.0, gt=0, description="Bound of the ratio by which later errors count. 1 keeps variance low.")
    rho_pg_bar: float = Field(1.0, gt=0, description="Bound of the ratio in the policy's gradient. 1 as in the paper.")
    lambda_: float | None = Field(None, ge=0, le=1, validation_alias="lambda", serialization_alias="lambda", description=
        "Weight of longer returns; less than 1 trades variance for bias. null: 1 for vtrace, 0.95 for ppo, as in their papers.")
    entropy_cost: float = Field(0.01, ge=0, description=
        "Weight of the entropy bonus. 0.01 keeps a small task exploring.")
    value_cost: float = Field(0.5, ge=0, description="Weight of the value loss. 0.5 as in the paper.")
    normalise_advantages: bool | None = Field(None, description=
        "Advantages of a batch (ppo: a minibatch) to mean 0 and deviation 1. null: true for ppo, false for vtrace, as is usual.")
    normalise_returns: bool = Field(False, description=
        "The value learns returns of mean 0 and deviation 1, by all that were seen; not with dqn, r2d2. false, as it needs some updates to settle; true where returns are "
        "in the hundreds, or their scale is not known.")
    synchronous: bool = Field(True, description=
        "ppo: each iteration is one unroll of every slot, by one version; actors wait while it is learnt from. false: they go on, "
        "and V-trace corrects the advantages (APPO), which pays where a simulator is slow. true needs the fewest steps.")
    epochs: int = Field(4, ge=1, le=1000, description=
        "ppo: passes over a batch. 4 is safe; 10 to 20 get more out of few steps where the task is easy.")
    minibatches: int = Field(4, ge=1, le=65_536, description=
        "ppo: parts of a batch, a step of the optimiser each; whole unrolls with a recurrent policy. 4 as is usual.")
    clip_range: float = Field(0.2, gt=0, le=10, description=
        "ppo: how far from 1 a ratio is worth going. 0.2 as in the paper.")
    value_clip_range: float | None = Field(None, gt=0, description=
        "ppo: how far a value is moved in an iteration. null: freely, as clipping depends on the scale of rewards.")
    target_kl: float | None = Field(None, gt=0, description=
        "ppo: an iteration ends once the policy's divergence from the one that acted is 1.5 times this. null: it goes through.")

    n_step: int = Field(3, ge=1, le=65_536, description=
        "dqn, r2d2: rewards in a target before the value of what follows; fewer at the end of an unroll. 3 as in Ape-X; R2D2 takes 5.")
    double: bool = Field(True, description=
        "dqn, r2d2: the network that learns chooses the next action, the target network values it. true overestimates less.")
    dueling: bool = Field(True, description=
        "dqn, r2d2: the values of actions are a value of the state and advantages around it. true, as states differ more than actions.")
    value_rescale: float | None = Field(None, ge=0, le=1, description=
        "dqn, r2d2: epsilon of h(x) = sign(x)(sqrt(|x|+1)-1) + epsilon x, in which values are learnt; R2D2 takes 1e-3, for games whose "
        "scores differ by thousands. null: as they are.")
    target_period: int = Field(400, ge=1, le=1_000_000_000, description=
        "dqn, r2d2: updates after which the target network is the one that learns. 400 suits small tasks; R2D2 takes 2500.")
    epsilon: float = Field(0.4, ge=0, le=1, description=
        "dqn, r2d2: share of random actions of the first slot. 0.4 as in Ape-X.")
    epsilon_exponent: float = Field(7.0, ge=0, le=100, description=
        "dqn, r2d2: slot i of N acts at random with epsilon^(1 + this i/(N-1)). 7 as in Ape-X: some explore, most play well; 0: all alike.")
    priority_mix: float = Field(0.9, ge=0, le=1, description=
        "dqn, r2d2: an unroll's priority is this times its largest error, and the rest its mean one. 0.9 as in R2D2.")

    @property
    def values_actions(self) -> bool:
        """Whether the policy gives values of actions, and acts greedily but for a share of random ones."""
        return self.name in Q_LEARNING

    @property
    def iterates(self) -> bool:
        """Whether actors fill one unroll each, then wait for the next version."""
        return self.name == "ppo" and self.synchronous

    @property
    def lambda_or_default(self) -> float:
        if self.lambda_ is not None:
            return self.lambda_
        return 0.95 if self.name == "ppo" else 1.0

    @property
    def normalises_advantages(self) -> bool:
        return self.name == "ppo" if self.normalise_advantages is None else self.normalise_advantages


class Learner(Section):
    """The process that trains."""

    device: str = Field("cpu", pattern=DEVICE_PATTERN, description=
        "Where gradients are computed: cpu, cuda or cuda:N. cpu, which every machine has.")
    threads: int = Field(1, ge=1, le=1024, description="Torch's threads. 1, so that engine and workers have cores too.")
    optimizer: Literal["adam", "rmsprop"] = Field("adam", description=
        "adam needs the least tuning; rmsprop is IMPALA's.")
    learning_rate: float = Field(3e-3, gt=0, le=10, description=
        "Step size at its highest. 3e-3 suits small networks; large ones want 3e-4 or less.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description=
        "How learning_rate falls to 0 over run.max_steps. constant, as it needs no known end.")
    warmup_updates: int = Field(0, ge=0, le=1_000_000_000, description=
        "Updates over which learning_rate rises from 0. 0, as small networks need none.")
    adam_eps: float = Field(1e-5, gt=0, le=1, description=
        "Adam's epsilon. 1e-5 is steadier than Torch's 1e-8 when gradients are small.")
    rmsprop_alpha: float = Field(0.99, ge=0, lt=1, description="RMSProp's decay. 0.99 as in the paper.")
    rmsprop_eps: float = Field(0.01, gt=0, le=10, description="RMSProp's epsilon. 0.01 as in the paper.")
    max_grad_norm: float | None = Field(1.0, gt=0, description=
        "Gradients longer than this are shortened to it; null leaves them. 1 tames rare large returns.")
    batch_size: int = Field(16, ge=1, le=65_536, description=
        "Unrolls of an update. 16 unrolls of 16 steps are 256 transitions.")
    unroll_length: int = Field(16, ge=1, le=65_536, description=
        "Transitions of an unroll. 16 keep data fresh; longer ones need fewer bootstrap values.")
    stride: int | None = Field(None, ge=1, le=65_536, description=
        "Rows from an unroll's begin to the next one's; fewer than unroll_length make them overlap, as R2D2's do by half. null: unroll_length.")
    burn_in: int = Field(0, ge=0, le=65_536, description=
        "Rows before an unroll that only warm the recurrent state. 0, as states are stored.")
    precision: Literal["float32", "bfloat16"] = Field("float32", description=
        "Of the forward pass in training. float32, as few CPUs are quicker with bfloat16.")

    @property
    def stride_or_default(self) -> int:
        return self.stride or self.unroll_length


class EvaluationSection(Section):
    """Episodes that are played and never learnt from."""

    slots: int = Field(0, ge=0, le=4096, description=
        "Environments that are evaluated while training goes on. 0, as they take the time of others.")
    episodes: int = Field(100, ge=0, le=1_000_000, description=
        "Episodes played at the end of training; 0 plays none. 100 make the mean's error small.")
    every_s: float = Field(0.0, ge=0, le=86_400, description=
        "Seconds between evaluations in training, of evaluation.episodes each. 0: evaluation slots play all the time.")
    greedy: bool = Field(True, description=
        "The most likely action instead of a sampled one. true shows what was learnt without noise.")
    envs_per_worker: int = Field(16, ge=1, le=4096, description=
        "Environments that play at the same time at the end. 16 share a forward pass.")


class Gateway(Section):
    """Workers of other hosts (`serve --listen`)."""

    heartbeat_s: float = Field(1.0, ge=0.05, le=60, description=
        "Seconds between a waiting worker's signs of life, with which lost messages are asked for again. 1 costs nothing.")


class Run(Section):
    """The run's length, seed and records."""

    seed: int = Field(1, ge=0, le=2**63 - 1, description=
        "Of environments, weights and samples. Any will do; a fixed one lets runs be compared.")
    deterministic: bool = Field(False, description=
        "The same numbers in every run with one worker, at some speed. false, as speed is the point.")
    max_steps: int | None = Field(None, ge=1, le=1 << 60, description=
        "Environment steps after which training ends. null: no such end.")
    max_seconds: float | None = Field(None, gt=0, le=1e9, description=
        "Seconds of training after which it ends. null: no such end.")
    stop_at_return: float | None = Field(None, description=
        "Mean return of the last 100 training episodes at which training ends. null: no such end.")
    checkpoint_every_s: float = Field(60.0, gt=0, le=1e9, description=
        "Seconds between checkpoints. A minute's work is cheap to lose.")
    keep: int = Field(3, ge=1, le=100_000, description="Checkpoints that are kept, newest first. 3 leave a way back.")
    log_every_s: float = Field(1.0, gt=0, le=86_400, description=
        "Seconds between lines of metrics.jsonl. 1 is lively and small.")
    dir: str | None = Field(None, min_length=1, description="Where the run is kept. null: runs/NAME-TIME.")
    kernels: Literal["auto", "off", "required"] = Field("auto", description=
        "CUDA kernels of engine and learner on a GPU. auto: where CuPy is installed, with a warning where not; off: PyTorch alone; required: an error where "
        "they cannot be had. SEEDRL_KERNELS in the environment goes before it.")
    metrics_listen: str | None = Field(None, min_length=3, description=
        "HOST:PORT of a page for Prometheus (docs/metrics.md), read by whoever reaches it. null: none.")


# fmt: on


class Config(Section):
    """A complete configuration; sections as in YAML. A contradiction between fields raises ConfigError."""

    env: Env = Field(default_factory=Env)
    workers: Workers = Field(default_factory=Workers)
    batching: Batching = Field(default_factory=Batching)
    policy: PolicySection = Field(default_factory=PolicySection)
    engine: Engine = Field(default_factory=Engine)
    replay: Replay = Field(default_factory=Replay)
    algorithm: Algorithm = Field(default_factory=Algorithm)
    learner: Learner = Field(default_factory=Learner)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    gateway: Gateway = Field(default_factory=Gateway)
    run: Run = Field(default_factory=Run)

    _places: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _is_possible(self) -> Config:
        for keys, what, do in contradictions(self):
            raise ConfigError(what=what, where=", ".join(keys), do=do)
        return self

    def __eq__(self, other: object) -> bool:
        """Whether every value is the same, wherever it came from."""
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    def where(self, key: str) -> str:
        """`key` with the file and line, or the argument, that set it; alone when nothing did."""
        return _at(self._places.get(key), key)


# ------------------------------------------------------------------------------------------------------------ loading


def shipped_configs() -> dict[str, Path]:
    """The configurations that come with seedrl, by bare name (beside the package, in a wheel inside it)."""
    for folder in (_HERE / "configs", _HERE.parent / "configs"):
        found = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
        if found:
            return found
    return {}


def load_config(name_or_path: str, overrides: list[str]) -> Config:
    """The configuration of a YAML file, or of the bare name of a shipped one, changed by `key=value` arguments.

    Raises: ConfigError with the file's line, or the argument, and the nearest right spelling."""
    path = _find(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(
            what="the file is no text in UTF-8", where=str(path), do="save it as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(
            what=f"cannot read it: {error.strerror}", where=str(path), do="give a YAML file"
        ) from None
    root = parse(text, path.name)
    if root.kind == "scalar" and root.plain and root.text in ("", "~", "null"):
        root = Node("mapping", root.where)
    if root.kind != "mapping":
        raise ConfigError(
            what=f"a configuration is a mapping of sections, not a {root.kind}",
            where=root.where,
            do="write `section:`, its keys indented below",
        )
    return _changed(root, overrides)


def config_from(arguments: list[str]) -> Config:
    """The defaults, changed by `key=value` arguments alone. Raises: ConfigError, as of `load_config`."""
    return _changed(Node("mapping", COMMAND_LINE), arguments)


def _changed(root: Node, overrides: list[str]) -> Config:
    for argument in overrides:
        _override(root, argument)
    return _validated(root)


def _find(name: str) -> Path:
    shipped = shipped_configs()
    path = Path(name)
    if name in shipped:
        return shipped[name]
    if path.is_file():
        return path
    if path.suffix in _SUFFIXES or len(path.parts) > 1:
        near = nearest(
            path.name,
            [beside.name for beside in path.parent.glob("*") if beside.suffix in _SUFFIXES],
        )
        do = (
            f"did you mean {path.parent / near}?"
            if near
            else f"give a YAML file, or one of {', '.join(shipped)}"
        )
        raise ConfigError(what=f"there is no file '{name}'", where=COMMAND_LINE, do=do)
    near = nearest(name, shipped)
    listed = ", ".join(shipped) or "none"
    do = (
        f"did you mean {near}? shipped: {listed}"
        if near
        else f"give a YAML file, or one of those shipped: {listed}"
    )
    raise ConfigError(what=f"there is no configuration '{name}'", where=COMMAND_LINE, do=do)


def _override(root: Node, argument: str) -> None:
    """Sets one `key=value` in the tree."""
    where = f"{COMMAND_LINE}: {argument}"
    key, equals, text = argument.partition("=")
    if not equals or not key:
        raise ConfigError(
            what=f"'{argument}' is no key=value",
            where=COMMAND_LINE,
            do="write it as in learner.learning_rate=3e-4, without blanks around =",
        )
    parts = key.split(".")
    section = _SECTIONS.get(parts[0])
    if section is None or (len(parts) > 1 and parts[1] not in section):
        raise _unknown(where, parts[0] if section is None else f"{parts[0]}.{parts[1]}", key)
    if len(parts) == 1:
        given = parse(text, where, numbered=False)
        if given.kind != "mapping":
            raise ConfigError(
                what=f"{key} is a section, not a value",
                where=where,
                do=f"name a key, as in {key}.{next(iter(section))}=...",
            )
        for name, value in given.entries.items():
            if name not in section:
                raise _unknown(where, f"{key}.{name}", f"{key}.{name}")
            _put(root, [key, name], value, where)
        return
    annotation = section[parts[1]].annotation
    if len(parts) > 2 and not is_mapping(annotation):
        raise ConfigError(
            what=f"{'.'.join(parts[:2])} has no keys of its own",
            where=where,
            do=f"write {'.'.join(parts[:2])}=VALUE",
        )
    value = parse_inline(text, where, annotation if len(parts) == 2 else Any)
    _put(root, parts, value, where)


def _put(root: Node, parts: list[str], value: Node, where: str) -> None:
    node = root
    for part in parts[:-1]:
        child = node.entries.get(part)
        if child is None or child.kind != "mapping":
            child = Node("mapping", where)
            node.entries[part] = child
            node.key_where.setdefault(part, where)
        node = child
    node.entries[parts[-1]] = value
    node.key_where[parts[-1]] = where


def _validated(root: Node) -> Config:
    values: dict[str, dict[str, Any]] = {}
    places: dict[str, str] = {}
    for name, node in root.entries.items():
        where = root.key_where[name]
        if name not in _SECTIONS:
            raise _unknown(where, name, name)
        if node.kind == "scalar" and node.plain and node.text in ("", "~", "null"):
            continue
        if node.kind != "mapping":
            first = next(iter(_SECTIONS[name]))
            raise ConfigError(
                what=f"{name} is a section, not a {node.kind}",
                where=f"{where} {name}",
                do=f"write its keys indented below it, as in `{first}: ...`",
            )
        values[name] = {}
        for key, child in node.entries.items():
            path, key_where = f"{name}.{key}", node.key_where[key]
            field = _SECTIONS[name].get(key)
            if field is None:
                raise _unknown(key_where, path, path)
            _note_places(child, path, key_where, places)
            values[name][key] = value_of(child, field.annotation, path)
    try:
        config = Config.model_validate(values)
    except ConfigError as error:
        keys = error.where.split(", ")
        given = [key for key in keys if key in places]  # an argument before a line: it came last
        argued = [key for key in given if places[key].startswith(COMMAND_LINE)]
        key = (argued + given + keys)[0]
        raise ConfigError(what=error.what, where=_at(places.get(key), key), do=error.do) from None
    except ValidationError as error:
        raise _wrong_value(error, places) from None
    config._places = places
    return config


def _note_places(node: Node, path: str, where: str, places: dict[str, str]) -> None:
    places[path] = where
    for name, child in node.entries.items():
        _note_places(child, f"{path}.{name}", node.key_where[name], places)
    for index, child in enumerate(node.items):
        _note_places(child, f"{path}[{index}]", child.where, places)


def _wrong_value(error: ValidationError, places: dict[str, str]) -> ConfigError:
    """The first fault that pydantic found, in our words and at its line."""
    fault = error.errors(include_url=False)[0]
    section, key, *deeper = fault["loc"]
    path = f"{section}.{key}"
    item = path + "".join(f"[{part}]" for part in deeper if isinstance(part, int))
    field = _SECTIONS[str(section)][str(key)]
    given = fault["input"]
    admitted = (
        takes(field.annotation, field) if item == path else takes(item_type(field.annotation))
    )
    shown = repr(given) if isinstance(given, str) else to_text(given)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    near = nearest(given, choices(field.annotation)) if isinstance(given, str) else None
    default = to_text(field.get_default(call_default_factory=True))
    do = f"did you mean {near}?" if near else f"the default is {default}"
    return ConfigError(
        what=f"{item} {shown} is not {admitted}",
        where=_at(places.get(item) or places.get(path), item),
        do=do,
    )


def _at(place: str | None, key: str) -> str:
    """File and line with the key, or the argument, which names it already."""
    if place is None:
        return key
    return place if place.startswith(COMMAND_LINE) else f"{place} {key}"


def _unknown(where: str, path: str, shown: str) -> ConfigError:
    """A key or section that does not exist, with what was meant, if anything is near."""
    section, _, key = path.partition(".")
    at = _at(where, path)
    if section not in _SECTIONS:
        word = shown.rpartition(".")[2] if where.startswith(COMMAND_LINE) else section
        near_section = nearest(section, _SECTIONS)
        holders = [name for name, fields in _SECTIONS.items() if section in fields]
        if near_section and word != section:
            near_key = (
                word if word in _SECTIONS[near_section] else nearest(word, _SECTIONS[near_section])
            )
            do = f"did you mean {near_section}.{near_key or word}?"
        elif holders:
            do = "did you mean " + " or ".join(f"{name}.{section}" for name in holders) + "?"
        elif near_section:
            do = f"did you mean {near_section}?"
        else:
            near_path = _nearest_path(section)
            do = (
                f"did you mean {near_path}?"
                if near_path
                else f"sections are {', '.join(_SECTIONS)}"
            )
        return ConfigError(what=f"there is no section {section!r}", where=at, do=do)
    holders = [name for name, fields in _SECTIONS.items() if key in fields]
    near = nearest(key, _SECTIONS[section])
    if holders:
        what = (
            f"{section} has no key {key!r}; "
            + " and ".join(holders)
            + (" has" if len(holders) == 1 else " have")
        )
        do = "write it as " + " or ".join(f"{name}.{key}" for name in holders)
        return ConfigError(what=what, where=at, do=do)
    if near is None:
        near_path = _nearest_path(key)
        do = (
            f"did you mean {near_path}?"
            if near_path
            else f"its keys are {', '.join(_SECTIONS[section])}"
        )
    else:
        do = f"did you mean {section}.{near}?"
    return ConfigError(what=f"{section} has no key {key!r}", where=at, do=do)


def _nearest_path(word: str) -> str | None:
    by_key = {key: f"{name}.{key}" for name, fields in _SECTIONS.items() for key in fields}
    near = nearest(word, by_key)
    return None if near is None else by_key[near]


# ---------------------------------------------------------------------------------------------------- words and dumps


def _fields(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Fields by the name that they have in YAML."""
    return {
        field.serialization_alias or name: field for name, field in section.model_fields.items()
    }


_SECTIONS: dict[str, dict[str, FieldInfo]] = {
    name: _fields(typing.cast(type[BaseModel], field.annotation))
    for name, field in Config.model_fields.items()
}


def dump_yaml(config: Config) -> str:
    """Every field of every section; `load_config` reads it back equal."""
    lines = []
    for name in type(config).model_fields:
        section = getattr(config, name)
        lines.append(f"{name}:")
        for key, value in section.model_dump(by_alias=True).items():
            lines.append(f"  {key}: {to_text(value)}")
    return "\n".join(lines) + "\n"


def help_config() -> str:
    """Every field: what it takes, its default, its unit, range and the reason for the default."""
    lines = []
    for name, field in Config.model_fields.items():
        section = typing.cast(type[BaseModel], field.annotation)
        lines.append(f"{name}: {(section.__doc__ or '').strip()}")
        for key, info in _SECTIONS[name].items():
            default = to_text(info.get_default(call_default_factory=True))
            lines.append(f"  {name}.{key} = {default}    ({takes(info.annotation, info)})")
            lines.append(f"      {info.description}")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
