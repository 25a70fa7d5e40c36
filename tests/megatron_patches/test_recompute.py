"""What each level of recomputation computes again, that transfers stay where they are, and what is refused."""

import warnings

import pytest
import torch

from distca.errors import SupportError
from distca.testing.ranks import run_ranks

CPU = torch.device("cpu")
MICRO_BATCHES = ((13, 7, 1, 29, 3), (50, 2))
HALVES = 2


class _Counted:
    """The reference kernel, which counts its forward calls."""

    name = "reference"

    def __init__(self):
        from distca.attention.reference import ReferenceKernel

        self._kernel, self.calls = ReferenceKernel(), 0

    def forward(self, *arguments):
        self.calls += 1
        return self._kernel.forward(*arguments)

    def backward(self, *arguments):
        return self._kernel.backward(*arguments)


def _run(levels):
    """Per level of recomputation: calls of each part in one step, and the order of transfers and computation."""
    warnings.filterwarnings("ignore")
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    from distca.runtime import AttentionPool
    from distca.runtime.timeline import Timeline
    from distca.transport import choose_transport
    from megatron_patches.groups import initialize_model_parallel, server_pool_group
    from megatron_patches.parity import harness as parity
    from megatron_patches.training_step import run_micro_batches, wrap_for_data_parallel

    results = {}
    for level in levels:
        case = parity.ParityCase(micro_batches=MICRO_BATCHES, recompute=level)
        initialize_model_parallel(1, 1, case.seed)
        kernel, timeline, calls = _Counted(), Timeline(CPU), {"mlp": 0, "qkv": 0}
        pool = AttentionPool(choose_transport("auto", server_pool_group()), kernel, timeline, case.backward)
        gpt = parity.build(case, torch.float32, "disaggregated", pool=pool)

        def count(part, calls=calls):
            calls[part] += 1

        for layer in gpt.decoder.layers:
            layer.mlp.register_forward_hook(lambda *_, count=count: count("mlp"))
            layer.self_attention.linear_qkv.register_forward_hook(lambda *_, count=count: count("qkv"))
        model = wrap_for_data_parallel(gpt, distributed_optimizer=False)
        batches = [batch for batch, _ in parity._batches(case, pool, CPU)]
        timeline.start_recording()
        run_micro_batches(model, batches)
        trained = dict(calls)
        model.eval()
        run_micro_batches(model, batches, forward_only=True)
        validated = {part: calls[part] - trained[part] for part in calls}
        results[level] = (trained, validated, kernel.calls, timeline.order)
    return results


def test_each_level_recomputes_its_part_and_moves_no_transfer():
    once = len(MICRO_BATCHES) * HALVES * 2  # layers
    for results in run_ranks(2, _run, ["none", "mlp", "all"]):
        again = {"none": (), "mlp": ("mlp",), "all": ("mlp", "qkv")}
        for level, (trained, validated, served, order) in results.items():
            assert trained == {part: 2 * once if part in again[level] else once for part in trained}, level
            assert validated == dict.fromkeys(validated, once), "validation recomputes nothing"
            assert served == results["none"][2], "core attention is never recomputed"
            if level != "all":
                assert order == results["none"][3] and order, level


@pytest.mark.parametrize(
    ("granularity", "modules", "segments", "said"),
    [
        ("full", None, False, "recompute_granularity is 'full', but core attention is never recomputed"),
        ("selective", ["core_attn"], False, r"recompute_modules is \['core_attn'\]"),
        ("selective", ["mlp", "layernorm"], False, "recompute_segments to recompute everything"),
        ("selective", ["mlp"], True, "do without recompute_segments"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(granularity, modules, segments, said):
    from megatron.core.transformer import TransformerConfig

    from megatron_patches.support import check_recomputation

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    config.recompute_granularity, config.recompute_modules = granularity, modules
    with pytest.raises(SupportError, match=said):
        check_recomputation(config, segments)
