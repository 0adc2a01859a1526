"""Single frames from the environments, stacks at the policy and in the batches, through whole processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness import Harness
from ledger import check_rows, config_of


@pytest.mark.parametrize("mode", ["queue", "uniform"])
def test_what_is_learnt_from_are_the_stacks_that_were_acted_on(mode: str, tmp_path: Path) -> None:
    (tmp_path / "ids").mkdir()
    env = {"id": "system_envs:Echo", "kwargs": {"folder": str(tmp_path / "ids"), "lengths": [1, 3, 9, 2]}, "frame_stack": 4}  # fmt: skip
    kept = {} if mode == "queue" else {"algorithm": {"name": "an:own"}, "replay": {"mode": mode, "capacity": 300}}  # fmt: skip
    config = config_of(env, "stacked", {"num": 2, "envs_per_worker": 4, "groups": 2}, **kept)
    back = torch.arange(3, -1, -1)
    with Harness(config, tmp_path, num_slots=8) as run:
        run.begin()
        for number in range(40):
            batch = run.sample(8)
            stacks = batch.obs["observation"]
            assert torch.equal(batch.extras["seen"], stacks)
            newest = stacks[..., -1, :]
            assert (stacks[..., :2] == newest[..., None, :2]).all()
            assert torch.equal(stacks[..., 2], (newest[..., 2:] - back).clamp_min(0))
            check_rows(batch._replace(obs={"observation": newest}))
            if number == 20:
                run.kill_worker(0)
    assert not [text for text in run.said if "WrongAnswer" in text]
