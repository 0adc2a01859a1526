"""An environment from its name, and its spec by a probe: a short-lived process that may import what it likes.

`python -m seedrl.worker.envs --probe FD` reads one msgpack map {env, kwargs, action_mask, stats, seed} from its standard input and writes
{"spec": ...} or {"error": ...} to the descriptor FD; what the environment prints goes to the standard error.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgpack
import numpy as np

from seedrl.errors import ConfigError, EnvError, SeedrlError, SpecError, from_wire
from seedrl.spec import INFO_MASK, EnvSpec, spec_from_spaces

MAX_TRACEBACK_CHARS = 20_000
# Namespaces of Gymnasium ids whose package registers them only once imported: module, what installs it
NAMESPACES = {"ALE": ("ale_py", "ale-py"), "MinAtar": ("minatar.gym", "MinAtar")}
# keywords of gymnasium.make itself
MAKE_KEYWORDS = ("max_episode_steps", "disable_env_checker", "render_mode")


def one_line(error: BaseException) -> str:
    """Class and message of an exception, as far as its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def traceback_of(error: BaseException) -> str:
    """The whole traceback, or its last `MAX_TRACEBACK_CHARS` characters."""
    return "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARS:]


def env_error(error: BaseException, where: str, do: str = "") -> EnvError:
    """What an environment raised, as the error that ends a worker."""
    return EnvError(what=one_line(error), where=where, do=do, traceback_text=traceback_of(error))


def is_vector(env: Any) -> bool:
    """A native vector environment, which is one group."""
    from gymnasium.vector import VectorEnv

    return isinstance(env, VectorEnv)


def single_spaces(env: Any) -> tuple[Any, Any]:
    """(observation space, action space) of one seat of an environment or vector environment."""
    if is_vector(env):
        return env.single_observation_space, env.single_action_space
    return env.observation_space, env.action_space


def class_name(env: Any) -> str:
    """The innermost class, which is the one that its author knows."""
    return type(getattr(env, "unwrapped", env)).__name__


# ------------------------------------------------------------------------------------------------------- from a name


def make_env(
    env: str, kwargs: Mapping[str, Any], render_mode: str | None = None, num_envs: int | None = None
) -> Any:
    """Makes the environment that `env` names.

    Args:
        env: a Gymnasium id; `module:callable`, which returns a gymnasium.Env or VectorEnv; `module:id`, where importing the module
            registers the id. The working folder is on the import path.
        kwargs: for the constructor; of an id also max_episode_steps.
        render_mode: passed on when not None.
        num_envs: passed on to a callable that has such a parameter, unless kwargs sets it: the size of a vector environment.
    Raises: ConfigError for a name or keyword that does not exist, with the nearest that does; EnvError when the constructor raises.
    """
    import gymnasium

    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module_name, separator, name = env.rpartition(":")
    creator: Callable[..., Any] | None = None
    if separator:
        module = _import(module_name, env)
        creator = _attribute(module, name)
    keywords = dict(kwargs)
    if render_mode is not None:
        keywords["render_mode"] = render_mode
    where = f"env.id {env}"
    if creator is None:
        _register_namespace(name)
        keywords.setdefault("disable_env_checker", True)  # check.py and the seam do its work, once
        _refuse_unknown(_entry_point(name), kwargs, MAKE_KEYWORDS)

        def creator(**keywords: Any) -> Any:
            return gymnasium.make(name, **keywords)
    else:
        _refuse_unknown(creator, kwargs, ())
        if num_envs is not None and "num_envs" in _parameters(creator):
            keywords.setdefault("num_envs", num_envs)
    try:
        made = creator(**keywords)
    except SeedrlError:
        raise
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv):
        raise _unknown_id(env, name, module_name) from None
    except (Exception, SystemExit) as error:
        raise env_error(
            error, where, "make the environment work by itself first, then here"
        ) from error
    if not isinstance(made, gymnasium.Env | gymnasium.vector.VectorEnv):
        raise ConfigError(
            what=f"'{env}' gives a {type(made).__name__}, which is no gymnasium.Env or VectorEnv",
            where=where,
            do="name a class or function that returns one",
        )
    return made


