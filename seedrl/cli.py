"""The commands: parse, call, exit code. Heavy imports happen inside the command that needs them."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from seedrl import __version__
from seedrl.errors import ConfigError, EnvError, SeedrlError

INTERRUPTED = 130
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Centralized inference and learning.")  # fmt: skip
_debug = False

Overrides = Annotated[list[str] | None, typer.Argument(help="key=value: any field of the configuration by its dotted path")]  # fmt: skip
ConfigName = Annotated[str, typer.Argument(metavar="CONFIG", help="a YAML file, or the bare name of one shipped in configs/")]  # fmt: skip


def _version(show: bool) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _global(
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks of errors")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    global _debug
    _debug = debug


def _help_config(show: bool) -> None:
    if show:
        from seedrl.config import help_config

        typer.echo(help_config())
        raise typer.Exit


HelpConfig = Annotated[bool, typer.Option("--help-config", callback=_help_config, is_eager=True, help="print every field with its default and exit")]  # fmt: skip


@app.command()
def train(
    config: ConfigName,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="where the run is kept; default runs/NAME-TIME")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run in --run-dir")] = False,
    max_steps: Annotated[
        int | None, typer.Option(help="stop after so many environment steps")
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="stop after so many seconds of training")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="run.seed")] = None,
    help_config: HelpConfig = False,
) -> None:
    """Train: engine, learner and workers on this machine, a greedy evaluation at the end."""
    from seedrl.run import train as run_train

    flags = {"run.max_steps": max_steps, "run.max_seconds": max_seconds, "run.seed": seed}
    _run(run_train, config, _with_flags(overrides, flags), run_dir, resume)


@app.command()
def serve(
    config: ConfigName,
    overrides: Overrides = None,
    bind: Annotated[str | None, typer.Option(help="unix://PATH where workers attach; default: a socket in the run directory")] = None,
    listen: Annotated[str | None, typer.Option(help="tcp://HOST:PORT where workers of other hosts attach")] = None,
    keys: Annotated[Path | None, typer.Option(help="folder made by `seedrl keys`: who may attach at --listen, encrypted")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="answer with this policy, and learn nothing")] = None,
    greedy: Annotated[bool, typer.Option("--greedy/--sample", help="of --checkpoint: the most likely action, or a sampled one")] = True,
    insecure: Annotated[bool, typer.Option("--insecure", help="listen beyond this host without keys")] = False,
    run_dir: Annotated[Path | None, typer.Option(help="where the run is kept; default runs/NAME-TIME")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run in --run-dir")] = False,
    max_steps: Annotated[int | None, typer.Option(help="stop after so many environment steps")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="stop after so many seconds")] = None,
    seed: Annotated[int | None, typer.Option(help="run.seed")] = None,
    help_config: HelpConfig = False,
) -> None:  # fmt: skip
    """Start engine and learner, and wait for workers to attach."""
    from seedrl.run import serve as run_serve

    flags = {"run.max_steps": max_steps, "run.max_seconds": max_seconds, "run.seed": seed}
    _run(
        run_serve,
        config,
        _with_flags(overrides, flags),
        bind,
        run_dir,
        resume,
        listen,
        keys,
        insecure,
        checkpoint,
        greedy,
    )


@app.command()
def attach(
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS", help="unix://PATH or tcp://HOST:PORT of a running server"
        ),
    ],
    env: Annotated[str, typer.Option(help="Gymnasium id, module:callable, or package:id")],
    env_kwargs: Annotated[
        str, typer.Option(help="JSON object of the environment's arguments")
    ] = "{}",
    workers: Annotated[int, typer.Option(min=1, help="worker processes")] = 1,
    envs_per_worker: Annotated[int, typer.Option(min=1, help="environments of each")] = 8,
    groups: Annotated[
        int, typer.Option(min=1, help="groups of each: 2 steps one while the other waits")
    ] = 2,
    check: Annotated[str, typer.Option(help="strict | warn | off")] = "strict",
    on_nan: Annotated[str, typer.Option(help="error | drop_episode")] = "error",
    reconnect_s: Annotated[
        float, typer.Option(min=0, help="go on trying so long when the server is gone")
    ] = 60.0,
    on_reconnect: Annotated[
        str, typer.Option(help="episodes under way when a server was lost: reset | keep")
    ] = "reset",
    key: Annotated[
        Path | None, typer.Option(help="this worker's key, where the server has keys")
    ] = None,
) -> None:
    """Attach environment workers to a running server; Ctrl-C detaches them."""
    from seedrl.join import attach as join

    try:
        kwargs = json.loads(env_kwargs)
    except json.JSONDecodeError as error:
        raise ConfigError(what=f"not JSON: {error}", where="--env-kwargs", do="give an object, for instance '{\"size\": 3}'") from None  # fmt: skip
    if not isinstance(kwargs, dict):
        raise ConfigError(what="not a JSON object", where="--env-kwargs", do="give an object, for instance '{\"size\": 3}'")  # fmt: skip
    _run(
        join,
        address,
        env,
        kwargs,
        workers,
        envs_per_worker,
        groups,
        check,
        on_nan,
        reconnect_s,
        key,
        on_reconnect,
    )


@app.command()
def ctl(
    where: Annotated[str, typer.Argument(metavar="ADDRESS", help="a running server's run directory, unix://PATH, or tcp://HOST:PORT with --key")],
    verb: Annotated[str, typer.Argument(metavar="VERB", help="status | pause | resume | drain | kick | trace")],
    worker: Annotated[int | None, typer.Argument(metavar="WORKER", help="its number, for kick")] = None,
    mode: Annotated[str, typer.Option(help="of pause: keep (all stays open) | wait (for open unrolls) | abort (drop them)")] = "keep",
    timeout_s: Annotated[float, typer.Option(min=0, help="how long pause --mode wait may take")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="print the answer as JSON")] = False,
    key: Annotated[Path | None, typer.Option(help="an admin's key, for tcp://")] = None,
    seconds: Annotated[float, typer.Option(help="of trace: how long batches are recorded")] = 5.0,
) -> None:  # fmt: skip
    """Look at a running server, pause and resume it, drain it, cut a worker off."""
    from seedrl.control import ctl as run_ctl

    _run(run_ctl, where, verb, worker, mode, timeout_s, as_json, key, seconds)


@app.command()
def top(
    where: Annotated[str, typer.Argument(metavar="ADDRESS_OR_RUN_DIR", help="a running server's run directory, unix://PATH, or tcp://HOST:PORT with --key")],
    interval_s: Annotated[float, typer.Option(min=0.1, help="seconds between two looks")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="look once")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print each look as a line of JSON")] = False,
    key: Annotated[Path | None, typer.Option(help="an admin's key, for tcp://")] = None,
) -> None:  # fmt: skip
    """Watch a running server: where a batch's time goes, who is attached, and what limits it."""
    from seedrl.control import top as run_top

    _run(run_top, where, key, interval_s, once, as_json)


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="where the server's keys are kept")],
    worker: Annotated[str, typer.Option(help="name of the worker that gets a key")] = "worker",
    admin: Annotated[str | None, typer.Option(help="make a key of this name for `seedrl ctl` from other hosts instead")] = None,
) -> None:  # fmt: skip
    """Make a server's key, and one for a worker that may attach to it."""
    from seedrl.join import keys as run_keys

    _run(run_keys, folder, worker, admin)


