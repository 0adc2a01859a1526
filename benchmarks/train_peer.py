"""One peer's training on CartPole, run by that peer's own interpreter: prints {"env_steps": ...} once the last 100 episodes' mean return is 475.

python benchmarks/train_peer.py sb3|sample-factory [--seed 0]

The settings are each one's own: rl-zoo's for stable-baselines3's PPO; Sample Factory's asynchronous PPO has no published ones for
CartPole and gets the same discount, GAE and learning rate, ten epochs, two workers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

GOAL, EPISODES = 475.0, 100


def done(env_steps: int) -> None:
    print(json.dumps({"env_steps": env_steps}), flush=True)


def sb3(seed: int) -> None:
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    class UntilGoal(BaseCallback):
        def _on_step(self) -> bool:
            returns = [episode["r"] for episode in self.model.ep_info_buffer]
            if len(returns) < EPISODES or sum(returns) / len(returns) < GOAL:
                return True
            done(self.num_timesteps)
            return False

    model = PPO(
        "MlpPolicy", make_vec_env("CartPole-v1", n_envs=8), n_steps=32, batch_size=256, n_epochs=20, gae_lambda=0.8, gamma=0.98,
        learning_rate=lambda left: 1e-3 * left, clip_range=lambda left: 0.2 * left, ent_coef=0.0, seed=seed, stats_window_size=EPISODES,
    )  # fmt: skip
    model.learn(400_000, callback=UntilGoal())


def cartpole(name: str, config: Any, env_config: Any, render_mode: Any = None) -> Any:
    import gymnasium

    return gymnasium.make("CartPole-v1")


def sample_factory(seed: int) -> None:
    from sample_factory.algo.runners.runner import AlgoObserver, Runner
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env
    from sample_factory.train import make_runner

    class UntilGoal(AlgoObserver):
        def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
            returns = runner.policy_avg_stats.get("reward", [[]])[0]
            if len(returns) >= EPISODES and sum(returns) / len(returns) >= GOAL:
                done(runner.env_steps[0])
                runner.cfg.train_for_env_steps = 0  # it stops by itself then

    register_env("CartPole-v1", cartpole)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        argv = [
            "--algo=APPO", "--env=CartPole-v1", "--experiment=cartpole", f"--train_dir={directory}", f"--seed={seed}", "--device=cpu",
            "--num_workers=2", "--num_envs_per_worker=8", "--worker_num_splits=2", "--rollout=32", "--recurrence=1", "--use_rnn=False",
            "--batch_size=256", "--num_batches_per_epoch=2", "--num_epochs=10", "--gamma=0.98", "--gae_lambda=0.8", "--learning_rate=0.001", "--encoder_mlp_layers", "64", "64",
            "--normalize_input=False", f"--stats_avg={EPISODES}", "--train_for_env_steps=2000000", "--decorrelate_experience_max_seconds=0",
        ]  # fmt: skip
        parser, _ = parse_sf_args(argv=argv)
        config = parse_full_cfg(parser, argv)
        config, runner = make_runner(config)
        runner.register_observer(UntilGoal())
        if runner.init() == 0:
            runner.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("peer", choices=("sb3", "sample-factory"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    {"sb3": sb3, "sample-factory": sample_factory}[given.peer](given.seed)


if __name__ == "__main__":
    main()
