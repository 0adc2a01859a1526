"""Advantage-weighted regression (Peng et al. 2019, arXiv 1910.00177): the policy imitates what was done, the better it was the more.

seedrl train cartpole algorithm.name=awr:AWR algorithm.kwargs='{beta: 1.0}' learner.learning_rate=3e-3
"""

from csrc_free_kernels.returns import vtrace_rows
from seedrl.learn.algorithm import Loss


class AWR:
    def __init__(self, network, config):
        self.network, self.section = network, config.algorithm
        self.beta = config.algorithm.kwargs.get("beta", 1.0)
        self.largest = config.algorithm.kwargs.get("largest", 20.0)

    def losses(self, batch):
        rows = slice(self.network.burn_in, None)  # [R, B]: T transitions and the bootstrap row
        inputs, values = self.network.over_unrolls(batch)
        actions = {name: action[rows][:-1] for name, action in batch.actions.items()}
        legal = None if batch.mask is None else batch.mask[rows][:-1]
        log_probs, entropies = self.network.heads.evaluate(inputs[:-1], actions, legal)
        acted = batch.log_prob[rows]
        returns, _, mask = vtrace_rows(  # lambda-returns, as both log-probabilities are those of acting
            acted, acted, batch.reward[rows], values, batch.terminated[rows], batch.first[rows], self.section.gamma, lambda_=0.95,
        )  # fmt: skip
        advantages = returns - values[:-1].detach()
        weights = (advantages / self.beta).exp().clamp(max=self.largest)
        count = mask.sum().clamp_min(1)
        policy_loss = -(weights * log_probs * mask).sum() / count
        value_loss = 0.5 * ((values[:-1] - returns).square() * mask).sum() / count
        entropy = (entropies * mask).sum() / count
        total = policy_loss + self.section.value_cost * value_loss - self.section.entropy_cost * entropy
        figures = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        yield Loss(total, {name: figure.detach() for name, figure in figures.items()})
