"""The cases in which disaggregated training is held against unmodified Megatron-Core, and how far apart they may be.

Tests and ``distca parity`` run the same suites. Each suite runs on every rank of an initialised world.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import inf, sqrt
from statistics import fmean
from typing import Any, Literal

import torch

from distca.cluster.agreement import of_ranks
from distca.parity import block, disaggregated, outcome, unmodified
from distca.parity.cases import LENGTHS, ParityCase, ParityShape, Recompute
from distca.parity.latent_cases import latent_cases as latent_cases

# Relative norms. Float32: the whole training path, loss and every parameter's gradient. Float64: the transformer block,
# output, input gradient, every weight gradient. bfloat16: our distance from float64 over unmodified Megatron-Core's.
FLOAT32_TOLERANCE = 1e-5
FLOAT64_TOLERANCE = 1e-12
BFLOAT16_RATIO = 1.1
FURTHER_SEEDS = (1, 2, 3)
"""Numbers that are added to the seed of a case beyond the ratio, for as many further runs."""

EDGES: dict[str, tuple[tuple[int, ...], ...]] = {
    "odd lengths, several micro-batches": ((3, 5, 7, 11, 31), (17, 19), (23,)),
    "length 1": ((1, 1, 2, 1, 1),),
    "a document over all ranks": ((97,), (60, 1)),
    "300 documents": (tuple(1 + (7 * n) % 5 for n in range(300)),),
    "ranks without tokens": ((2,), (1, 2)),
}
# Longer and wider on GPUs, so that the norms of rounding errors are averages over many numbers.
GPU_LENGTHS = ((1300, 705, 1, 1500, 33, 557),)
GPU_EDGES: dict[str, tuple[tuple[int, ...], ...]] = {
    "odd lengths and length 1": ((3, 1, 701, 1111, 1, 31),),
    "a document over all ranks": ((4093,),),
    "300 documents": (tuple(1 + (7 * n) % 23 for n in range(300)),),
    "ranks without tokens": ((2,),),
}
GPU_SHAPE = ParityShape(hidden=512, ffn=1024, heads=8, kv_heads=2, head_dim=64, vocabulary=512, init_std=0.04)

Errors = dict[str, float]
BACKWARDS: tuple[Literal["keep", "resend"], ...] = ("keep", "resend")
MLP: Recompute = "mlp"


def all_modes(tp: int, lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> list[ParityCase]:
    """Ping-pong on and off × keep and resend × nothing and everything recomputed; the MLP alone with two of them."""
    levels: tuple[Recompute, ...] = ("none", "all")
    modes = [*product((True, False), BACKWARDS, levels), (True, BACKWARDS[0], MLP), (False, BACKWARDS[1], MLP)]
    return [
        ParityCase(micro_batches=lengths, tp=tp, ping_pong=ping_pong, backward=backward, recompute=recompute)
        for ping_pong, backward, recompute in modes
    ]


def model_cases(tp: int, lengths: tuple[tuple[int, ...], ...] = LENGTHS) -> list[ParityCase]:
    """Models that are no LLaMA: what megatron's configuration can ask of a dense layer beyond one."""
    gelu = {"activation_func": torch.nn.functional.gelu, "gated_linear_unit": False, "bias_activation_fusion": False}
    models: list[dict[str, Any]] = [
        {"qk_layernorm": True},
        {"add_qkv_bias": True},
        {"add_bias_linear": True},
        {"softmax_scale": 0.11},
        gelu,
        {**gelu, "add_bias_linear": True, "qk_layernorm": True},
        {"bias_activation_fusion": False, "glu_linear_offset": 0.7, "activation_func_clamp_value": 0.5},
    ]
    levels: tuple[Recompute, ...] = ("none", MLP, "all")
    cases = [
        ParityCase(micro_batches=lengths, tp=tp, backward=BACKWARDS[number % 2], recompute=level, config=config)
        for number, config in enumerate(models)
        for level in (levels if "add_bias_linear" in config else (levels[number % 3],))
    ]
    wide_heads = ParityShape(heads=3, kv_heads=1) if tp == 1 else ParityShape(head_dim=20)
    return [*cases, ParityCase(micro_batches=lengths, tp=tp, shape=wide_heads)]


