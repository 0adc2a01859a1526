"""Environments of the shipped configurations that need wrappers; each imports its package only when called."""

from __future__ import annotations

import importlib.util
from typing import Any

from seedrl.errors import ConfigError


def atari(
    game: str = "ALE/Breakout-v5",
    render_mode: str | None = None,
    frame_skip: int = 4,
    noop_max: int = 30,
    terminal_on_life_loss: bool = False,
    **kwargs: Any,
) -> Any:
    """An Atari game as uint8 [84, 84]: single grey frames, `frame_skip` frames of the game a step; `env.frame_stack` stacks them.

    Args:
        game: an id of the Arcade Learning Environment. kwargs: for it, as repeat_action_probability.
        noop_max: most actions without effect after a reset.
    Raises: ConfigError when a package is missing."""
    for module in ("ale_py", "cv2"):
        if importlib.util.find_spec(module) is None:
            # all in one line, which is what remains of an error inside an environment's constructor
            raise ConfigError(
                what=f"Atari needs the module {module}: pip install 'seedrl[atari]'",
                where=f"env.kwargs.game {game}",
                do="pip install 'seedrl[atari]'",
            )
    import ale_py
    import gymnasium
    from gymnasium.wrappers import AtariPreprocessing

    gymnasium.register_envs(ale_py)
    env = gymnasium.make(
        game, render_mode=render_mode, frameskip=1, disable_env_checker=True, **kwargs
    )
    return AtariPreprocessing(
        env, noop_max=noop_max, frame_skip=frame_skip, terminal_on_life_loss=terminal_on_life_loss
    )
