"""Policy gradients on made-up rollouts of very unequal lengths, through distca's public API: log-probabilities of
every token forward only, then with gradients.

torchrun --nproc-per-node 4 examples/rollouts.py
"""

import argparse
from functools import partial

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from own_training_loop import TOKENS_PER_RANK, VOCABULARY, build, config_of

import distca

CLIP = 0.2


class Rollout:
    """A prompt with the response to it: a document of which the response is learned."""

    def __init__(self, tokens, prompt, advantage):
        self.tokens, self.prompt, self.advantage = tokens, prompt, advantage

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, tokens):
        return self.tokens[tokens]

    def learned(self, tokens):
        return np.arange(tokens.start, tokens.stop) >= self.prompt


def rollouts(ranks, random):
    """One micro-batch, the same on every rank; one rollout is longer than a rank's share."""
    lengths = [TOKENS_PER_RANK * ranks // 2, *random.integers(20, 200, 5 * ranks)]
    rewards = random.normal(size=len(lengths))
    tokens = [random.integers(0, VOCABULARY, length) for length in lengths]
    return [Rollout(each, 10, reward - rewards.mean()) for each, reward in zip(tokens, rewards, strict=True)]


def policy_step(before, batches, model):
    """The forward step, as Megatron's schedules take it. ``before``: by rollout, log-probabilities of its tokens under
    the policy that made them; row by row the one of the token that the row predicts."""
    batch = next(batches)
    now = model(batch.tokens, batch.positions, batch.attention, labels=batch.labels, log_probabilities=True)
    old, advantages = (distca.rows_of(batch, values) for values in before)
    return now, partial(clipped, batch.loss_mask, old, advantages)


def clipped(mask, old, advantages, now):
    """PPO's loss, summed over the rows that are learned; how many these are; and both to report."""
    ratio = torch.where(mask, now - old, 0.0).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    total, tokens = -(gain * mask).sum(), mask.sum().int()
    return total, tokens, torch.stack((total.detach().double(), tokens.double()))


def per_token(values, rollouts):
    """[n] of every rollout of n tokens from [n - 1] or from one number; a last token predicts nothing."""
    return [torch.nn.functional.pad(torch.as_tensor(value).float().expand(len(each) - 1), (0, 1))
            for value, each in zip(values, rollouts, strict=True)]  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    for name, default in (("--tp", 1), ("--pp", 1), ("--steps", 3)):
        parser.add_argument(name, type=int, default=default)
    asked = parser.parse_args()
    world = distca.join_world()
    parallel_state.initialize_model_parallel(asked.tp, asked.pp)
    model_parallel_cuda_manual_seed(1234)
    on_gpu = world.device.type == "cuda"
    cad, model = build(config_of(asked.tp, asked.pp, torch.bfloat16 if on_gpu else torch.float32))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-3, use_distributed_optimizer=True, bf16=on_gpu, params_dtype=cad.config.params_dtype),
        [model],
    )
    random = np.random.default_rng(1)
    for number in range(1, asked.steps + 1):
        made = rollouts(cad.options.ranks, random)
        step = cad.plan_step([made])
        old = cad.log_probabilities(step, model)
        before = per_token(old[0] if old else [0.0] * len(made), made), per_token([r.advantage for r in made], made)
        for update in range(1, 3):
            reports = cad.forward_backward(step, partial(policy_step, before), model)
            optimizer.step()
            optimizer.zero_grad()
            if reports and cad.rank == parallel_state.get_tensor_model_parallel_rank() == 0:
                total, tokens = sum(reports).tolist()
                print(f"step {number}.{update}: loss {total / tokens:.5f} of {tokens:.0f} tokens of this rank")
    distca.leave_world()


if __name__ == "__main__":
    main()
