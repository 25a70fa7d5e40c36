"""Models with experts, held against unmodified Megatron-Core."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel

from distca.parity.cases import LENGTHS, ParityCase, ParityShape, case_documents
from distca.parity.disaggregated import attached, outcome_of
from distca.parity.outcome import Outcome, difference
from distca.parity.unmodified import computed_once, unmodified_model, unmodified_outcome
from megatron_patches.ranks.groups import initialize_model_parallel
from megatron_patches.steps.step_documents import StepDocuments
from megatron_patches.training.training_step import summed_loss_step

LAYERS = 2
"""Layers of a case; of two stages each has one, and the first one's may be dense."""
Numbers = dict[int, torch.Tensor]
"""[experts] of layers, by number of the layer, from 1."""
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
    "eight experts a row, sigmoid, auxiliary loss, dense first layer": {
        **_SIGMOID,
        **AUXILIARY,
        "moe_layer_freq": [0, *[1] * (LAYERS - 1)],
        "num_moe_experts": 16,
        "moe_router_topk": 8,
    },
    "one expert a row, shared expert with gate, float64": {
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_router_dtype": "fp64",
        "moe_shared_expert_intermediate_size": 16,
        "moe_shared_expert_gate": True,
    },
    "auxiliary loss, shared expert": {**AUXILIARY, "moe_router_topk": 5, "moe_shared_expert_intermediate_size": 16},
    "a loss for each document": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1.0},
    "biases, clamped": {
        "add_bias_linear": True,
        "activation_func": partial(torch.nn.functional.gelu, approximate="tanh"),
        "activation_func_clamp_value": 0.02,
        "glu_linear_offset": 1.0,
        "bias_activation_fusion": False,
    },
    "experts without rows": {**AUXILIARY, "num_moe_experts": 64, "moe_router_topk": 1, "moe_router_pre_softmax": True},
}


def expert_case(router: str, **how: Any) -> ParityCase:
    """A case of one of ROUTERS."""
    how = {"micro_batches": LENGTHS, "shape": ParityShape(layers=LAYERS), **how}
    return ParityCase(**how, config=_EXPERTS | ROUTERS[router])


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
            offload=pp == 1 and number % 2 == 1 and levels[number % 3] == "all",
        )
        for number, router in enumerate(ROUTERS)
    ]


def expert_differences(
    cases: Sequence[ParityCase], device: torch.device, *, disaggregate: bool = True
) -> list[dict[str, float]]:
    """Loss, worst gradient, biases of experts after a step and rows that experts got, relative to unmodified
    Megatron-Core in float32. Where documents were dealt anew, it computes the micro-batches into which they were
    dealt.

    Args:
        cases: what to compare.
        device: this rank's device.
        disaggregate: False leaves attention, and documents as wholes, at home.
    """
    candidates = []
    for case, weights in zip(cases, [_weights(case) for case in cases], strict=True):
        cad, model = attached(case, torch.float32, device, "reference", weights, disaggregate=disaggregate)
        set_biases(model)
        ddp = cad.data_parallel(model, distributed_optimizer=False)
        documents, ranks = case_documents(case), cad.options.ranks
        homes = None if disaggregate else [np.arange(len(each)) % ranks for each in documents]
        step = cad.plan_step(StepDocuments(documents, homes))
        candidate = outcome_of(case, cad, model, cad.forward_backward(step, summed_loss_step, ddp), weights)
        loads = {number: load.rows_E.cpu() for number, load in cad.expert_loads(ddp).items()}
        candidates.append((step.documents.micro_batches, candidate, biases_of(model), loads))
    results = []
    for case, (micro_batches, candidate, biases, loads) in zip(cases, candidates, strict=True):
        initialize_model_parallel(1, 1, case.seed)
        compute = partial(_unmodified, case, device, micro_batches)
        expected, expected_biases, expected_loads = computed_once(compute)
        found = difference(candidate, expected)
        results.append(
            {
                "loss": found.loss,
                "gradient": found.gradient,
                "bias": worst(biases, expected_biases),
                "load": worst(loads, expected_loads),
            }
        )
    return results


def _weights(case: ParityCase) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in unmodified_model(case, torch.float32).named_parameters()}


def _unmodified(
    case: ParityCase, device: torch.device, micro_batches: Sequence[Any]
) -> tuple[Outcome, Numbers, Numbers]:
    model = unmodified_model(case, torch.float32).to(device)
    set_biases(model)
    loads = {number: torch.zeros(case.config["num_moe_experts"], device=device) for number in _routers(model)}

    def counting(number: int, router: Any, given: Any, routed: tuple[torch.Tensor, torch.Tensor]) -> None:
        loads[number] += routed[1].sum(0)

    for number, router in _routers(model).items():
        router.register_forward_hook(partial(counting, number))
    outcome = unmodified_outcome(case, model, device, micro_batches)
    move_biases(model, case.config.get("moe_router_bias_update_rate", 0.0))
    return outcome, biases_of(model), {n: load.cpu() for n, load in loads.items()}


def _routers(model: GPTModel) -> dict[int, Any]:
    """The routers by number of their layer."""
    mlps = {layer.layer_number: getattr(layer, "mlp", None) for layer in model.decoder.layers}
    routers = {number: getattr(mlp, "router", None) for number, mlp in mlps.items()}
    return {number: router for number, router in routers.items() if router is not None}


def _biased(model: GPTModel) -> dict[int, Any]:
    """The routers with biases of experts, by number of their layer."""
    return {number: router for number, router in _routers(model).items() if router.expert_bias is not None}


def set_biases(model: GPTModel) -> None:
    """Give the experts of a new model biases other than zero."""
    for number, router in _biased(model).items():
        noise = torch.randn(len(router.expert_bias), generator=torch.Generator().manual_seed(number))
        router.expert_bias.copy_(0.1 * noise)


def biases_of(model: GPTModel) -> Numbers:
    """Biases of experts."""
    return {number: router.expert_bias.cpu().clone() for number, router in _biased(model).items()}


def move_biases(model: GPTModel, rate: float) -> None:
    """Change biases after a step as Megatron's finalize_model_grads does."""
    for router in _biased(model).values():
        counts = router.local_tokens_per_expert
        router.expert_bias += rate * torch.sign(counts.mean() - counts)
        counts.zero_()


def worst(found: Numbers, expected: Numbers) -> float:
    """How far any number of any layer of this stage is off."""
    return max((float((each - expected[number]).abs().max()) for number, each in found.items()), default=0.0)
