"""One peer's training, run by that peer's own interpreter: prints {"env_steps": ...} once the goal is reached, the mean return of the last 100 episodes.

python benchmarks/train_peer.py sb3|sample-factory|torchrl [--task cartpole|cartpole32|minatar] [--seed 0]

CartPole: rl-zoo's settings for stable-baselines3's PPO; the two others publish none and get the same discount, GAE and learning rate, with
ten epochs for Sample Factory's asynchronous PPO. MinAtar's Breakout: nobody publishes any for it; all three get those of Atari with the
learning rate of a small network, and the network of seedrl's configuration.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

EPISODES = 100


@dataclass(frozen=True)
class Task:
    env_id: str
    goal: float
    envs: int
    steps: int  # of each environment, between two updates
    batch: int  # environment steps of a minibatch
    epochs: int
    gamma: float
    gae_lambda: float
    learning_rate: float
    clip: float
    entropy: float
    limit: int  # environment steps over which rate and clip fall to 0
    step_us: float = 0.0  # of a core, that each environment step costs more

    def make(self, **unused: Any) -> Any:
        import gymnasium

        if self.step_us:
            from slow_cartpole import make

            return make(self.step_us)
        if self.env_id.startswith("MinAtar/") and self.env_id not in gymnasium.registry:
            from minatar.gym import register_envs

            register_envs()
        return gymnasium.make(self.env_id)

    @property
    def picture(self) -> bool:
        return self.env_id.startswith("MinAtar/")


TASKS = {
    "cartpole": Task("CartPole-v1", 475.0, 8, 32, 256, 20, 0.98, 0.8, 1e-3, 0.2, 0.0, 400_000),
    "cartpole32": Task("CartPole-v1", 475.0, 32, 32, 256, 20, 0.98, 0.8, 1e-3, 0.2, 0.0, 400_000),
    "dqn": Task("CartPole-v1", 475.0, 1, 1, 64, 1, 0.99, 1.0, 2.3e-3, 0.0, 0.0, 250_000),
    "minatar": Task("MinAtar/Breakout-v1", 10.0, 32, 128, 512, 4, 0.99, 0.95, 1e-3, 0.1, 0.01, 10_000_000),
}  # fmt: skip


class Goal:
    """Says once that the goal is reached, and every other second how far it is."""

    def __init__(self, task: Task) -> None:
        self.task, self.reached, self._next_s = task, False, 0.0

    def look(self, returns: Any, env_steps: int) -> bool:
        last = list(returns)[-EPISODES:]
        if time.monotonic() > self._next_s:
            self._next_s = time.monotonic() + 2
            print(json.dumps({"so_far": env_steps, "mean_return": sum(last) / max(len(last), 1)}), flush=True)  # fmt: skip
        if not self.reached and len(last) == EPISODES and sum(last) / EPISODES >= self.task.goal:
            print(json.dumps({"env_steps": env_steps}), flush=True)
            self.reached = True
        return self.reached


def small_cnn(channels: int, num_features: int) -> Any:
    """uint8, bool or float [..., 10, 10, channels] -> [..., num_features]: the encoder that seedrl's policy has for such pictures."""
    import torch
    from torch import nn

    class SmallCNN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(channels, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 8 * 8, num_features), nn.ReLU(),
            )  # fmt: skip

        def forward(self, picture: torch.Tensor) -> torch.Tensor:
            flat = picture.reshape(-1, *picture.shape[-3:]).movedim(-1, 1).float()
            out: torch.Tensor = self.body(flat).reshape(*picture.shape[:-3], num_features)
            return out

    return SmallCNN()


# ------------------------------------------------------------------------------------------------------------ stable-baselines3


def until(goal: Goal) -> Any:
    """A callback of stable-baselines3 that ends its training at the goal."""
    from stable_baselines3.common.callbacks import BaseCallback

    class UntilGoal(BaseCallback):
        def _on_step(self) -> bool:
            returns = [episode["r"] for episode in self.model.ep_info_buffer]
            return not goal.look(returns, self.num_timesteps)

    return UntilGoal()


