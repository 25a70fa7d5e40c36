"""What each level of recomputation computes again, that transfers stay where they are, and what is refused."""

import pytest

from distca.errors import SupportError
from distca.testing.ranks import run_ranks
from tests.megatron_patches import small_cases

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
    small_cases.on_cpu()
    from megatron_patches import api
    from megatron_patches.parity.harness import ParityCase
    from megatron_patches.training_step import summed_loss_step

    results = {}
    for level in levels:
        kernel, calls = _Counted(), {"mlp": 0, "qkv": 0}
        api.choose_kernel = lambda *_, kernel=kernel, **__: kernel
        cad, model, step = small_cases.ready(ParityCase(micro_batches=MICRO_BATCHES, recompute=level))

        def count(part, calls=calls):
            calls[part] += 1

        for layer in model.module.decoder.layers:
            layer.mlp.register_forward_hook(lambda *_, count=count: count("mlp"))
            layer.self_attention.linear_qkv.register_forward_hook(lambda *_, count=count: count("qkv"))
        cad.pool.timeline.start_recording()
        cad.forward_backward(step, summed_loss_step, model)
        trained = dict(calls)
        model.eval()
        cad.forward_backward(step, summed_loss_step, model, forward_only=True)
        validated = {part: calls[part] - trained[part] for part in calls}
        results[level] = (trained, validated, kernel.calls, cad.pool.timeline.order)
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

    from megatron_patches.support.config_fields import check_recomputation

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    config.recompute_granularity, config.recompute_modules = granularity, modules
    with pytest.raises(SupportError, match=said):
        check_recomputation(config, segments)
