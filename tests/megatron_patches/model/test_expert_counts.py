"""Parameters of models with experts, as Megatron builds them, against those that a shape counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from distca.models.experts import Experts
from distca.models.layer_bytes import LayerBytes, expert_parameters_of_rank, parameters_of_rank
from distca.models.shape import ModelShape
from distca.testing.ranks import run_ranks

VOCABULARY = 48
BASE = ModelShape(layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, qk_norm=True, vocabulary=VOCABULARY)
PLAIN = Experts(count=8, topk=2, ffn=8)
SHAPES = {
    "dense": BASE,
    "experts": replace(BASE, experts=PLAIN),
    "dense first, shared, gate": replace(
        BASE, experts=replace(PLAIN, dense_layers=1, shared_ffn=16, shared_gate=True, normalize=False)
    ),
    "sigmoid": replace(
        BASE,
        experts=replace(
            PLAIN, score="sigmoid", bias=True, groups=4, chosen_groups=2, scale=2.5, balance=0.1, z_loss=0.01
        ),
    ),
}
LAYOUTS = ((1, 1, 1), (1, 1, 2), (2, 1, 2), (1, 2, 1))
"""TP, PP and EP of two ranks."""


def _counted() -> list[dict[str, Any]]:
    import torch
    from megatron.core import parallel_state

    from distca import CAD
    from megatron_patches.model.gpt import build_gpt, transformer_config
    from megatron_patches.patches.cpu import use_cpu
    from megatron_patches.ranks.groups import destroy_model_parallel, initialize_model_parallel
    from megatron_patches.steps.layer_work import mlp_weights

    use_cpu()
    found = []
    for tp, pp, ep in LAYOUTS:
        initialize_model_parallel(tp, pp, 1, ep)
        for name, shape in SHAPES.items():
            if ep > 1 and not shape.experts.count:
                continue
            config = transformer_config(shape, torch.float32, sequence_parallel=True, cpu_initialization=True)
            cad = CAD(config, tokens_per_rank=32)
            model = build_gpt(shape, VOCABULARY, config, cad.block_spec())
            experts = sum(p.numel() for name, p in model.named_parameters() if ".local_experts." in name)
            stage = parallel_state.get_pipeline_model_parallel_rank()
            norms = sum(p.numel() for name, p in model.named_parameters() if "_layernorm" in name and len(p) < 32)
            found.append(
                {
                    "shape": name,
                    "layout": (tp, pp, ep),
                    "stage": stage,
                    "experts": experts,
                    "others": sum(p.numel() for p in model.parameters()) - experts - norms,
                    "mlp": mlp_weights(config),
                }
            )
    destroy_model_parallel()
    return found


@pytest.mark.slow
def test_parameters_are_those_of_megatrons_models() -> None:
    ranks = run_ranks(2, _counted)
    assert all(len(found) == len(ranks[0]) == 14 for found in ranks)
    for found in (each for rank in ranks for each in rank):
        shape, (tp, pp, ep), stage = SHAPES[found["shape"]], found["layout"], found["stage"]
        layers = shape.layer_kinds[stage * 2 // pp : (stage + 1) * 2 // pp]
        counted = [LayerBytes(shape=shape, kind=kind, tp=tp, ep=ep) for kind in layers]
        first, last = stage == 0, stage == pp - 1
        assert found["experts"] == expert_parameters_of_rank(counted), found
        assert found["others"] == parameters_of_rank(shape, counted, VOCABULARY, first, last), found
        assert found["mlp"] == shape.mlp_weights, found
