"""Routers whose rows come in halves."""

import torch

from megatron_patches.experts.layer import BalancedRouter


def test_biases_and_counts_stay_float32_where_weights_are_cast():
    router = BalancedRouter.__new__(BalancedRouter)
    torch.nn.Module.__init__(router)
    router.weight = torch.nn.Parameter(torch.ones(2, 4))
    counts, biases = torch.tensor([257.0, 1000001.0]), torch.tensor([0.001, -0.1])
    router.register_buffer("local_tokens_per_expert", counts.clone(), persistent=False)
    router.register_buffer("expert_bias", biases.clone())
    router.bfloat16()
    assert router.weight.dtype == torch.bfloat16
    assert router.local_tokens_per_expert.dtype == router.expert_bias.dtype == torch.float32
    assert torch.equal(router.local_tokens_per_expert, counts) and torch.equal(router.expert_bias, biases)
    assert set(router.state_dict()) == {"weight", "expert_bias"}
