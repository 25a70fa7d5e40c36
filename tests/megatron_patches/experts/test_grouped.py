"""Megatron's experts all at once, held against the same modules one after the other."""

from itertools import product

import pytest
import torch

from distca.testing.ranks import run_ranks
from tests.megatron_patches.small_cases import on_cpu

ROWS = ([5, 0, 1, 18, 0, 0, 2, 3], [0, 0, 24, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0], [0] * 8)


def _experts(dtype, router="softmax behind the choice"):
    from distca.parity import unmodified
    from distca.parity.experts import expert_case

    return unmodified.unmodified_model(expert_case(router), dtype).decoder.layers[0].mlp.experts


def _found(experts, rows, compute):
    """The output, and gradients of rows, probabilities and weights."""
    generator = torch.Generator().manual_seed(0)
    dtype, hidden, count = next(experts.parameters()).dtype, experts.config.hidden_size, sum(rows)
    x, probs, d_out = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((count, hidden), (count,), (count, hidden))
    )
    inputs = [x.requires_grad_(), probs.requires_grad_(), *experts.parameters()]
    out = compute(x, probs)
    return [out, *torch.autograd.grad(out, inputs, d_out)]


def _both(experts, rows):
    """What is found all at once and one after the other."""
    from megatron_patches.experts.grouped import FoundExperts, Groups, computed

    counts = torch.tensor(rows)
    groups = Groups(rows, counts.cumsum(0).int())
    at_once = _found(experts, rows, lambda x, probs: computed(FoundExperts.of(experts), groups, x, probs))
    return at_once, _found(experts, rows, lambda x, probs: experts(x, counts, probs)[0])


def _differences():
    """How far off anything is by type, and how often a layer is called that something listens to."""
    on_cpu()
    worst, calls = {}, []
    with_biases, limited = "biases, clamped", "a limit that Megatron's fused SwiGLU ignores"
    for dtype, how in product((torch.float32, torch.float64), (True, False, with_biases, limited)):
        experts = _experts(dtype, *[how] * (how == with_biases))
        experts.config.bias_activation_fusion = how in (True, limited)
        if how == limited:
            experts.config.activation_func_clamp_value = 0.02
        assert (experts.local_experts[0].linear_fc1.bias is not None) == (how == with_biases)
        for rows in ROWS:
            pairs = zip(*_both(experts, rows), strict=True)
            off = max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs)
            worst[dtype] = max(worst.get(dtype, 0.0), off)
    experts.local_experts[3].linear_fc2.register_forward_hook(lambda *_: calls.append(1))
    _both(experts, ROWS[0])
    return worst, len(calls)


def _as_ddp_lays_them_out(experts):
    """Moves weights to one memory, the last expert's first."""
    weights = [linear.weight for each in experts.local_experts for linear in (each.linear_fc1, each.linear_fc2)]
    memory = torch.empty(sum(each.numel() for each in weights), dtype=weights[0].dtype)
    places = memory.split([each.numel() for each in reversed(weights)])
    for weight, place in zip(reversed(weights), places, strict=True):
        place.copy_(weight.detach().flatten())
        weight.data = place.view_as(weight)


def _last_first():
    """Outputs and gradients of experts in their order and in the reverse; copies of weights that were made."""
    from megatron_patches.experts.grouped import FoundExperts, Groups, computed

    on_cpu()
    experts, rows, copied = _experts(torch.float32), ROWS[0], []
    stack = torch.stack

    def found():
        looked = FoundExperts.of(experts)
        order = rows[::-1] if looked.last_first else rows
        groups = Groups(order, torch.tensor(order).cumsum(0).int())
        turn = (lambda x: torch.cat(x.split(rows)[::-1])) if looked.last_first else (lambda x: x)
        back = (lambda x: torch.cat(x.split(order)[::-1])) if looked.last_first else (lambda x: x)
        out = _found(experts, rows, lambda x, probs: back(computed(looked, groups, turn(x), turn(probs))))
        return looked.last_first, out

    before, expected = found()
    _as_ddp_lays_them_out(experts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "stack", lambda *arguments: copied.append(1) or stack(*arguments))
        after, reverse = found()
    return before, after, len(copied), expected, reverse


def test_weights_that_lie_last_first_are_one_operand_without_a_copy():
    [(before, after, copied, expected, reverse)] = run_ranks(1, _last_first)
    assert not before and after and not copied
    for a, b in zip(expected, reverse, strict=True):
        assert (a - b).norm() <= 1e-6 * a.norm()


def test_experts_at_once_are_experts_one_after_the_other():
    [(worst, calls)] = run_ranks(1, _differences)
    assert worst[torch.float32] <= 1e-6 and worst[torch.float64] <= 1e-14
    assert calls == 2, "hooks are called"