def _import(module_name: str, env: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise ConfigError(
                what=f"there is no module '{error.name}'",
                where=f"env.id {env}",
                do="install it, or put its folder on PYTHONPATH; the working folder is on it already",
            ) from None
        raise env_error(error, f"importing '{module_name}' for env.id {env}") from error
    except (Exception, SystemExit) as error:
        raise env_error(error, f"importing '{module_name}' for env.id {env}") from error


def _attribute(module: Any, name: str) -> Callable[..., Any] | None:
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if callable(found) and found is not module else None


def _register_namespace(env_id: str) -> None:
    """Imports the package that registers a well-known namespace, as Gymnasium 1.x has no plugins that do."""
    import gymnasium

    namespace, separator, _ = env_id.partition("/")
    if not separator or env_id in gymnasium.registry or namespace not in NAMESPACES:
        return
    module_name, package = NAMESPACES[namespace]
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            what=f"'{env_id}' needs the package {package} ({error})",
            where="env.id",
            do=f"pip install {package}",
        ) from None
    register = getattr(module, "register_envs", None)
    if register is not None and not any(
        known.startswith(f"{namespace}/") for known in gymnasium.registry
    ):
        register()


def _unknown_id(env: str, name: str, module_name: str) -> ConfigError:
    import gymnasium

    known = list(gymnasium.registry)
    module = sys.modules.get(module_name)
    if module is not None:
        known += [
            key
            for key, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module_name
        ]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    imported = f"imported: {module_name}" if module_name else "imported: gymnasium alone"
    return ConfigError(
        what=f"there is no environment '{name}' ({imported})",
        where=f"env.id {env}",
        do=f"did you mean {' or '.join(near)}?"
        if near
        else "write package:id to import the package that registers it",
    )


def _entry_point(env_id: str) -> Callable[..., Any] | None:
    import gymnasium

    spec = gymnasium.registry.get(env_id)
    if spec is None or spec.entry_point is None:
        return None
    if callable(spec.entry_point):
        return spec.entry_point
    try:
        return gymnasium.envs.registration.load_env_creator(spec.entry_point)
    except Exception:
        return None  # gymnasium.make raises it again, with the environment's name


