"""Routers whose rows come in halves."""

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils

from distca.testing.reference_attention import relative_error
from megatron_patches.experts import layer
from megatron_patches.experts.balance import MicroBatchBalance
from megatron_patches.experts.layer import BalancedRouter
from tests.megatron_patches.operations import Operations

ROWS, HIDDEN, EXPERTS, TOPK = 37, 64, 8, 2


@pytest.fixture(autouse=True)
def _cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    # Megatron-Core 0.16.1 does not define it without Transformer Engine, and ``spec.py`` does.
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)


def _router(**fields):
    """Without what Megatron's own constructor needs process groups for."""
    router = BalancedRouter.__new__(BalancedRouter)
    torch.nn.Module.__init__(router)
    sizes = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 1, "num_moe_experts": EXPERTS}
    balance = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    router.config = TransformerConfig(**sizes, **balance, moe_router_topk=TOPK, moe_router_dtype="fp32", **fields)
    router.topk, router.score_function, router.layer_number = TOPK, router.config.moe_router_score_function, 1
    router.bias = router.expert_bias = None
    router.enable_expert_bias = False
    router.weight = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(1)))
    return router


def _nano_batch(router):
    documents = torch.zeros(ROWS, dtype=torch.int64)
    documents[-3:] = -1
    return MicroBatchBalance(router.config, [1], documents, [ROWS], 1, True).nano_batch(0)


@pytest.mark.parametrize("before", [True, False])
def test_the_chosen_experts_are_sorted_out_once_and_counted_as_megatron_counts(before):
    router = _router(moe_router_pre_softmax=before)
    nano_batch, hidden = _nano_batch(router), torch.randn(ROWS, 1, HIDDEN)
    with Operations() as operations:
        _, chosen, count = router(hidden, nano_batch)
        count()
    assert operations.count["topk"] == 1
    logits = hidden[:, 0] @ router.weight.t()
    best, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, TOPK, router.score_function)
    assert torch.equal(chosen, best)
    counted = best[:-3].sum(0).float()
    assert torch.equal(nano_batch.balance._best[0, 0], counted) and torch.equal(nano_batch.balance._load[0], counted)
    entropy = -torch.special.xlogy(scores, scores).sum(1)[:-3].sum()
    assert float(nano_batch.balance._entropy[0]) == pytest.approx(float(entropy), rel=1e-6)


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
@pytest.mark.parametrize(
    "scaling",
    [
        {"grad_scale_func": lambda loss: 4.0 * loss},
        {"grad_scale_func": lambda loss: 8.0 * loss, "moe_grad_scale_func": lambda: torch.tensor([4.0])},
    ],
)
def test_losses_for_balance_are_scaled_as_megatron_scales_losses(kind, scaling):
    hidden = torch.randn(ROWS, 1, HIDDEN, generator=torch.Generator().manual_seed(4))

    def gradient(coefficients, fields):
        router = _router(moe_z_loss_coeff=coefficients.pop("moe_z_loss_coeff", 0.0))
        for name, value in {"moe_router_load_balancing_type": kind, **coefficients, **fields}.items():
            setattr(router.config, name, value)
        nano_batch = _nano_batch(router)
        probs, _, count = router(hidden, nano_batch)
        count()
        nano_batch.balance._counting = False
        return torch.autograd.grad(probs, router.weight, torch.zeros_like(probs))[0]

    for only in ({}, {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.01}):
        plain = gradient(dict(only), {})
        assert plain.any() and torch.equal(gradient(dict(only), scaling), 4.0 * plain)


def test_a_micro_batch_that_lost_all_documents_has_no_loss_for_balance():
    router = _router()
    router.config.moe_router_load_balancing_type = "seq_aux_loss"
    balance = MicroBatchBalance(router.config, [1], torch.full((ROWS,), -1), [ROWS], 0, True)
    probs, _, count = router(torch.randn(ROWS, 1, HIDDEN), balance.nano_batch(0))
    count()
    balance._counting = False
    assert not torch.autograd.grad(probs, router.weight, torch.zeros_like(probs))[0].any()
    assert not balance.report().any()


def test_experts_of_a_layer_are_looked_at_once_in_a_micro_batch():
    balance, looks = _nano_batch(_router()).balance, []
    found = [balance.experts(layer, lambda layer=layer: looks.append(layer) or layer) for layer in (1, 2, 1, 2)]
    assert found == [1, 2, 1, 2] and looks == [1, 2]


def test_products_of_bfloat16_matrices_are_as_near_to_float64_as_megatrons(monkeypatch):
    router = _router().bfloat16()
    hidden = torch.randn(ROWS, 1, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    upstream = torch.randn(ROWS, 1, EXPERTS, generator=torch.Generator().manual_seed(3))

    def found(gating, rows, weight):
        out = gating(rows)
        assert out.shape == upstream.shape
        return [out.detach(), *torch.autograd.grad(out, (rows, weight), upstream.to(out.dtype))]

    rows, wide = hidden.requires_grad_(), hidden.detach().double().requires_grad_()
    weight = router.weight.detach().double().requires_grad_()
    exact = found(lambda x: x @ weight.t(), wide, weight)
    stock = found(router.gating, rows, router.weight)
    monkeypatch.setattr(layer, "is_faster", lambda *_: True)
    ours = found(router.gating, rows, router.weight)
    for mine, theirs, expected in zip(ours, stock, exact, strict=True):
        assert mine.dtype == theirs.dtype
        assert relative_error(mine, expected) <= 1.01 * relative_error(theirs, expected) + 1e-7


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
