"""Core attention disaggregation in a training loop of one's own: Megatron-Core and distca's public API, nothing else.

torchrun --nproc-per-node 4 examples/own_training_loop.py --tp 2     # CPU ranks, or one GPU per rank
"""

import argparse
from functools import partial

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

import distca

SHAPE = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 192, "num_attention_heads": 4, "num_query_groups": 2}
VOCABULARY, TOKENS_PER_RANK = 256, 2048


def config_of(tp, pp, dtype=torch.float32, **shape):
    """A LLaMA's; losses are summed over tokens and divided once by the tokens of the global batch."""
    return TransformerConfig(
        **(shape or SHAPE), normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, calculate_per_token_loss=True,
        tensor_model_parallel_size=tp, sequence_parallel=tp > 1, pipeline_model_parallel_size=pp,
        params_dtype=dtype, pipeline_dtype=dtype, bf16=dtype == torch.bfloat16,
    )  # fmt: skip


def build(config, vocabulary=VOCABULARY, tokens_per_rank=TOKENS_PER_RANK):
    """The CAD and the model, once Megatron's groups are there."""
    cad = distca.CAD(config, tokens_per_rank=tokens_per_rank)
    model = GPTModel(
        config, cad.block_spec(), vocabulary, max_sequence_length=0, position_embedding_type="rope", rotary_base=500000,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip
    model = cad.data_parallel(cad.attach(model).to(cad.device))
    return cad, model


def forward_step(batches, model):
    """The forward step, as Megatron's schedules take it. Without ``summed_loss`` the model returns the loss of every
    token."""
    batch = next(batches)
    total = model(batch.tokens, batch.positions, batch.attention, labels=batch.labels, loss_mask=batch.loss_mask,
                  summed_loss=True)  # fmt: skip
    return total, partial(loss, batch.loss_mask)


def loss(loss_mask, total):
    """Returns what Megatron's schedules want: the sum, how many tokens it is of, and what to report."""
    tokens = (loss_mask > 0).sum().int()
    return total, tokens, torch.stack((total.detach().double(), tokens.double()))


def documents(steps, ranks, seed=1):
    """Every step two micro-batches of documents, the same on every rank; one of them is longer than a rank's share.
    There is something to learn: each token is the one before, or one more."""
    random = np.random.default_rng(seed)
    for _ in range(steps):
        lengths = [[TOKENS_PER_RANK * ranks // 2, *random.integers(1, 200, 5 * ranks)] for _ in range(2)]
        yield [
            [random.integers(0, 2, length).cumsum() % VOCABULARY for length in micro_batch] for micro_batch in lengths
        ]


def main():
    parser = argparse.ArgumentParser()
    for name, default in (("--tp", 1), ("--pp", 1), ("--steps", 5)):
        parser.add_argument(name, type=int, default=default)
    asked = parser.parse_args()
    world = distca.join_world()  # before Megatron's groups: priority of NCCL's streams, or a stand-in for CUDA on CPUs
    parallel_state.initialize_model_parallel(asked.tp, asked.pp)
    model_parallel_cuda_manual_seed(1234)
    on_gpu = world.device.type == "cuda"
    cad, model = build(config_of(asked.tp, asked.pp, torch.bfloat16 if on_gpu else torch.float32))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-3, use_distributed_optimizer=True, bf16=on_gpu, params_dtype=cad.config.params_dtype),
        [model],
    )
    for number, step in enumerate(cad.plan_ahead(documents(asked.steps, cad.options.ranks)), 1):
        reports = cad.forward_backward(step, forward_step, model)
        optimizer.step()
        optimizer.zero_grad()
        if reports and cad.rank == parallel_state.get_tensor_model_parallel_rank() == 0:
            total, tokens = sum(reports).tolist()
            print(f"step {number}: loss {total / tokens:.4f} of {tokens:.0f} tokens of this rank")
    distca.leave_world()


if __name__ == "__main__":
    main()
