"""Experts that would not be computed as they are asked for are refused, with value, reason and setting."""

import re

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from megatron_patches.experts.spec import has_experts
from megatron_patches.support.config_fields import check_config
from megatron_patches.support.experts import check_expert_groups
from megatron_patches.te.choice import use_te
from tests.megatron_patches.support.cases import LLAMA, refusal

EXPERTS = {
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 16,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
    "gated_linear_unit": True,
}
STAGE = {"expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 2}


def _config(**changed):
    """Of a model with experts; what Megatron itself would refuse beside is not looked at."""
    config = TransformerConfig(**LLAMA, **EXPERTS)
    for name, value in changed.items():
        setattr(config, name, value)
    return config


def test_a_model_with_experts_is_served():
    assert refusal(check_config, _config()) is None
    assert refusal(check_config, _config(**STAGE, sequence_parallel=True)) is None


@pytest.mark.parametrize(
    ("changed", "begins"),
    [
        (
            {"moe_token_dispatcher_type": "allgather"},
            "moe_token_dispatcher_type is 'allgather', but rows go to experts by exchanges",
        ),
        (
            {"moe_token_dispatcher_type": "flex"},
            "moe_token_dispatcher_type is 'flex', but rows go to experts by exchanges",
        ),
        ({"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size is 2, but a rank has whole experts"),
        ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor is 1.0, but two nano-batches would drop"),
        ({"moe_token_dropping": True}, "moe_token_dropping is True, but two nano-batches would drop other rows"),
        ({"moe_router_score_function": "tanh"}, "moe_router_score_function is 'tanh', but the installed Megatron-Core"),
        ({"moe_latent_size": 16}, "moe_latent_size is 16, but experts read and write whole rows"),
        *(  # newer versions of Megatron only
            ({name: 8}, f"{name} is 8, but in linear_fc1's weight all rows of the gate lie before")
            for name in ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size")
            if name in TransformerConfig.__dataclass_fields__
        ),
        ({"moe_input_jitter_eps": 0.1}, "moe_input_jitter_eps is 0.1, but two nano-batches would draw other noise"),
        ({"moe_shared_expert_overlap": True}, "moe_shared_expert_overlap is True, but shared experts run"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type is 'sinkhorn', but a balance"),
        ({"moe_router_load_balancing_type": None}, "moe_router_load_balancing_type is None, but a balance loss is for"),
        ({"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]}, "moe_router_load_balancing_type is 'gl"),
        ({"fp8": "hybrid"}, "fp8 is 'hybrid', but experts are computed in the type of their weights"),
        (
            {"add_bias_linear": True, "moe_shared_expert_intermediate_size": 8},
            "add_bias_linear is True, but a shared expert has no biases",
        ),
        ({"expert_model_parallel_size": 3}, "num_moe_experts is 8, which expert_model_parallel_size 3 does not divide"),
        ({"num_moe_experts": None, "expert_model_parallel_size": 2}, "expert_model_parallel_size is 2, but the model"),
        ({"moe_router_topk": 9}, "moe_router_topk is 9, but num_moe_experts is 8"),
        ({"moe_router_topk": 0}, "moe_router_topk is 0, but num_moe_experts is 8"),
        ({"moe_aux_loss_coeff": [0.1]}, "moe_router_load_balancing_type is 'aux_loss', but moe_aux_loss_coeff is [0."),
        (
            {"moe_router_load_balancing_type": ("aux_loss",), "moe_aux_loss_coeff": (0.1,)},
            "moe_router_load_balancing_type is ('aux_loss',), but moe_aux_loss_coeff is (0.1,)",
        ),
        ({**STAGE, "sequence_parallel": False}, "sequence_parallel is False with tensor_model_parallel_size 2, but"),
    ],
)
def test_what_is_not_served_is_named(changed, begins):
    said = refusal(check_config, _config(**changed))
    assert said is not None and said.startswith(begins) and re.search(": set [a-z_]+ to ", said)


def test_ranks_that_share_experts_lie_within_a_stage():
    assert refusal(check_expert_groups, 4, 4) is None
    assert refusal(check_expert_groups, 4, 3) == (
        "expert_model_parallel_size is 3, which does not divide the 4 ranks of a pipeline stage: set it to a divisor."
    )


def test_linear_layers_are_megatrons_own():
    cpu = torch.device("cpu")
    assert refusal(use_te, "te", _config(), cpu) == (
        "`linears` is te, but with experts or latent attention all linear layers are Megatron-Core's own: set "
        "`linears` to auto or local."
    )
    assert use_te("auto", _config(), torch.device("meta")) is False


def test_dense_layers_among_those_with_experts_are_known():
    assert has_experts(_config(num_layers=4, moe_layer_freq=2)) == [True, False, True, False]
    assert has_experts(_config(num_layers=3, moe_layer_freq=[0, 1, 1])) == [False, True, True]
    assert has_experts(_config(num_moe_experts=None)) == [False, False]


@pytest.mark.parametrize("pattern", [[0, 1, 1], [1], [0, 2], 0, -1, "2", 2.0])
def test_patterns_of_layers_that_do_not_fit_the_model_are_refused(pattern):
    said = refusal(has_experts, _config(moe_layer_freq=pattern))
    assert said.startswith(f"moe_layer_freq is {pattern!r}, but the model has 2 layers: set moe_layer_freq to a number")