def sb3(task: Task, seed: int) -> None:
    import numpy as np
    import torch
    from gymnasium import ObservationWrapper, spaces
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    class Extractor(BaseFeaturesExtractor):
        def __init__(self, space: Any) -> None:
            super().__init__(space, 128)
            self.body = small_cnn(space.shape[-1], 128)

        def forward(self, picture: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.body(picture)
            return out

    class Bytes(ObservationWrapper):
        """bool pictures as uint8: what its buffers can hold."""

        def __init__(self, env: Any) -> None:
            super().__init__(env)
            self.observation_space = spaces.Box(0, 1, env.observation_space.shape, np.uint8)

        def observation(self, observation: Any) -> Any:
            return observation.view("uint8")

    kwargs = {"features_extractor_class": Extractor, "net_arch": [], "normalize_images": False} if task.picture else None  # fmt: skip
    envs = make_vec_env((lambda: Bytes(task.make())) if task.picture else task.make, n_envs=task.envs, seed=seed)  # fmt: skip
    model = PPO(
        "MlpPolicy", envs, n_steps=task.steps, batch_size=task.batch, n_epochs=task.epochs, gae_lambda=task.gae_lambda, gamma=task.gamma,
        learning_rate=lambda left: task.learning_rate * left, clip_range=lambda left: task.clip * left, ent_coef=task.entropy, seed=seed,
        stats_window_size=EPISODES, policy_kwargs=kwargs, device="cpu",
    )  # fmt: skip
    model.learn(task.limit, callback=until(Goal(task)))


def sb3_dqn(task: Task, seed: int) -> None:
    """rl-zoo's settings for CartPole; it has one environment."""
    from stable_baselines3 import DQN
    from stable_baselines3.common.env_util import make_vec_env

    goal = Goal(task)
    model = DQN(
        "MlpPolicy", make_vec_env(task.make, n_envs=1, seed=seed), learning_rate=2.3e-3, batch_size=64, buffer_size=100_000, learning_starts=1000,
        gamma=0.99, target_update_interval=10, train_freq=256, gradient_steps=128, exploration_fraction=0.16, exploration_final_eps=0.04,
        policy_kwargs={"net_arch": [256, 256]}, seed=seed, stats_window_size=EPISODES, device="cpu",
    )  # fmt: skip
    model.learn(50_000, callback=until(goal))
    while not goal.reached:  # its exploration has come to its end
        model.learn(200_000, callback=until(goal), reset_num_timesteps=False)


# ------------------------------------------------------------------------------------------------------------ Sample Factory


def make_for_sample_factory(name: str, config: Any, env_config: Any, render_mode: Any = None) -> Any:  # fmt: skip
    return next(task for task in TASKS.values() if task.env_id == name).make()


def encoder_for_sample_factory(config: Any, space: Any) -> Any:
    from sample_factory.model.encoder import Encoder

    class Small(Encoder):
        def __init__(self) -> None:
            super().__init__(config)
            self.body = small_cnn(space["obs"].shape[-1], 128)

        def forward(self, observation: Any) -> Any:
            return self.body(observation["obs"])

        def get_out_size(self) -> int:
            return 128

    return Small()


def sample_factory(task: Task, seed: int) -> None:
    from sample_factory.algo.runners.runner import AlgoObserver, Runner
    from sample_factory.algo.utils.context import global_model_factory
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env
    from sample_factory.train import make_runner

    class UntilGoal(AlgoObserver):
        goal = Goal(task)

        def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
            returns = runner.policy_avg_stats.get("reward", [[]])[0]
            if self.goal.look(returns, runner.env_steps.get(0, 0)):
                runner.cfg.train_for_env_steps = 0  # it stops by itself then

    register_env(task.env_id, make_for_sample_factory)
    if task.picture:
        global_model_factory().register_encoder_factory(encoder_for_sample_factory)
    epochs = 10 if task.epochs > 10 else task.epochs
    rollout = min(task.steps, 32)
    per_update = task.envs * task.steps if task.picture else 2 * task.batch
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        argv = [
            "--algo=APPO", f"--env={task.env_id}", "--experiment=one", f"--train_dir={directory}", f"--seed={seed}", "--device=cpu",
            "--num_workers=2", f"--num_envs_per_worker={max(task.envs // 2, 8)}", "--worker_num_splits=2", f"--rollout={rollout}",
            "--recurrence=1", "--use_rnn=False", f"--batch_size={task.batch}", f"--num_batches_per_epoch={per_update // task.batch}",
            f"--num_epochs={epochs}", f"--gamma={task.gamma}", f"--gae_lambda={task.gae_lambda}", f"--learning_rate={task.learning_rate}",
            f"--ppo_clip_ratio={task.clip}", f"--exploration_loss_coeff={task.entropy}", "--encoder_mlp_layers", "64", "64",
            "--normalize_input=False", "--obs_subtract_mean=0.0", "--obs_scale=1.0", f"--stats_avg={EPISODES}",
            f"--train_for_env_steps={5 * task.limit}", "--decorrelate_experience_max_seconds=0",
        ]  # fmt: skip
        parser, _ = parse_sf_args(argv=argv)
        config = parse_full_cfg(parser, argv)
        config, runner = make_runner(config)
        runner.register_observer(UntilGoal())
        if runner.init() == 0:
            runner.run()


# ------------------------------------------------------------------------------------------------------------ TorchRL


def torchrl(task: Task, seed: int) -> None:
    """As in TorchRL's own examples of PPO: a collector in this process, GAE anew in each epoch, minibatches from a buffer without repetition."""
    import torch
    from tensordict.nn import TensorDictModule
    from torch import nn
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, ReplayBuffer
    from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
    from torchrl.envs import GymWrapper, RewardSum, SerialEnv, TransformedEnv
    from torchrl.modules import MLP, OneHotCategorical, ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    env = TransformedEnv(SerialEnv(task.envs, lambda: GymWrapper(task.make())), RewardSum())
    env.set_seed(seed)
    shape, actions = env.observation_spec["observation"].shape, env.action_spec.shape[-1]

    def net(outputs: int) -> Any:
        if task.picture:
            return nn.Sequential(small_cnn(shape[-1], 128), nn.Linear(128, outputs))
        return MLP(shape[-1], outputs, num_cells=[64, 64], activation_class=nn.Tanh)

    actor = ProbabilisticActor(
        TensorDictModule(net(actions), in_keys=["observation"], out_keys=["logits"]), in_keys=["logits"], spec=env.action_spec,
        distribution_class=OneHotCategorical, return_log_prob=True,
    )  # fmt: skip
    critic = ValueOperator(net(1), in_keys=["observation"])
    frames = task.envs * task.steps
    collector = Collector(env, actor, frames_per_batch=frames, total_frames=task.limit)
    buffer = ReplayBuffer(storage=LazyTensorStorage(frames), sampler=SamplerWithoutReplacement(), batch_size=task.batch)  # fmt: skip
    advantage = GAE(gamma=task.gamma, lmbda=task.gae_lambda, value_network=critic, average_gae=False)  # fmt: skip
    loss = ClipPPOLoss(
        actor, critic, clip_epsilon=task.clip, entropy_coeff=task.entropy, critic_coeff=0.5, normalize_advantage=True, loss_critic_type="l2",
    )  # fmt: skip
    optimizer = torch.optim.Adam(loss.parameters(), lr=task.learning_rate, eps=1e-5)
    goal, returns, env_steps = Goal(task), deque[float](maxlen=EPISODES), 0
    for data in collector:
        env_steps += data.numel()
        ended = data["next", "done"]
        returns.extend(data["next", "episode_reward"][ended].tolist())
        if goal.look(returns, env_steps):
            break
        left = 1 - env_steps / task.limit
        optimizer.param_groups[0]["lr"] = task.learning_rate * left
        for _ in range(task.epochs):
            with torch.no_grad():
                advantage(data)
            buffer.extend(data.reshape(-1))
            for _ in range(frames // task.batch):
                losses = loss(buffer.sample())
                total = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                optimizer.zero_grad()
                total.backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
    collector.shutdown()


PEERS = {"sb3": sb3, "sb3-dqn": sb3_dqn, "sample-factory": sample_factory, "torchrl": torchrl}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("peer", choices=sorted(PEERS))
    parser.add_argument("--task", choices=sorted(TASKS), default="cartpole")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-us", type=float, default=0.0)
    given = parser.parse_args()
    PEERS[given.peer](replace(TASKS[given.task], step_us=given.step_us), given.seed)


if __name__ == "__main__":
    main()
