"""A whole run from a configuration: what `train`, `serve` and `eval` do, and what a program of one's own may call.

from seedrl.config import load_config
from seedrl.run import fit
result = fit(load_config("cartpole", ["learner.learning_rate=1e-3"]))
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seedrl.config import DEFAULT_SERVED_SLOTS, Config, dump_yaml, load_config
from seedrl.errors import CheckpointError, ConfigError, RunError, SeedrlError
from seedrl.evaluation import Evaluation
from seedrl.listen import Listen
from seedrl.spec import EnvSpec
from seedrl.supervise import Ended, Supervisor, balance, probe
from seedrl.transport.attach import parse_unix
from seedrl.watch.telemetry import MetricsWriter, RunDir
from seedrl.watch.top import Panel

if TYPE_CHECKING:  # torch takes seconds to import, and train has no use for it in this process
    from seedrl.store.checkpoint import Checkpoint

INTERRUPTED = 130


@dataclass(frozen=True)
class Result:
    """What a run came to. `evaluation` is None when none was asked for, or the run was interrupted."""

    run_dir: Path
    ended: Ended
    reason: str
    accounts: str
    evaluation: Evaluation | None


def fit(
    config: Config, *, run_dir: Path | None = None, resume: bool = False, name: str = "run", workers: bool = True,
    address: Path | None = None, listen: Listen | None = None, panel: Panel | None = None,
) -> Result:  # fmt: skip
    """Trains to the run's end (`run.max_seconds`, `run.max_steps`, `run.stop_at_return`, or Ctrl-C).

    Args:
        run_dir: where everything is kept; None makes runs/NAME-TIME. resume: continue the newest checkpoint there.
        workers: start `workers.num` of them; False waits for others to attach at `address`, or at `listen` over the network.
        panel: where progress is shown; None makes no output.
    Raises: SeedrlError as the command would report it; nothing is left running.
    """
    _check_devices(config)
    final_envs = min(config.evaluation.envs_per_worker, config.evaluation.episodes)
    if config.algorithm.iterates and not workers:
        raise ConfigError(
            what="synchronous ppo needs the same environments in every iteration, and those that attach come and go",
            where=config.where("algorithm.name"),
            do="set algorithm.synchronous=false, or train with workers of the run's own (seedrl train)",
        )
    num_slots = num_slots_of(config, final_envs, workers)
    spec = probe(config)
    folder = RunDir.create(run_dir, dump_yaml(config), name=name, resume=resume)
    try:
        return _fit(
            config,
            spec,
            folder,
            num_slots,
            resume=resume,
            workers=workers,
            address=address,
            listen=listen,
            panel=panel,
        )
    except Exception as error:
        folder.write_log(
            error.traceback_text
            if isinstance(error, SeedrlError) and error.traceback_text
            else traceback.format_exc()
        )
        folder.write_log(str(error))
        raise


def _fit(
    config: Config,
    spec: EnvSpec,
    folder: RunDir,
    num_slots: int,
    *,
    resume: bool,
    workers: bool,
    address: Path | None,
    listen: Listen | None,
    panel: Panel | None,
) -> Result:
    say = _Teller(folder, panel)
    checkpoint = _checkpoint_to_resume(config, folder, spec, say) if resume else None
    with ExitStack() as stack:
        supervisor = stack.enter_context(
            Supervisor(
                config,
                spec,
                folder.path,
                num_slots=num_slots,
                address=address,
                resume=checkpoint,
                greedy=config.evaluation.greedy,
                listen=listen,
                on_metrics=lambda record: _show(metrics.write(record), panel),
                on_message=say,
            )  # fmt: skip
        )
        try:
            _start(config, supervisor, workers)
            metrics = stack.enter_context(MetricsWriter(folder))
            say(_resolved(config, spec, supervisor, num_slots, workers))
            if not workers:
                _tell_where(supervisor, config, listen, say)
            if panel is not None:
                panel.begin()
            ended = supervisor.train()
        except KeyboardInterrupt:
            return Result(folder.path, Ended.INTERRUPTED, "interrupted before the start", "", None)
        supervisor.stop_training()
        line = _accounts(supervisor, ended, folder)
        say(line)
        reason = supervisor.done or "interrupted"
        evaluation = None
        if ended is Ended.DONE and workers and config.evaluation.episodes:
            say(f"{reason}; evaluating {config.evaluation.episodes} episodes")
            try:
                evaluation = supervisor.evaluate(
                    config.evaluation.episodes, config.evaluation.envs_per_worker
                )
            except KeyboardInterrupt:
                ended = Ended.INTERRUPTED
        return Result(folder.path, ended, reason, line, evaluation)


def num_slots_of(config: Config, final_envs: int, workers: bool) -> int:
    """Seats in all: what the configuration says, or as many as the run itself will fill."""
    given = config.batching.max_slots
    if not workers:
        return given or DEFAULT_SERVED_SLOTS
    own = config.workers
    wanted = own.num * own.envs_per_worker + config.evaluation.slots
    group, largest = own.envs_per_worker // own.groups, config.batching.max_batch
    if largest is not None and group > largest:
        raise ConfigError(
            what=f"a group of {group} environments is more than batching.max_batch {largest}",
            where=config.where("batching.max_batch"),
            do="raise batching.max_batch, or workers.groups",
        )
    if given is not None and given < wanted:
        raise ConfigError(
            what=f"{wanted} environments ({own.num} x {own.envs_per_worker}, {config.evaluation.slots} to evaluate) for {given} slots",
            where=config.where("batching.max_slots"),
            do=f"raise batching.max_slots to {wanted}, or leave it out",
        )
    return max(given or wanted, final_envs)


def _start(config: Config, supervisor: Supervisor, workers: bool) -> None:
    if workers:
        supervisor.start_workers(
            config.workers.num, config.workers.envs_per_worker, config.workers.groups
        )
    if config.evaluation.slots and not config.evaluation.every_s:  # they play all the time
        supervisor.start_workers(1, config.evaluation.slots, 1, evaluation=True)
    supervisor.start()


def _show(record: dict[str, Any], panel: Panel | None) -> None:
    if panel is not None:
        panel.update(record)


def _accounts(supervisor: Supervisor, ended: Ended, folder: RunDir) -> str:
    """The accounts in one line. Raises RunError when they do not balance, or the learner never gave them."""
    if not supervisor.final:
        if ended is Ended.INTERRUPTED:
            raise KeyboardInterrupt
        raise RunError(
            what="the learner did not stop in time; its last checkpoint stands",
            where=str(folder.path),
            do="continue with --resume",
        )
    line, fits = balance(supervisor.accounts(), supervisor.final)
    if not fits:
        raise RunError(
            what="the accounts of the run do not balance",
            where=line,
            do="report this as a fault of seedrl",
        )
    return line


def play(
    checkpoint: Path, *, episodes: int = 100, seed: int | None = None, greedy: bool = True, envs: int | None = None,
    video: Path | None = None, scratch: Path | None = None,
) -> Evaluation:  # fmt: skip
    """Plays episodes with a checkpoint (or the newest of a run directory), through the acting step itself.

    Raises: CheckpointError, SeedrlError of the environment, KeyboardInterrupt.
    """
    from seedrl.store.checkpoint import load_checkpoint

    saved = load_checkpoint(checkpoint)
    config = Config.model_validate(saved.config)
    if seed is not None:
        config.run.seed = seed
    _check_devices(config)
    spec = probe(config)
    path = _checked(saved, config, spec)
    side_by_side = envs or min(config.evaluation.envs_per_worker, episodes)
    folder = scratch or path.parent.parent / "eval"
    folder.mkdir(parents=True, exist_ok=True)
    extra = (
        ["--video", str(video.absolute()), "--video-episodes", str(-(-episodes // side_by_side))]
        if video
        else []
    )
    with Supervisor(
        config, spec, folder, num_slots=side_by_side, checkpoint=path, greedy=greedy,
        on_message=lambda text: print(text, file=sys.stderr),
    ) as supervisor:  # fmt: skip
        supervisor.start()
        return supervisor.evaluate(episodes, side_by_side, extra=extra)


def _check_devices(config: Config) -> None:
    """Raises ConfigError for a device that this machine has not, before anything starts."""
    named = (("engine.device", config.engine.device), ("learner.device", config.learner.device))
    wanted = [(key, device) for key, device in named if device != "cpu"]
    if wanted:  # else nothing of torch is needed here
        from seedrl.store.memory import require_device

        for key, device in wanted:
            require_device(device, config.where(key))


def serve_checkpoint(
    config: Config, checkpoint: Path, *, run_dir: Path | None = None, name: str = "served", address: Path | None = None,
    listen: Listen | None = None, greedy: bool = True, say: Callable[[str], None] = print,
) -> int:  # fmt: skip
    """Answers whoever attaches with a trained policy, and learns nothing, until `run.max_seconds`, `run.max_steps` or Ctrl-C.

    Args: checkpoint: one, or a run directory. greedy: the most likely action; False samples. say: takes each line for the user.
    Returns: the number of episodes that were played. Raises: SeedrlError as the command would report it.
    """
    from seedrl.store.checkpoint import load_checkpoint

    _check_devices(config)
    saved = load_checkpoint(checkpoint)
    spec = probe(config)
    path = _checked(saved, config, spec)
    folder = RunDir.create(run_dir, dump_yaml(config), name=name)

    def tell(text: str) -> None:
        folder.write_log(text)
        say(text)

    slots = num_slots_of(config, 0, workers=False)
    with Supervisor(
        config, spec, folder.path, num_slots=slots, address=address, checkpoint=path, greedy=greedy, listen=listen, on_message=tell,
    ) as supervisor:  # fmt: skip
        supervisor.start()
        tell(f"{path}, {'greedy' if greedy else 'sampled'}; {slots} slots")
        _tell_where(supervisor, config, listen, tell)
        episodes = 0
        for played, steps in supervisor.play_for_others():
            episodes += len(played)
            if len(played):
                returns = played[:, 2]
                tell(
                    f"{steps} steps, {episodes} episodes; the last {len(played)}: mean return {returns.mean():.2f} "
                    f"(min {returns.min():.2f}, max {returns.max():.2f}), {supervisor.seats_taken} slots taken"
                )
        tell(f"{supervisor.done or 'interrupted'}: {episodes} episodes")
        if supervisor.done is None:
            raise KeyboardInterrupt
    return episodes


def _tell_where(
    supervisor: Supervisor, config: Config, listen: Listen | None, say: Callable[[str], None]
) -> None:
    """Where workers may attach."""
    where = [f"unix://{supervisor.address}"]
    where += [supervisor.listener.address] if supervisor.listener is not None else []
    for place in where:
        key = " --key FILE" if listen is not None and listen.keys and place == where[-1] else ""
        say(f"workers may attach: seedrl attach {place} --env {config.env.id}{key}")
    if listen is not None and listen.insecure and listen.keys is None:
        say(f"INSECURE: whoever reaches {where[-1]} may attach, and nothing is encrypted")


def _checkpoint_to_resume(
    config: Config, folder: RunDir, spec: EnvSpec, say: Callable[[str], None]
) -> Path:
    """The newest whole checkpoint there; newer ones that are torn are named."""
    from seedrl.store.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(folder.path)
    for torn in checkpoint.skipped:
        say(f"skipped a checkpoint that is not whole: {torn}")
    return _checked(checkpoint, config, spec)


def _checked(checkpoint: Checkpoint, config: Config, spec: EnvSpec) -> Path:
    """Tries a checkpoint on a policy of this configuration, in this environment, before anything starts."""
    from seedrl.policy.agent import make_agent

    checkpoint.load_into(make_agent(config, spec)[0], spec)
    assert checkpoint.path is not None
    return checkpoint.path


class _Teller:
    """Lines for the user: to the log of the run, and to the panel."""

    def __init__(self, folder: RunDir, panel: Panel | None) -> None:
        self._folder, self._panel = folder, panel

    def __call__(self, text: str) -> None:
        self._folder.write_log(text)
        if self._panel is not None:
            self._panel.message(text)


def size_text(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    raise AssertionError


def _resolved(
    config: Config, spec: EnvSpec, supervisor: Supervisor, num_slots: int, workers: bool
) -> str:
    """Devices, processes and bytes, before step one."""
    sizes, own = supervisor.sizes, config.workers
    replay = sizes["replay"]
    leaves = ", ".join(f"{name} {size_text(nbytes)}" for name, nbytes in replay.items())
    started = (
        f"{own.num} workers x {own.envs_per_worker} environments in {own.groups} groups"
        if workers
        else "no workers of its own"
    )
    return "\n".join([
        f"environment  {spec.env_id}: {', '.join(leaf.text() for leaf in spec.observation)} -> {', '.join(leaf.text() for leaf in spec.action)}",
        f"processes    engine on {config.engine.device} ({config.engine.threads} threads), learner on {config.learner.device} "
        f"({config.learner.threads} threads), {started}; {num_slots} slots",
        f"policy       {config.policy.name}, encoder {config.policy.encoder}, core {config.policy.core}: {sizes['parameters']} parameters",
        f"memory       slab {size_text(sizes['slab'])}, state {size_text(sizes['state'])}, weights {size_text(sizes['weights'])}, "
        f"replay {size_text(sum(replay.values()))} for {sizes['capacity_rows']} rows ({leaves})",
        f"run          {supervisor.run_dir}",
    ])  # fmt: skip


# ------------------------------------------------------------------------------------------------------- commands


def train(config_name: str, overrides: list[str], run_dir: Path | None, resume: bool) -> int:
    """The `train` command; returns its exit code."""
    return _fit_and_tell(config_name, overrides, run_dir, resume, workers=True)


def serve(
    config_name: str, overrides: list[str], bind: str | None, run_dir: Path | None, resume: bool, listen: str | None,
    keys: Path | None, insecure: bool, checkpoint: Path | None, greedy: bool,
) -> int:  # fmt: skip
    """The `serve` command; returns its exit code."""
    address = parse_unix(bind) if bind else None
    if listen is None and (keys is not None or insecure):
        raise ConfigError(
            what="--keys and --insecure are of --listen, which is not given",
            where="--listen",
            do="give --listen tcp://HOST:PORT, or leave them out",
        )
    place = Listen(listen, keys, insecure) if listen else None
    if checkpoint is not None:
        if resume:
            raise ConfigError(
                what="--resume continues learning, and --checkpoint serves without a learner",
                where="--checkpoint",
                do="leave one of them out",
            )
        if not checkpoint.exists():
            raise _no_such(checkpoint)
        config = load_config(config_name, overrides)
        serve_checkpoint(
            config, checkpoint, run_dir=run_dir, name=Path(config_name).stem, address=address, listen=place, greedy=greedy,
            say=lambda text: print(text, flush=True),
        )  # fmt: skip
        return 0
    return _fit_and_tell(
        config_name, overrides, run_dir, resume, workers=False, address=address, listen=place
    )


def _fit_and_tell(
    config_name: str,
    overrides: list[str],
    run_dir: Path | None,
    resume: bool,
    *,
    workers: bool,
    address: Path | None = None,
    listen: Listen | None = None,
) -> int:
    if resume and run_dir is None:
        raise ConfigError(
            what="--resume needs the run to continue", where="--resume", do="give --run-dir DIR"
        )
    config = load_config(config_name, overrides)
    run_dir = run_dir or (Path(config.run.dir) if config.run.dir else None)
    panel = Panel(max_seconds=config.run.max_seconds)
    try:
        begin = time.monotonic()
        result = fit(
            config,
            run_dir=run_dir,
            resume=resume,
            name=Path(config_name).stem,
            workers=workers,
            address=address,
            listen=listen,
            panel=panel,
        )
        seconds = time.monotonic() - begin
    finally:
        panel.close()
    if result.evaluation is not None:
        _tell_evaluation(result.evaluation, "greedy" if config.evaluation.greedy else "sampled")
    print(f"{result.reason} after {seconds:.1f} s; run directory {result.run_dir}")
    return INTERRUPTED if result.ended is Ended.INTERRUPTED else 0


def evaluate(
    where: Path,
    episodes: int,
    seed: int | None,
    greedy: bool,
    envs: int | None,
    video: Path | None,
    as_json: bool,
) -> int:
    """The `eval` command; returns its exit code."""
    if not where.exists():
        raise _no_such(where)
    if video is not None:
        _need_encoder()
        video.mkdir(parents=True, exist_ok=True)
    evaluation = play(where, episodes=episodes, seed=seed, greedy=greedy, envs=envs, video=video)
    if as_json:
        print(json.dumps(evaluation.summary()))
    else:
        _tell_evaluation(evaluation, "greedy" if greedy else "sampled")
        if video is not None:
            print(f"films in {video}")
    return 0


def _no_such(where: Path) -> CheckpointError:
    return CheckpointError(
        what=f"no such file or folder: {where}",
        where=str(where),
        do="give a run directory or a checkpoint",
    )


def _need_encoder() -> None:
    """Names the package before an episode is played, not after the last."""
    try:
        import imageio_ffmpeg  # noqa: F401
    except ImportError:
        raise ConfigError(
            what="films need an encoder that is not installed",
            where="--video",
            do="pip install 'seedrl[video]' (imageio-ffmpeg)",
        ) from None


def _tell_evaluation(evaluation: Evaluation, how: str) -> None:
    figures = evaluation.summary()
    print(
        f"{how} evaluation: {figures['episodes']} episodes, mean return {figures['mean_return']:.2f} "
        f"(std {figures['std_return']:.2f}, min {figures['min_return']:.2f}, max {figures['max_return']:.2f}), "
        f"mean length {figures['mean_length']:.1f}"
    )
