"""A hook on any module inside a layer runs, or is refused before the step."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from distca.errors import SupportError
from distca.testing.ranks import run_ranks
from megatron_patches.support.attached import never_called
from tests.megatron_patches import small_cases

NO_MODULES = ("IdentityOp", "IdentityFuncOp", "ModuleList")
"""Classes of modules that compute nothing."""


def _never_ran(ddp: Any, train: Any) -> tuple[list[str], list[str]]:
    """The modules of the first layer whose hooks are refused, and those whose hooks do not run nevertheless."""
    ran, hooks = set[str](), {}
    for name, module in ddp.module.named_modules():
        if name.startswith("decoder.layers.0") and type(module).__name__ not in NO_MODULES:
            hooks[name] = module.register_forward_hook(lambda *_, name=name: ran.add(name))
    refused = []
    while True:
        try:
            train()
            break
        except SupportError as error:
            refused.append(str(error).split()[0])
            hooks.pop(refused[-1]).remove()
    for hook in hooks.values():
        hook.remove()
    return sorted(each.removeprefix("decoder.layers.0") for each in refused), sorted(set(hooks) - ran)


def _gradient(ddp: Any, train: Any) -> torch.Tensor:
    train()
    gradient: torch.Tensor = ddp.module.decoder.layers[0].self_attention.linear_qkv.weight.main_grad.clone()
    return gradient


def _doubled(ddp: Any, train: Any) -> bool:
    """Whether a hook, or another forward, that doubles a norm's output gives the next layer the gradient of a doubled
    weight."""
    norm = ddp.module.decoder.layers[0].input_layernorm
    hook = norm.register_forward_hook(lambda _, __, output: 2 * output)
    hooked = _gradient(ddp, train)
    hook.remove()
    norm.forward = lambda x: 2 * type(norm).forward(norm, x)
    replaced = _gradient(ddp, train)
    del norm.forward
    norm.weight.data *= 2
    expected = _gradient(ddp, train)
    return torch.equal(hooked, expected) and torch.equal(replaced, expected)


def _hooked() -> list[tuple[Any, ...]]:
    small_cases.on_cpu()
    from distca.parity.cases import ParityCase, ParityShape
    from distca.parity.experts import expert_case
    from megatron_patches.patches import norms
    from megatron_patches.training.training_step import summed_loss_step

    dense = ParityCase(micro_batches=((13, 7, 1),), shape=ParityShape(layers=1))
    found: list[tuple[Any, ...]] = []
    # As on a GPU, where one kernel adds to the residual stream and normalises.
    with patch.object(norms, "has_kernels", lambda x, operation: operation == "RMSNorm"):
        for case in (dense, expert_case("auxiliary loss, shared expert")):
            cad, ddp, step = small_cases.ready(case)
            train = partial(cad.forward_backward, step, summed_loss_step, ddp)
            found.append((*_never_ran(ddp, train), _doubled(ddp, train)))
    return found


def test_hooks_run_or_are_refused() -> None:
    (((dense, *of_dense), (experts, *of_experts)),) = run_ranks(1, _hooked)
    assert dense == ["", ".self_attention", ".self_attention.core_attention"]
    of_mlp = [name for name in experts if name.startswith(".mlp")]
    assert ".mlp" in of_mlp and sorted({*experts} - {*of_mlp}) == dense
    assert of_dense == of_experts == [[], True]


def test_the_activation_of_a_mamba_mixer_is_not_called() -> None:
    assert "mixer.act" in never_called(True, hybrid=True, own_layers=True)
