"""Models with experts, held against unmodified Megatron-Core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel

from distca.parity.cases import ParityCase, ParityShape, case_documents
from distca.parity.disaggregated import attached, outcome_of
from distca.parity.outcome import Outcome, difference
from distca.parity.unmodified import computed_once, unmodified_model, unmodified_outcome
from megatron_patches.ranks.groups import initialize_model_parallel
from megatron_patches.training.training_step import summed_loss_step

LENGTHS = ((13, 7, 1, 29, 3), (50, 2))
_EXPERTS = {
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_token_dispatcher_type": "alltoall",
    "expert_tensor_parallel_size": 1,
    "moe_aux_loss_coeff": 0.0,
}
_SIGMOID = {"moe_router_score_function": "sigmoid"}
AUXILIARY = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0}
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax behind the choice": {},
    "softmax before the choice, z-loss": {"moe_router_pre_softmax": True, "moe_z_loss_coeff": 0.1},
    "sigmoid, bias, groups, scaling": {
        **_SIGMOID,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.01,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "sigmoid, auxiliary loss, dense first layer": {**_SIGMOID, **AUXILIARY, "moe_layer_freq": [0, 1, 1, 1]},
    "one expert a row, shared expert with gate, float64": {
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_router_dtype": "fp64",
        "moe_shared_expert_intermediate_size": 16,
        "moe_shared_expert_gate": True,
    },
    "auxiliary loss, shared expert": {**AUXILIARY, "moe_shared_expert_intermediate_size": 16},
    "a loss for each document": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1.0},
    "experts without rows": {**AUXILIARY, "num_moe_experts": 64, "moe_router_topk": 1, "moe_router_pre_softmax": True},
}


def expert_case(router: str, **how: Any) -> ParityCase:
    """A case of one of ROUTERS."""
    shape = ParityShape(layers=4)
    return ParityCase(**{"micro_batches": LENGTHS, "shape": shape, **how, "config": _EXPERTS | ROUTERS[router]})


def expert_cases(tp: int = 1, pp: int = 1, ep: int = 1, *, deal: bool = True) -> list[ParityCase]:
    """Every router, each in another way of running."""
    levels = ("none", "mlp", "all")
    return [
        expert_case(
            router,
            tp=tp,
            pp=pp,
            ep=ep,
            deal=deal,
            backward="resend" if pp > 1 or number % 2 else "keep",
            ping_pong=number % 4 < 3,
            recompute=levels[number % 3],
        )
        for number, router in enumerate(ROUTERS)
    ]


def expert_differences(cases: Sequence[ParityCase], device: torch.device) -> list[dict[str, float]]:
    """Loss, worst gradient and biases of experts after a step, relative to unmodified Megatron-Core in float32. Where
    documents were dealt anew, it computes the micro-batches into which they were dealt."""
    results = []
    for case in cases:
        whole = unmodified_model(case, torch.float32)
        weights = {name: p.detach().clone() for name, p in whole.named_parameters()}
        cad, model = attached(case, torch.float32, device, "reference", weights)
        _set_biases(model)
        ddp = cad.data_parallel(model, distributed_optimizer=False)
        step = cad.plan_step(case_documents(case))
        candidate = outcome_of(case, cad, model, cad.forward_backward(step, summed_loss_step, ddp), weights)
        biases = _biases(model)
        initialize_model_parallel(1, 1, case.seed)
        compute = partial(_unmodified, case, device, step.documents.micro_batches)
        expected, expected_biases = computed_once(compute)
        found = difference(candidate, expected)
        off = [float((biases[name] - expected_biases[name]).abs().max()) for name in biases]
        results.append({"loss": found.loss, "gradient": found.gradient, "bias": max(off, default=0.0)})
    return results


def _unmodified(
    case: ParityCase, device: torch.device, micro_batches: Sequence[Any]
) -> tuple[Outcome, dict[int, torch.Tensor]]:
    model = unmodified_model(case, torch.float32).to(device)
    _set_biases(model)
    outcome = unmodified_outcome(case, model, device, micro_batches)
    return replace(outcome, document_losses=[]), _biases(model, case.config.get("moe_router_bias_update_rate"))


def _routers(model: GPTModel) -> dict[int, Any]:
    """By number of the layer, those with biases."""
    layers = {layer.layer_number: getattr(layer.mlp, "router", None) for layer in model.decoder.layers}
    return {n: router for n, router in layers.items() if getattr(router, "expert_bias", None) is not None}


def _set_biases(model: GPTModel) -> None:
    for number, router in _routers(model).items():
        noise = torch.randn(len(router.expert_bias), generator=torch.Generator().manual_seed(number))
        router.expert_bias.copy_(0.1 * noise)


def _biases(model: GPTModel, rate: float | None = None) -> dict[int, torch.Tensor]:
    """Biases; with a rate, as Megatron's finalize_model_grads would change them."""
    routers = _routers(model)
    if rate is None:
        return {number: router.expert_bias.cpu().clone() for number, router in routers.items()}
    changed = {}
    for number, router in routers.items():
        counts = router.local_tokens_per_expert
        changed[number] = (router.expert_bias + rate * torch.sign(counts.mean() - counts)).cpu()
    return changed
