"""Priorities of new unrolls by the values that acted, instead of the largest there is (Horgan et al. 2018, arXiv 1803.00933, section 3).

The engine stores two values beside each row, of the best legal action and of the one taken: what SEED takes for both is the second.
"""

from __future__ import annotations

import numpy as np
import torch

from csrc_free_kernels.q_targets import q_targets, sequence_priority
from seedrl.config import Config
from seedrl.spec import BEST_VALUE, TAKEN_VALUE
from seedrl.store.blocks import BlockStorage


class ActingPriorities:
    """Of unrolls that nobody has learnt from yet: targets as the learner's, with one network for all of them."""

    def __init__(self, storage: BlockStorage, config: Config) -> None:
        self._rows, self._env, self._section = storage.rows, config.env, config.algorithm
        self._lead = storage.layout.rule.lead

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Priorities float [n] of unrolls whose rows are int64 [n, R]."""
        section, env = self._section, self._env
        index = torch.from_numpy(rows[:, self._lead :].T.copy()).to(self._rows["reward"].device)
        flags = self._rows["flags"][index].bool()
        reward = self._rows["reward"][index] * env.reward_scale
        if env.reward_clip is not None:
            reward = reward.clamp(-env.reward_clip, env.reward_clip)
        best = self._rows[f"extra/{BEST_VALUE}"][index].unsqueeze(-1)  # as if there were one action
        found = q_targets(
            best, best, reward, flags[..., 0], flags[..., 1], flags[..., 2], section.gamma, n=section.n_step, eps=section.value_rescale,
        )  # fmt: skip
        errors = (found.targets - self._rows[f"extra/{TAKEN_VALUE}"][index][:-1]) * found.mask
        return sequence_priority(errors, found.mask, section.priority_mix).cpu().numpy()