def kind_cases(tp: int, lengths: tuple[tuple[int, ...], ...] = LENGTHS, pp: int = 1) -> list[ParityCase]:
    """Windows shorter and longer than shards and documents, sinks, and layers of both kinds; with stages that run
    different kinds at the same time. A Megatron window excludes the row itself."""
    short, middle, long = (6, 19, 28) if lengths is LENGTHS else (127, 700, 1299)
    every_second = {"window_size": (short, 0), "window_attn_skip_freq": 2}
    models: list[dict[str, Any]] = [
        {"window_size": (0, 0)},
        every_second,
        {**every_second, "softmax_type": "learnable"},
        {"window_size": (middle, 0), "window_attn_skip_freq": [1, 0, 0, 1], "softmax_type": "learnable"},
        {"softmax_type": "learnable", "qk_layernorm": True},
        {"window_size": (long, 0), "window_attn_skip_freq": [1, 1, 1, 0], "softmax_scale": 0.11},
    ]
    levels: tuple[Recompute, ...] = ("none", "all", MLP)
    return [
        ParityCase(
            micro_batches=lengths,
            tp=tp,
            pp=pp,
            backward=BACKWARDS[number % 2] if pp == 1 else "resend",
            ping_pong=number < 5,
            recompute=levels[number % 3],
            scheduler=("random", "real")[(number // 2 + pp) % 2] if pp == 1 else "real",  # type: ignore[arg-type]
            offload=pp == 1 and levels[number % 3] == "all" and BACKWARDS[number % 2] == "resend",
            shape=ParityShape(layers=4),
            config=config,
        )
        for number, config in enumerate(models)
    ]


def edge_cases(tp: int, edges: dict[str, tuple[tuple[int, ...], ...]] | None = None) -> list[ParityCase]:
    """Lengths at the limits, under real and random plans."""
    return [
        ParityCase(
            micro_batches=lengths,
            tp=tp,
            backward="keep" if scheduler == "random" else "resend",
            recompute="all" if scheduler == "random" else (MLP, "none")[number % 2],  # type: ignore[arg-type]
            scheduler=scheduler,  # type: ignore[arg-type]
            tie_embeddings=scheduler == "real",
        )
        for (number, lengths), scheduler in product(enumerate((edges or EDGES).values()), ("random", "real"))
    ]


# All references come before all candidates, so that megatron's groups change their sizes only once.


def float32_differences(cases: Sequence[ParityCase], device: torch.device) -> list[Errors]:
    """Loss and worst parameter gradient of the whole training path, relative to unmodified Megatron-Core in float32."""
    return differences(cases, device, torch.float32)


def differences(cases: Sequence[ParityCase], device: torch.device, dtype: torch.dtype) -> list[Errors]:
    """The same in another type."""
    references = [unmodified.run_unmodified(case, dtype, device) for case in cases]
    results = []
    for case, (reference, weights) in zip(cases, references, strict=True):
        candidate = disaggregated.run_disaggregated(case, dtype, device, "reference", weights)
        difference = outcome.difference(candidate, reference)
        results.append({"loss": difference.loss, "gradient": difference.gradient})
    return results


def float64_errors(cases: Sequence[ParityCase], device: torch.device) -> list[Errors]:
    """Output, input gradient and worst weight gradient of the transformer block in float64."""
    weights = [block.rounded_weights(case, torch.float32) for case in cases]
    references = [
        block.block_unmodified(case, torch.float64, device, full) for case, full in zip(cases, weights, strict=True)
    ]
    return [
        block.block_disaggregated(case, torch.float64, device, "reference", full).error(reference)
        for case, full, reference in zip(cases, weights, references, strict=True)
    ]


def bfloat16_ratios(cases: Sequence[ParityCase], device: torch.device) -> list[Errors]:
    """Our block's distance from float64, over that of megatron-core with the same kernel and tensor parallelism. There
    layers with latent attention are ours too, so they are also held against unmodified ones.

    A kernel may add in another order in each run, so the worst of many weights is partly luck. A case beyond
    :data:`BFLOAT16_RATIO` is judged by root mean squares over its own and :data:`FURTHER_SEEDS`."""
    errors = _bfloat16_errors(cases, device)
    found = [pooled([each]) for each in errors]
    beyond = [number for number, figures in enumerate(found) if max(figures.values()) > BFLOAT16_RATIO]
    for number in of_ranks(beyond)[0]:
        case = cases[number]
        others = _bfloat16_errors([replace(case, seed=case.seed + further) for further in FURTHER_SEEDS], device)
        found[number] = pooled([errors[number], *others])
    return found


def _bfloat16_errors(cases: Sequence[ParityCase], device: torch.device) -> list[dict[str, tuple[Errors, Errors]]]:
    """Returns by case, and by the name of the other block, our errors and the errors of that block."""
    cases = [_on_gpus(case) for case in cases]
    weights = [block.rounded_weights(case, torch.bfloat16) for case in cases]
    exact, others = [], []
    for case, full in zip(cases, weights, strict=True):
        exact.append(block.block_unmodified(case, torch.float64, device, full))
        found = {"ratio": block.block_packed(case, torch.bfloat16, device, "auto", full)}
        if _is_latent(case):
            found["over_unmodified"] = block.block_unmodified(case, torch.bfloat16, device, full)
        others.append({name: outcome.error(exact[-1]) for name, outcome in found.items()})
    results = []
    for case, full, reference, theirs in zip(cases, weights, exact, others, strict=True):
        ours = block.block_disaggregated(case, torch.bfloat16, device, "auto", full).error(reference)
        results.append({over: (ours, errors) for over, errors in theirs.items()})
    return results


def pooled(of_seeds: Sequence[dict[str, tuple[Errors, Errors]]]) -> Errors:
    """Returns ratios of root mean squares over seeds; of one seed the ratios themselves."""
    result: Errors = {}
    for over in of_seeds[0]:
        ours, theirs = ([found[over][side] for found in of_seeds] for side in (0, 1))
        found = ratios(_root_mean_squares(ours), _root_mean_squares(theirs))
        result |= {f"{name}_{over}": ratio for name, ratio in found.items()}
    return result


def _root_mean_squares(errors: Sequence[Errors]) -> Errors:
    return {name: sqrt(fmean(each[name] ** 2 for each in errors)) for name in errors[0]}


def _on_gpus(case: ParityCase) -> ParityCase:
    """The case with a model that is large enough, with keys and values for each head where they are latent."""
    kv_heads = GPU_SHAPE.heads if _is_latent(case) else GPU_SHAPE.kv_heads
    return replace(case, shape=replace(GPU_SHAPE, layers=case.shape.layers, kv_heads=kv_heads))


def _is_latent(case: ParityCase) -> bool:
    return bool(case.config.get("multi_latent_attention"))


def ratios(ours: Errors, theirs: Errors) -> Errors:
    """Errors over other errors; infinite where those are zero or no number, as nothing is said then."""
    return {name: ours[name] / error if 0 < error < inf else inf for name, error in theirs.items()}
