"""What each level of recomputation computes again, that transfers stay where they are, that host memory changes no bit,
that frozen weights change no other's gradient, and what is refused."""

from dataclasses import replace

import pytest
import torch

from distca.device.offload import WINDOW
from distca.errors import SupportError
from distca.testing.ranks import run_ranks
from tests.megatron_patches import small_cases

MICRO_BATCHES = ((13, 7, 1, 29, 3), (50, 2))
HALVES, LAYERS = 2, 4


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
    from distca.parity.cases import ParityCase
    from megatron_patches import pool
    from megatron_patches.training.training_step import summed_loss_step

    results = {}
    for level in levels:
        kernel, calls = _Counted(), {"mlp": 0, "qkv": 0}
        pool.choose_kernel = lambda *_, kernel=kernel, **__: kernel
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


def _offloaded():
    """Without and with host memory: losses and gradients of one step, and what was parked by layer of the graph."""
    small_cases.on_cpu()
    from distca.parity.cases import ParityCase, ParityShape
    from megatron_patches.training.training_step import summed_loss_step

    found = []
    shape = ParityShape(layers=LAYERS)
    case = ParityCase(micro_batches=MICRO_BATCHES, shape=shape, backward="resend", recompute="all")
    for offload in (False, True):
        cad, model, step = small_cases.ready(replace(case, offload=offload))
        model.eval()
        cad.forward_backward(step, summed_loss_step, model, forward_only=True)
        model.train()
        parking, counts = cad.pool.offload, {}
        if parking is not None:
            counts["in evaluation"] = parking._memory.size
            copy = parking._copy

            def counted(entry, out, copy=copy, counts=counts):
                counts[out] = counts.get(out, 0) + 1
                copy(entry, out)

            parking._copy = counted
        reports = cad.forward_backward(step, summed_loss_step, model)
        gradients = {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}
        if parking is not None:
            counts["left"] = len(parking._alive) + len(parking._leaving)
        found.append((reports, gradients, counts))
    return found


def _frozen_embedding():
    """Gradients without an embedding that learns: without recomputation, and with it, disaggregated and at home."""
    from distca.parity.cases import ParityCase
    from megatron_patches.layers.full_recompute import recompute_layers
    from megatron_patches.training.training_step import summed_loss_step

    found = []
    for level, disaggregate in (("none", True), ("all", True), ("all", False)):
        case = ParityCase(micro_batches=((13, 12, 25),), recompute=level)  # half of it whole documents
        cad, model, step = small_cases.ready(case, disaggregate=disaggregate, frozen=("embedding",))
        if not disaggregate:
            recompute_layers(model.module.decoder)
        cad.forward_backward(step, summed_loss_step, model)
        found.append({name: each.main_grad.clone() for name, each in model.named_parameters() if each.requires_grad})
    return found


def _few_trained():
    """By what is trained: gradients of it, where all other weights are trained too, and where they are frozen."""
    import torch.distributed as dist

    from distca.parity.cases import ParityCase
    from distca.parity.experts import expert_case
    from megatron_patches.training.training_step import summed_loss_step

    documents, others = ((13, 12, 25),), ("embedding", "attention.linear", "norm", "output", "router")
    mine = ("",) if dist.get_rank() == 0 else others  # rank 0 freezes everything
    cases = {
        "MLPs": (ParityCase(micro_batches=documents, recompute="mlp"), others),
        "MLPs at home": (ParityCase(micro_batches=documents, recompute="mlp"), others),
        "sinks": (ParityCase(micro_batches=documents, config={"softmax_type": "learnable"}), (*others, "mlp")),
        "experts of a rank": (expert_case("softmax behind the choice", ep=2, micro_batches=documents), mine),
    }
    cases["recomputed experts of a rank"] = (replace(cases["experts of a rank"][0], recompute="mlp"), mine)
    found = {}
    for what, (case, frozen) in cases.items():
        gradients = []
        for each in ((), frozen):
            cad, model, step = small_cases.ready(case, frozen=each, disaggregate=what != "MLPs at home")
            cad.forward_backward(step, summed_loss_step, model)
            gradients.append({n: p.main_grad.clone() for n, p in model.named_parameters() if p.requires_grad})
        found[what] = gradients
    return found


def _kept_outputs():
    """By way of keeping outputs: reports, gradients of one step, and how many outputs were forgotten in its forward."""
    small_cases.on_cpu()
    from distca.parity.cases import ParityCase
    from megatron_patches.layers import layer
    from megatron_patches.layers.layer import keep_outputs_of
    from megatron_patches.patches import fused_ops
    from megatron_patches.training.training_step import summed_loss_step

    forgotten, forget = [], layer.forget_until_backward
    for module in (layer, fused_ops):
        module.forget_until_backward = lambda *arguments: (forgotten.append(1), forget(*arguments))
    found = []
    for level, keep in (("none", False), ("none", True), ("mlp", False), ("all", None)):
        cad, model, step = small_cases.ready(ParityCase(micro_batches=MICRO_BATCHES, recompute=level))
        if keep is not None:
            keep_outputs_of(model, keep)
        forgotten.clear()
        reports = cad.forward_backward(step, summed_loss_step, model)
        found.append(
            (reports, {name: each.main_grad.clone() for name, each in model.named_parameters()}, len(forgotten))
        )
    return found


