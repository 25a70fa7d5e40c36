"""What a layer keeps for backward is what distca/train/run/memory.py predicts, counted on a CPU in bfloat16."""

import numpy as np
import pytest
import torch

from distca.testing.ranks import run_ranks
from distca.train.config.cli import parse_run_config
from distca.train.run.memory import predict_memory
from tests.train.live_memory import LeanNorm, LiveBytes

ROWS = 256
SHAPE = {"hidden": 256, "ffn": 896, "heads": 32, "kv_heads": 8, "head_dim": 8, "vocabulary": 512}
CASES = {
    "packed": ("none", "mlp"),
    "keep": ("none", "mlp", "all"),
    "resend": ("none", "mlp", "all"),
}


def _config(attention, recompute, layers):
    settings = {f"model.{name}": value for name, value in SHAPE.items()}
    settings |= {"model.layers": layers, "train.recompute": recompute, "train.precision": "bf16"}
    settings |= {"data.tokens_per_rank": ROWS, "cad.ping_pong": "false"}
    settings |= {"cad.enabled": "false"} if attention == "packed" else {"cad.backward": attention}
    return parse_run_config([text for name, value in settings.items() for text in (f"--{name}", str(value))])


def _counted(cases, layers):
    """Bytes that are alive after the forward pass, by case."""
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    from distca.attention import TaskBatch
    from distca.attention.reference import ReferenceKernel
    from distca.plan.cost.analytic import area_cost
    from distca.plan.micro_batch import plan_micro_batch
    from distca.runtime import AttentionPool, NanoRoutes
    from distca.runtime.timeline import Timeline
    from distca.transport import choose_transport
    from megatron_patches.batch_context import DisaggregatedMicroBatch, PackedMicroBatch
    from megatron_patches.groups import initialize_model_parallel, server_pool_group
    from megatron_patches.model import build_model, transformer_config
    from megatron_patches.patches.rms_norm import RMSNorm

    RMSNorm.forward = lambda self, x: LeanNorm.apply(x, self.weight)
    initialize_model_parallel(1, 1, 1)
    plan = plan_micro_batch(np.array([ROWS]), 1, area_cost(32, 8, 8), nano_batches=1).nano_batches[0]
    found = []
    for attention, recompute in cases:
        timeline, kernel = Timeline(torch.device("cpu")), ReferenceKernel()
        backward = "resend" if attention == "resend" else "keep"
        pool = AttentionPool(choose_transport("auto", server_pool_group()), kernel, timeline, backward)
        shape = _config(attention, recompute, layers).model
        config = transformer_config(shape, torch.bfloat16, recompute_mlp=recompute == "mlp", cpu_initialization=True)
        model = build_model(
            shape,
            shape.vocabulary,
            config,
            "packed" if attention == "packed" else "disaggregated",
            pool=pool,
            kernel=kernel,
            timeline=timeline,
            recompute_segments=recompute == "all",
        )
        borders = np.array([0, ROWS])
        micro_batch = PackedMicroBatch(TaskBatch.of(borders, borders, "cpu"), ROWS)
        if attention != "packed":
            routes = NanoRoutes.of(plan.forward, plan.backward, 0, "cpu")
            micro_batch = DisaggregatedMicroBatch([(routes,)] * shape.layers, [ROWS], 1)
        tokens, mask = torch.zeros(1, ROWS, dtype=torch.int64), torch.ones(ROWS, dtype=torch.bool)
        model.rotary_pos_emb.set_positions(torch.arange(ROWS))
        live = LiveBytes()
        with live:
            loss = model(tokens, None, micro_batch, labels=tokens, loss_mask=mask)
        found.append(live.now())
        del loss
    return found


def test_bytes_that_one_more_layer_keeps_of_a_token():
    cases = [(attention, recompute) for attention, levels in CASES.items() for recompute in levels]
    (few,), (many,) = (run_ranks(1, _counted, cases, layers) for layers in (2, 3))
    for (attention, recompute), before, after in zip(cases, few, many, strict=True):
        (less,), (more,) = (predict_memory(_config(attention, recompute, layers), 1, 512) for layers in (2, 3))
        predicted = (more.activations - less.activations) / ROWS
        assert (after - before) / ROWS == pytest.approx(predicted, rel=0.02), (attention, recompute)
