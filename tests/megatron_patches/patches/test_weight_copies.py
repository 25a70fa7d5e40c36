"""Copies of all weights at once, held against Megatron's own on two ranks."""

import pytest
import torch

from distca.testing.ranks import run_ranks
from tests.megatron_patches.operations import Operations
from tests.megatron_patches.small_cases import on_cpu


def _weights_after_steps(dtype):
    """Weights after two steps with Megatron's copies and with ours, and our numbers of operations in a copy."""
    on_cpu()
    from distca.parity.experts import expert_case
    from distca.parity.unmodified import unmodified_model
    from distca.train.config.schema import OptimizerConfig
    from megatron_patches.patches import weight_copies
    from megatron_patches.ranks.groups import initialize_model_parallel
    from megatron_patches.training.optimizer import build_optimizer
    from megatron_patches.training.training_step import wrap_for_data_parallel

    case, found, copies = expert_case("auxiliary loss, shared expert", ep=2), [], Operations()
    for ours in (False, True):
        initialize_model_parallel(1, 1, case.seed, 1)
        gpt = unmodified_model(case, torch.float32)
        gpt.config.bf16 = dtype == torch.bfloat16
        model = wrap_for_data_parallel(gpt, True)
        optimizer = build_optimizer(model, OptimizerConfig(lr=0.1, min_lr=0.1), 4, 1, dtype)
        generator = torch.Generator().manual_seed(1)
        with pytest.MonkeyPatch.context() as patch:
            if not ours:
                patch.setattr(weight_copies, "_copies_each", lambda _: False)
            for _ in range(2):
                for weight in model.parameters():
                    weight.main_grad.copy_(torch.randn(weight.shape, generator=generator))
                optimizer.step()
        found.append([weight.detach().clone() for weight in model.parameters()])
        inner = getattr(optimizer.optimizer, "chained_optimizers", [optimizer.optimizer])
    with copies:
        for each in inner:
            each._copy_main_params_to_model_params()
    same = all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return same, {each.dtype for each in found[0]}, len(found[0]), len(inner), copies.count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_weights_have_the_bits_of_megatrons_copies(dtype):
    for same, dtypes, weights, optimizers, count in run_ranks(2, _weights_after_steps, dtype):
        assert same and dtypes == {dtype} and weights > 2 * optimizers
        assert (count["_foreach_copy_"], count["copy_"]) == (optimizers, 0)