@app.command()
def bench(
    overrides: Overrides = None,
    workload: Annotated[str, typer.Option(help="S (float32 [8], MLP) | A (uint8 [4,84,84], CNN) | L (S with an LSTM) | C (CartPole-v1, MLP)")] = "S",
    workers: Annotated[int, typer.Option(min=1, help="worker processes")] = 4,
    envs_per_worker: Annotated[int, typer.Option(min=1, help="environments of each")] = 32,
    transport: Annotated[str, typer.Option(help="shm | zmq-ipc | zmq-tcp | zmq-tcp-curve")] = "shm",
    seconds: Annotated[float, typer.Option(min=0.1, help="how long is measured, after a second of warming up")] = 10.0,
    policy: Annotated[str, typer.Option(help="default, or none: the engine's own time")] = "default",
    step_us: Annotated[float, typer.Option(min=0, help="processor time that one environment's step burns")] = 0.0,
    learner: Annotated[bool, typer.Option("--learner", help="learn from the rows too: what training does")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one line of JSON")] = False,
) -> None:  # fmt: skip
    """Measure this machine: steps a second, round trip, and where a batch's time goes."""
    from seedrl.bench import bench as run_bench

    _run(run_bench, workload, workers, envs_per_worker, transport, seconds, policy, step_us, learner, as_json, overrides or [])  # fmt: skip


@app.command()
def tune(
    config: ConfigName,
    p99_ms: Annotated[float, typer.Option(help="most that the round trip may take, of 99 in 100")],
    out: Annotated[Path, typer.Option(help="YAML file for the tuned configuration; the study and a picture lie beside it")],
    overrides: Overrides = None,
    budget_s: Annotated[float, typer.Option(help="seconds in all")] = 600.0,
    trial_s: Annotated[float, typer.Option(help="seconds that one setting is measured")] = 3.0,
    max_workers: Annotated[int | None, typer.Option(min=1, max=1024, help="most worker processes; default 2 a core")] = None,
    max_envs: Annotated[int | None, typer.Option(min=1, max=4096, help="most environments of a worker; default 64")] = None,
    learner: Annotated[bool, typer.Option("--learner", help="learn from the rows too: what training does, not acting alone")] = False,
) -> None:  # fmt: skip
    """Find the workers and the batching of highest throughput whose p99 round trip keeps a limit; what key=value sets is held."""
    from seedrl.tune import Request
    from seedrl.tune import tune as run_tune

    _run(run_tune, Request(config, overrides or [], p99_ms, out, budget_s, trial_s, max_workers, max_envs, learner))  # fmt: skip


@app.command()
def plan(config: ConfigName, overrides: Overrides = None) -> None:
    """Tell the memory that a run would take, by leaf, without starting it."""
    from seedrl.memory_plan import plan as run_plan

    _run(run_plan, config, overrides or [])


@app.command("eval")
def evaluate(
    where: Annotated[Path, typer.Argument(metavar="CHECKPOINT_OR_RUN_DIR")],
    episodes: Annotated[int, typer.Option(min=1)] = 100,
    seed: Annotated[int | None, typer.Option(help="default: the run's")] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy/--sample", help="the most likely action, or a sampled one")
    ] = True,
    envs: Annotated[int | None, typer.Option(min=1, help="environments side by side")] = None,
    video: Annotated[Path | None, typer.Option(help="folder for a film of each episode")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="end with one line of JSON")] = False,
) -> None:
    """Play episodes with a checkpoint, through the very step that acts in training."""
    from seedrl.run import evaluate as run_evaluate

    _run(run_evaluate, where, episodes, seed, greedy, envs, video, as_json)


