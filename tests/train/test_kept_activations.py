"""What a layer keeps for backward is what distca/train/run/memory.py predicts, counted on a CPU in bfloat16."""

import numpy as np
import pytest
import torch

from distca.testing.ranks import run_cases
from distca.train.config.cli import parse_run_config
from distca.train.run.memory import predict_memory
from megatron_patches.versions import has_gated_delta_net
from tests.train.live_memory import LeanNorm, LiveBytes, rotate

pytestmark = pytest.mark.slow

ROWS = 128
SHAPE = {"hidden": 256, "ffn": 896, "heads": 32, "kv_heads": 8, "head_dim": 8, "vocabulary": 512}
OUTPUTS = "nothing, outputs kept"
CASES = {
    "packed": ("none", OUTPUTS, "mlp"),
    "keep": ("none", OUTPUTS, "mlp", "all"),
    "resend": ("none", "mlp", "all"),
    "offload": ("all",),
}


def _config(attention, recompute, layers, qk_norm, variant):
    settings = {f"model.{name}": value for name, value in SHAPE.items()}
    settings |= {
        "model.layers": layers,
        "model.qk_norm": str(qk_norm).lower(),
        "train.recompute": "none" if recompute == OUTPUTS else recompute,
        "train.keep_outputs": "all" if recompute == OUTPUTS else "none",
        "train.precision": "bf16",
    }
    groups = {name: "model" if name in LATENT or "." in name else "model.variant" for name in variant}
    settings |= {f"{groups[name]}.{name}": value for name, value in variant.items()}
    settings |= {"data.tokens_per_rank": ROWS, "cad.ping_pong": "false"}
    settings |= {
        "packed": {"cad.enabled": "false"},
        "offload": {"train.offload": "all"},
    }.get(attention, {"cad.backward": attention})
    return parse_run_config([text for name, value in settings.items() for text in (f"--{name}", str(value))])


def _counted(cases, layers, qk_norm, variant):
    """Bytes that are alive after the forward pass on the device, and in host memory, by case."""
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    from distca import CAD
    from megatron_patches.layers import layer
    from megatron_patches.model.gpt import build_gpt, transformer_config
    from megatron_patches.model.model_variant import model_options
    from megatron_patches.patches.norms import RMSNorm
    from megatron_patches.ranks.groups import initialize_model_parallel
    from megatron_patches.training.training_step import summed_loss_step

    RMSNorm.forward = lambda self, x: LeanNorm.apply(x, self.weight)
    if qk_norm:
        layer.split_and_rotate = rotate
    initialize_model_parallel(1, 1, 1)
    found = []
    for attention, recompute in cases:
        shape = _config(attention, recompute, layers, qk_norm, variant).model
        config = transformer_config(shape, torch.bfloat16, recompute_mlp=recompute == "mlp", cpu_initialization=True)
        cad = CAD(
            config,
            tokens_per_rank=ROWS,
            disaggregate=attention != "packed",
            ping_pong=False,
            backward={"resend": "resend", "offload": "auto"}.get(attention, "keep"),
            kernel="reference",
            recompute="all" if recompute == "all" else "none",
            keep_outputs=recompute == OUTPUTS,
            offload=attention == "offload",
            model_options=model_options(shape),
        )
        model = cad.attach(build_gpt(shape, shape.vocabulary, config, cad.block_spec()))
        (batch,) = cad.plan_step([[np.zeros(ROWS, np.int64)]]).batches
        live = LiveBytes()
        with live:
            loss, _ = summed_loss_step(iter([batch]), model)
        parking = cad.pool.offload
        found.append((live.now(), 0) if parking is None else (live.now() - parking._memory.size, parking._memory._used))
        del loss
    return found


LATENT = {"latent.kv_rank": 64, "latent.key_dim": 12, "latent.rotary_dim": 6, "latent.value_dim": 10}
LATENT |= {"head_dim": 0, "kv_heads": 32}
VARIANTS = (
    (False, {}),
    pytest.param(True, {}, marks=pytest.mark.matrix),  # the next two have such norms too
    (True, {"norms": "both", "activation": "gelu"}),
    (True, {"norms": "post", "query_key_norm": "width"}),
    (False, {"parallel_mlp": "true", "rotary_percent": 0.5}),
    (False, {"activation": "relu2", "gated": "false", "mlp_bias": "true"}),
    *([(False, LATENT | {"latent.q_rank": 96})] if has_gated_delta_net() else ()),
    *([pytest.param(False, LATENT, marks=pytest.mark.matrix)] if has_gated_delta_net() else ()),
)


@pytest.mark.parametrize(("qk_norm", "variant"), VARIANTS)
def test_bytes_that_one_more_layer_keeps_of_a_token(qk_norm, variant):
    cases = [(attention, recompute) for attention, levels in CASES.items() for recompute in levels]
    if qk_norm or variant:
        cases = [("packed", "none"), ("keep", "mlp"), ("keep", OUTPUTS), ("resend", "all"), ("offload", "all")]
    starts = {layers: (cases, layers, qk_norm, variant) for layers in (2, 3)}
    (few,), (many,) = run_cases(1, _counted, starts).values()
    for (attention, recompute), before, after in zip(cases, few, many, strict=True):
        (less,), (more,) = (
            predict_memory(_config(attention, recompute, layers, qk_norm, variant), 1, 512) for layers in (2, 3)
        )
        predicted = [(more.activations - less.activations) / ROWS, (more.host - less.host) / ROWS]
        found = [(later - earlier) / ROWS for earlier, later in zip(before, after, strict=True)]
        assert found == pytest.approx(predicted, rel=0.02), (attention, recompute)