def _parameters(creator: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(creator).parameters
    except (TypeError, ValueError):
        return {}


def _refuse_unknown(
    creator: Callable[..., Any] | None, kwargs: Mapping[str, Any], also: Sequence[str]
) -> None:
    """ConfigError for a keyword that the constructor does not have, with the nearest that it has."""
    parameters = {} if creator is None else _parameters(creator)
    if not parameters and creator is None:
        return
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    known = [*parameters, *also]
    for key in kwargs:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            raise ConfigError(
                what=f"the environment takes no '{key}'",
                where=f"env.kwargs.{key}",
                do=f"did you mean '{near[0]}'?"
                if near
                else f"it takes: {', '.join(known) or 'nothing'}",
            )


# ------------------------------------------------------------------------------------------------------------ its end


def close_all(envs: Iterable[Any], timeout_s: float = 5.0) -> bool:
    """Closes environments, one after the other; False when that took longer than `timeout_s`. What `close` raises is dropped."""
    waiting = list(envs)

    def close() -> None:
        for env in waiting:
            try:
                env.close()
            except Exception as error:
                print(f"closing {class_name(env)}: {one_line(error)}", file=sys.stderr)

    thread = threading.Thread(target=close, daemon=True, name="close")
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


# --------------------------------------------------------------------------------------------------------- the probe


def spec_of(env: Any, env_id: str, action_mask: str | None, stats: Sequence[str]) -> EnvSpec:
    """The spec of an environment that has been made; its spaces alone are looked at."""
    observation_space, action_space = single_spaces(env)
    return spec_from_spaces(
        observation_space, action_space, action_mask=action_mask, stats=stats, env_id=env_id
    )


def _probe(request: Mapping[str, Any]) -> EnvSpec:
    """Makes the environment, reads its spec, and looks for a mask in the info of one reset."""
    name, mask = request["env"], request["action_mask"]
    env = make_env(name, request["kwargs"])
    try:
        spec = spec_of(env, name, mask, request["stats"])
        wanted = sum(leaf.num_logits for leaf in spec.action)
        if (mask is None and spec.action_mask is None and wanted) or mask == INFO_MASK:
            try:
                _, info = env.reset(seed=request["seed"])
            except (Exception, SystemExit) as error:
                raise env_error(error, f"env.id {name}, reset") from error
            found = info.get("action_mask") if isinstance(info, dict) else None
            size = (
                -1
                if found is None
                else _mask_entries(found) // (env.num_envs if is_vector(env) else 1)
            )
            if mask is None and size == wanted:
                spec = spec_of(env, name, INFO_MASK, request["stats"])
            elif mask == INFO_MASK and size != wanted:
                raise SpecError(
                    what=f"info['action_mask'] has {max(size, 0)} entries, the action space {wanted} choices"
                    if found is not None
                    else "the info of a reset has no 'action_mask'",
                    where="env.action_mask",
                    do="return one entry a choice, or leave env.action_mask out",
                )
        return spec
    finally:
        close_all([env])


def _mask_entries(mask: Any) -> int:
    if isinstance(mask, list | tuple):
        return sum(int(np.size(part)) for part in mask)
    return int(np.size(mask))


def _probe_main(fd: int) -> None:
    from seedrl.worker.process import die_with_parent

    die_with_parent()
    os.set_inheritable(fd, False)  # a simulator that outlives us must not keep the pipe open
    os.dup2(2, 1)
    try:
        answer: dict[str, Any] = {
            "spec": _probe(msgpack.unpackb(sys.stdin.buffer.read())).to_dict()
        }
    except SeedrlError as error:
        answer = {"error": error.to_wire()}
    except Exception as error:
        answer = {"error": env_error(error, "the probe of the environment").to_wire()}
    with os.fdopen(fd, "wb") as pipe:
        pipe.write(msgpack.packb(answer))


def probe_spec(
    env: str,
    kwargs: Mapping[str, Any],
    action_mask: str | None = None,
    stats: Sequence[str] = (),
    timeout_s: float = 60.0,
    seed: int = 0,
) -> EnvSpec:
    """The spec of an environment, found in a process of its own, so that the caller never imports the environment.

    Args: as of `make_env` and `spec_from_spaces`; seed: of the one reset, where it is needed; without `action_mask` a mask of the right size in the reset's info is found too.
    Raises: what the probe raised (ConfigError, SpecError, EnvError); EnvError when it died or took longer than `timeout_s`.
    """
    request = {
        "env": env, "kwargs": dict(kwargs), "action_mask": action_mask, "stats": list(stats), "seed": seed,
    }  # fmt: skip
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as output, os.fdopen(reader, "rb", buffering=0) as pipe:
        process = subprocess.Popen(
            [sys.executable, "-m", "seedrl.worker.envs", "--probe", str(writer)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=(writer,),
            start_new_session=True,  # so that its children can be ended with it
        )
        os.close(writer)
        try:
            assert process.stdin is not None
            try:
                process.stdin.write(msgpack.packb(request))
                process.stdin.close()
            except BrokenPipeError:
                pass  # it died at once; said below
            answer, in_time = _read_all(pipe.fileno(), timeout_s)
            if in_time:
                try:
                    process.wait(5.0)
                except subprocess.TimeoutExpired:
                    pass
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            code = process.wait()
            if process.stdin is not None:
                try:
                    process.stdin.close()
                except BrokenPipeError:
                    pass
        output.seek(0)
        printed = output.read().decode(errors="replace")[-MAX_TRACEBACK_CHARS:]
    where = f"env.id {env}"
    if not in_time:
        raise EnvError(
            what=f"the environment was not made within {timeout_s:g} s",
            where=where,
            do="see what its constructor waits for",
            traceback_text=printed,
        )
    if not answer:
        last = printed.strip().splitlines()[-1:] or ["nothing printed"]
        raise EnvError(
            what=f"the probe of the environment died with code {code}: {last[0]}",
            where=where,
            do="make the environment work by itself first, then here",
            traceback_text=printed,
        )
    fields = msgpack.unpackb(answer)
    if "error" in fields:
        raise from_wire(fields["error"])
    return EnvSpec.from_dict(fields["spec"])


def _read_all(fd: int, timeout_s: float) -> tuple[bytes, bool]:
    """(all bytes up to the end of the file, True), or (what came, False) when that did not end in time."""
    deadline = time.monotonic() + timeout_s
    parts: list[bytes] = []
    while (left := deadline - time.monotonic()) > 0:
        if select.select([fd], [], [], left)[0]:
            part = os.read(fd, 1 << 16)
            if not part:
                return b"".join(parts), True
            parts.append(part)
    return b"".join(parts), False


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "--probe":
        sys.exit("usage: python -m seedrl.worker.envs --probe FD")
    _probe_main(int(sys.argv[2]))