def _with_flags(overrides: list[str] | None, flags: dict[str, Any]) -> list[str]:
    return [
        *(overrides or []),
        *(f"{key}={value}" for key, value in flags.items() if value is not None),
    ]


def _run(command: Callable[..., int], *arguments: Any) -> None:
    """Ends with the command's own exit code; Ctrl-C is 130, wherever it falls."""
    try:
        code = command(*arguments)
    except KeyboardInterrupt:
        code = INTERRUPTED
    raise typer.Exit(code)


def report(error: SeedrlError) -> int:
    """Prints the error as CLI.md wants it, the first traceback of the environment before it; returns the exit code."""
    if isinstance(error, EnvError) and error.traceback_text:
        sys.stderr.write(error.traceback_text.rstrip() + "\n")
    sys.stderr.write(f"seedrl: {error}\n")
    return error.exit_code


def main() -> None:
    """Runs the command line; every error is one to three lines, and a traceback only with --debug or in log.txt."""
    try:
        app()
    except SeedrlError as error:
        if _debug:
            traceback.print_exc()
        sys.exit(report(error))
    except ModuleNotFoundError as error:
        if _debug:
            traceback.print_exc()
        what = f"this command needs {error.name}, which is not installed"
        sys.exit(report(ConfigError(what=what, do="pip install 'seedrl[train]'")))
    except Exception as error:
        if _debug:
            traceback.print_exc()
        sys.stderr.write(f"seedrl: {type(error).__name__}: {error}\n")
        sys.exit(1)