def _all(levels):
    return _run(levels), _offloaded(), _frozen_embedding(), _few_trained(), _kept_outputs()


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, _all, ["none", "mlp", "all"])


def test_host_memory_changes_no_bit(ranks):
    for _, ((losses, gradients, _), (again, as_well, counts)), *_ in ranks:
        assert all(map(torch.equal, losses, again))
        assert all(torch.equal(gradients[name], as_well[name]) for name in gradients)
        # q, kv, o, log-sum-exp and the residual stream of every half and layer, of which the last few stay.
        parked = len(MICRO_BATCHES) * HALVES * LAYERS * 5
        assert counts == {
            "in evaluation": 0,
            True: parked,
            False: parked - len(MICRO_BATCHES) * WINDOW,
            "left": 0,
        }


def test_layers_over_a_frozen_embedding_learn_with_recomputation_too(ranks):
    for *_, (kept, *recomputed), _, _ in ranks:
        assert len(kept) > 2
        for gradients in recomputed:
            for name, gradient in kept.items():
                assert torch.dist(gradients[name], gradient) <= 1e-5 * gradient.norm(), name
                assert gradient.norm() > 0


@pytest.mark.parametrize("what", ["MLPs", "MLPs at home", "sinks", "experts of a rank", "recomputed experts of a rank"])
def test_weights_learn_alone_as_they_do_beside_others(ranks, what):
    counts = []
    for *_, found, _ in ranks:
        beside, alone = found[what]
        counts.append(len(alone))
        for name, gradient in alone.items():
            assert torch.dist(gradient, beside[name]) <= 1e-5 * beside[name].norm() and gradient.norm() > 0, name
    assert counts == {"MLPs": [4, 4], "MLPs at home": [4, 4], "sinks": [2, 2]}.get(what, [0, 16])


def test_kept_outputs_change_no_bit_and_recomputed_segments_keep_theirs(ranks):
    halves = len(MICRO_BATCHES) * HALVES * 2  # layers
    for *_, found in ranks:
        reports, gradients, _ = found[0]
        assert [count for *_, count in found] == [3 * halves, 0, 2 * halves, 0]
        for again, others, _ in found[1:3]:
            assert all(map(torch.equal, reports, again))
            assert all(torch.equal(gradients[name], others[name]) for name in gradients)


def test_each_level_recomputes_its_part_and_moves_no_transfer(ranks):
    once = len(MICRO_BATCHES) * HALVES * 2  # layers
    for results, *_ in ranks:
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
        ("full", None, False, "recompute_granularity is 'full', but .* takes the place of full"),
        ("selective", ["core_attn"], False, r"recompute_modules is \['core_attn'\]"),
        ("selective", ["mlp", "layernorm"], False, r"give CAD\(recompute='all'\) to recompute"),
        ("selective", ["mlp"], True, r"or give CAD\(recompute='none'\)"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(granularity, modules, segments, said):
    from megatron.core.transformer import TransformerConfig

    from megatron_patches.support.config_fields import check_recomputation

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    config.recompute_granularity, config.recompute_modules = granularity, modules
    with pytest.raises(SupportError, match=said):
        check_recomputation(config, segments)


def test_a_recomputed_mlp_with_biases_is_refused_in_megatrons_own_layers(monkeypatch):
    """Its backward calls itself forever."""
    from megatron.core.transformer import TransformerConfig

    from megatron_patches import api
    from megatron_patches.arguments import CadArguments

    monkeypatch.setattr(api, "check_groups", lambda _: None)
    fields = {"calculate_per_token_loss": True, "normalization": "RMSNorm", "hidden_dropout": 0.0}
    fields |= {"attention_dropout": 0.0, "recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    for biases, disaggregate in ((True, True), (False, False), (True, False)):
        config = TransformerConfig(**sizes, **fields, add_bias_linear=biases)
        given = CadArguments(tokens_per_rank=1, disaggregate=disaggregate)
        if disaggregate or not biases:
            api._check(config, given)
            continue
        with pytest.raises(SupportError, match="never ends: set recompute_granularity to None, or `disaggregate` to"):
            api._check(config, given)


def test_outputs_of_what_is_computed_again_are_not_kept():
    from megatron.core.transformer import TransformerConfig

    from megatron_patches.arguments import check_keep_outputs

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    check_keep_outputs("none", config)
    with pytest.raises(SupportError, match="keep_outputs is True, but recompute is 'all': set it to 'none', or keep"):
        check_keep_outputs("all", config)
    config.recompute_granularity = "selective"
    with pytest.raises(SupportError, match="but recompute_granularity is 'selective': set it to None"):
        check_keep_outputs("none", config)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"disaggregate": False}, "disaggregate is False: set it to True, or offload to False"),
        ({"recompute": "none"}, "recompute is 'none': set it to 'all', or offload to False"),
        ({"backward": "keep"}, "backward is 'keep': set it to 'resend', or offload to False"),
        ({"stages": 2}, "there are 2 pipeline stages"),
    ],
)
def test_what_cannot_wait_in_host_memory_is_refused(other, said):
    from megatron_patches.arguments import check_offload

    served = {"disaggregate": True, "recompute": "all", "backward": "resend", "stages": 1}
    check_offload(**served)
    with pytest.raises(SupportError, match=f"offload is True, but {said}"):
        check_offload(**served | other)
