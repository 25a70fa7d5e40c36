"""Recurrent layers against those of transformers, whose layers are of one document: Nemotron-H's Mamba-2, for which
Megatron-Core asks for a GPU, and Qwen3.5's gated delta net."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from distca.testing.ranks import run_ranks
from megatron_patches.versions import has_gated_delta_net

ROWS = 37

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_gated_delta_net(), reason="HybridModel has been there since Megatron-Core 0.19"),
]


def _mamba(mixer: Any) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Transformers' mixer with the weights of ours, and its parameters by our names."""
    from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    own = mixer.config
    sizes = {"mamba_num_heads": own.mamba_num_heads, "mamba_head_dim": own.mamba_head_dim}
    sizes |= {"n_groups": own.mamba_num_groups, "ssm_state_size": own.mamba_state_dim, "time_step_min": 0.0}
    config = NemotronHConfig(hidden_size=own.hidden_size, layers_block_type=["mamba", "attention"], **sizes)
    theirs = NemotronHMamba2Mixer(config, layer_idx=0)
    return theirs, {
        "in_proj.weight": theirs.in_proj.weight,
        "conv1d_weight": theirs.conv1d.weight,
        "conv1d_bias": theirs.conv1d.bias,
        "dt_bias": theirs.dt_bias,
        "A_log": theirs.A_log,
        "D": theirs.D,
        "norm.weight": theirs.norm.weight,
        "out_proj.weight": theirs.out_proj.weight,
    }


def _delta_net(net: Any) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    sizes = {f"linear_{name}": getattr(net.config, f"linear_{name}") for name in names}
    config = Qwen3_5TextConfig(hidden_size=net.config.hidden_size, rms_norm_eps=net.config.layernorm_epsilon, **sizes)
    theirs = Qwen3_5GatedDeltaNet(config, layer_idx=0)
    parts = (theirs.in_proj_qkv, theirs.in_proj_z, theirs.in_proj_b, theirs.in_proj_a)
    projected = torch.cat([part.weight.data for part in parts])
    for part, rows in zip(parts, projected.split([len(part.weight) for part in parts]), strict=True):
        part.weight.data = rows  # so that what is copied into the whole is in the parts
    return theirs, {
        "in_proj.weight": projected,
        "conv1d.weight": theirs.conv1d.weight,
        "dt_bias": theirs.dt_bias,
        "A_log": theirs.A_log,
        "out_norm.weight": theirs.norm.weight,
        "out_proj.weight": theirs.out_proj.weight,
    }


def _differences() -> list[dict[str, float]]:
    """Relative norms of the differences of outputs and of input gradients, by layer."""
    warnings.filterwarnings("ignore")
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    from distca.device.host_to_device import uploading
    from distca.parity import disaggregated, unmodified
    from distca.plan import lay_out
    from distca.runtime.recurrent_call import recurrent_core
    from distca.runtime.recurrent_routes import RecurrentRoutes
    from distca.testing.reference_attention import relative_error
    from tests.parity.hybrid_cases import hybrid_model_cases

    found = []
    for number, make in ((3, _mamba), (0, _delta_net)):
        case = replace(hybrid_model_cases()[number], tp=1)
        weights = {name: p.detach() for name, p in unmodified.unmodified_model(case, torch.float32).named_parameters()}
        how = torch.float32, torch.device("cpu"), "reference", weights
        cad, model = disaggregated.attached(case, *how, reduced=False)
        layer = model.decoder.layers[0]
        mixer = layer.mixer if number == 3 else layer.self_attention
        theirs, named = make(mixer)
        theirs.eval()
        for name, parameter in mixer.named_parameters():
            named[name].data.copy_(parameter.data.view(named[name].shape))
        ours = torch.randn(ROWS, 1, case.shape.hidden, generator=torch.Generator().manual_seed(5)).requires_grad_()
        expected_of = ours.detach().clone().requires_grad_()
        layer.input_layernorm.forward = lambda x: x  # theirs is called without a norm
        layer.input_layernorm.beside = lambda x, branch=None: (x, x + 0.0)
        layer.keeps_outputs = True
        (hidden, gate, mixed, g, beta), what = layer.pre(ours), layer.recurrence
        with uploading(torch.device("cpu")) as upload:
            (routes,) = RecurrentRoutes.of(lay_out(torch.tensor([ROWS]).numpy(), 1), 0, what.halo_rows, upload)
        core = recurrent_core(cad.pool, routes, what, layer.core_kernel, 0, layer.core_parameters, mixed, g, beta)
        (output, _), _ = layer.mixed(core, hidden, gate)
        expected = theirs(expected_of.transpose(0, 1)).transpose(0, 1)
        weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(6))
        (output * weight).sum().backward()
        (expected * weight).sum().backward()
        assert ours.grad is not None and expected_of.grad is not None
        found.append(
            {"output": relative_error(output, expected), "gradient": relative_error(ours.grad, expected_of.grad)}
        )
    return found


def test_mamba_and_gated_delta_net_are_those_of_transformers() -> None:
    for each in run_ranks(1, _differences)[0]:
        assert max(each.values()) <= 1e-5, each
