"""Films of episodes: one frame a row, from the reset's to the final observation's; needs imageio-ffmpeg (`seedrl[video]`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from seedrl.errors import EnvError

_FPS = 30
_QUALITY = 9  # of 10: greys come back within a few levels


class Recorder(gymnasium.Wrapper):  # type: ignore[type-arg]
    """Writes DIR/seatNNN-episodeKKK.mp4 for the first `episodes` episodes of one environment.

    Args: env: made with render_mode "rgb_array". seat: for the name.
    """

    def __init__(self, env: Any, folder: Path, seat: int, episodes: int) -> None:
        super().__init__(env)
        self._folder, self._seat, self._left = folder, seat, episodes
        self._episode = -1
        self._film: Any = None

    def reset(self, **keywords: Any) -> Any:
        out = self.env.reset(**keywords)
        self._finish()
        self._episode += 1
        if self._left > 0:
            self._left -= 1
            self._shoot()
        return out

    def step(self, action: Any) -> Any:
        out = self.env.step(action)
        if self._film is not None:
            self._shoot()
            if out[2] or out[3]:
                self._finish()
        return out

    def _shoot(self) -> None:
        frame = np.asarray(self.env.render())
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise EnvError(
                what=f"render() gives {frame.dtype} {list(frame.shape)}, not uint8 [H, W, 3]",
                where=f"seat {self._seat}",
                do="film an environment whose render mode rgb_array gives pictures",
            )
        height, width = frame.shape[:2]
        if height % 2 or width % 2:  # the encoder wants even sides
            frame = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        if self._film is None:
            self._film = self._open(frame)
        self._film.send(np.ascontiguousarray(frame))

    def _open(self, frame: np.ndarray) -> Any:
        import imageio_ffmpeg

        path = self._folder / f"seat{self._seat:03d}-episode{self._episode:03d}.mp4"
        fps = self.env.metadata.get("render_fps", _FPS)
        size = (frame.shape[1], frame.shape[0])
        film = imageio_ffmpeg.write_frames(
            str(path), size, fps=fps, quality=_QUALITY, macro_block_size=1
        )
        film.send(None)
        return film

    def _finish(self) -> None:
        if self._film is not None:
            self._film.close()
            self._film = None

    def close(self) -> None:
        self._finish()
        super().close()
