"""What layers of Megatron's configuration multiply rows with is what the simulator counts of the same shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distca.models.experts import Experts
from distca.models.hybrid import Hybrid
from distca.models.shape import ModelShape
from distca.plan.cost.linear import LinearRate, between_attentions
from distca.simulate import load_rates
from distca.simulate.layer_seconds import LayerSeconds
from tests.megatron_patches import small_cases

NET = Hybrid(pattern="G-G-G-*-", key_heads=4, value_heads=8, key_dim=16, value_dim=32, output_gate=True)
SHAPE = ModelShape(layers=16, hidden=64, ffn=96, heads=8, kv_heads=2, head_dim=16, hybrid=NET)
EXPERTS = Experts(count=4, topk=2, ffn=40, shared_ffn=24, shared_gate=True)
SHAPES = {
    "gated delta nets": SHAPE,
    "mamba, no MLP behind some": replace(SHAPE, layers=12, hybrid=replace(NET, pattern="M*-M-*", output_gate=False)),
    "experts": replace(SHAPE, layers=12, hybrid=replace(NET, pattern="GE*-*E"), experts=EXPERTS),
    "attention alone": replace(SHAPE, layers=5, hybrid=Hybrid()),
}
RATE = LinearRate(2.0, 5.0)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("recompute", ["none", "mlp", "all"])
def test_between_attentions(name: str, recompute: str) -> None:
    small_cases.on_cpu()
    from megatron.core import parallel_state

    from megatron_patches.model.gpt import transformer_config
    from megatron_patches.steps.layer_work import layer_works
    from megatron_patches.versions import has_gated_delta_net

    shape, tp = SHAPES[name], 2
    pattern = shape.hybrid.symbols(shape.layers)
    if pattern and not has_gated_delta_net():
        pytest.skip("megatron-core has no such layers")
    with pytest.MonkeyPatch.context() as patch:
        for size, ranks in (("tensor", tp), ("pipeline", 1)):
            patch.setattr(parallel_state, f"get_{size}_model_parallel_world_size", lambda ranks=ranks: ranks)
        config = transformer_config(shape, torch.float32, recompute_mlp=recompute == "mlp")
        found = between_attentions(RATE, layer_works(config, pattern, recompute == "all"), tp)
    seconds = LayerSeconds(shape, shape.units, tp, recompute, False, RATE, RATE, load_rates(), 0.0)  # type: ignore[arg-type]
    wanted = seconds.non_attention()
    assert (found.forward, found.backward) == pytest.approx((wanted.forward, wanted.backward))
    assert found.forward > 0


@pytest.mark.parametrize("layers", ["*--*-*", "-*-*-*"])
def test_all_mlps_count(layers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_cases.on_cpu()
    from megatron.core import parallel_state

    from megatron_patches.model.gpt import transformer_config
    from megatron_patches.steps.layer_work import layer_works, weights_of_mlp
    from megatron_patches.versions import has_gated_delta_net

    if not has_gated_delta_net():
        pytest.skip("megatron-core has no such layers")
    for size in ("tensor", "pipeline"):
        monkeypatch.setattr(parallel_state, f"get_{size}_model_parallel_world_size", lambda: 1)
    shape = replace(SHAPE, layers=6, hybrid=replace(NET, pattern=layers, output_gate=False))
    pattern = shape.hybrid.symbols(shape.layers)
    config = transformer_config(shape, torch.float32)
    two, one, none = layer_works(config, pattern, False)
    assert two.weights - one.weights == one.weights - none.weights == weights_of_mlp(config)


def test_mlps_before_a_stage_s_first_unit_count_to_it() -> None:
    small_cases.on_cpu()
    from megatron_patches.steps.layer_work import _letters_of_mlps

    assert _letters_of_mlps("-*EG|-*EG") == ["-E", "", "-E", ""]
    assert _letters_of_mlps("M-G") == ["-", ""]


def test_only_modules_that_the_configuration_names_are_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    small_cases.on_cpu()
    from megatron.core import parallel_state

    from megatron_patches.model.gpt import transformer_config
    from megatron_patches.steps.layer_work import expert_weights, layer_works, weights_of_mlp

    for size in ("tensor", "pipeline"):
        monkeypatch.setattr(parallel_state, f"get_{size}_model_parallel_world_size", lambda: 1)
    shape = replace(SHAPE, layers=2, hybrid=Hybrid(), experts=EXPERTS)
    config = transformer_config(shape, torch.float32, recompute_mlp=True)
    config.moe_layer_freq = [0, 1]
    dense, experts = weights_of_mlp(config), expert_weights(config)
    for modules, of_mlp, of_experts in ((["mlp"], dense, 0), (["moe"], 0, experts), (["mlp", "moe"], dense, experts)):
        config.recompute_modules = modules
        assert [each.recomputed for each in layer_works(config, "*-*E", False)] == [of_mlp, of_experts]
        assert [each.recomputed for each in layer_works(config, "", False)] == [(of_mlp + of_experts) // 2] * 2
