"""Gradients that are reduced during backward equal those reduced after it, with nested backwards and many buckets."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distca.testing.ranks import run_ranks
from distca.testing.reference_attention import relative_error
from tests.megatron_patches import small_cases

pytestmark = pytest.mark.slow

MICRO_BATCHES = ((13, 7, 1, 29, 3), (50, 2), (1,))
CPU = torch.device("cpu")


def _gradients(monkeypatch, case, overlap, distributed_optimizer, products=True):
    """Of two global batches: the loss, all gradients by name, and how many touches the first reduction was before."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    from megatron_patches.training import training_step

    events = []
    start, ready = Group.start_grad_sync, Group.register_grad_ready
    monkeypatch.setattr(Group, "start_grad_sync", lambda *a, **k: (events.append("start"), start(*a, **k))[1])
    monkeypatch.setattr(Group, "register_grad_ready", lambda *a, **k: (events.append("touch"), ready(*a, **k))[1])
    monkeypatch.setattr(training_step, "_overlaps_reduction", lambda: overlap)
    monkeypatch.setattr(training_step, "_BUCKET_PARAMETERS", 1000)

    cad, model, planned = small_cases.ready(
        case, distributed_optimizer=distributed_optimizer, fuse_accumulation=products
    )
    steps = []
    for number in range(2):
        events.clear()
        # Another order of micro-batches in each step, so that the last one is never the same.
        step = replace(planned, batches=planned.batches[number:] + planned.batches[:number])
        loss, _ = _loss_and_tokens(cad, model, step)
        first = events.index("start")
        steps.append((loss, _reduced(model, distributed_optimizer), events[first:].count("touch")))
    return steps


def _loss_and_tokens(cad, model, step):
    from megatron_patches.training.training_step import sum_over_ranks, summed_loss_step

    return sum_over_ranks(cad.forward_backward(step, summed_loss_step, model), CPU)


def _reduced(model, distributed_optimizer):
    """Gradients by name, put together from the ranks' shards where each rank holds only its shard of a bucket's sum."""
    import torch.distributed as dist

    gradients = {}
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    for buffer in model.buffers:
        whole = buffer.grad_data.clone()
        if distributed_optimizer:
            ranks, rank = model.dp_group.size(), model.dp_group.rank()
            whole.zero_()
            for bucket in buffer.buckets:
                size = bucket.grad_data.numel() // ranks
                mine = slice(bucket.offset + rank * size, bucket.offset + (rank + 1) * size)
                whole[mine] = buffer.grad_data[mine]
            dist.all_reduce(whole, group=model.dp_group)
        for parameter, (start, end, _) in buffer.param_index_map.items():
            gradients[names[parameter]] = whole[start:end]
    return gradients


def _shares(distributed_optimizer):
    """How many elements of each bucket this rank scales, and how many the bucket has."""
    small_cases.on_cpu()
    from distca.parity.cases import ParityCase
    from megatron_patches.training.training_step import _reduced_gradients

    case = ParityCase(micro_batches=MICRO_BATCHES)
    _, model, _ = small_cases.ready(case, distributed_optimizer=distributed_optimizer)
    buckets = [bucket for group in model.bucket_groups for bucket in group.buckets]
    return [
        (each.numel(), bucket.grad_data.numel())
        for each, bucket in zip(_reduced_gradients(model), buckets, strict=True)
    ]


@pytest.mark.parametrize("distributed_optimizer", [True, False])
def test_a_rank_divides_the_gradients_that_its_optimizer_reads(distributed_optimizer):
    for rank in run_ranks(2, _shares, distributed_optimizer):
        assert rank and all(whole == mine * (1 + distributed_optimizer) for mine, whole in rank)


CASES = (
    ({"recompute": "mlp", "tie_embeddings": True}, True),
    ({"recompute": "none", "backward": "resend"}, False),
    ({"recompute": "all", "tp": 2}, False),
)
"""What differs from the usual case, and whether ranks share the optimizer."""


def _in_three_ways():
    """Every case with gradients reduced during backward and after it, and with weight gradients that megatron adds up
    instead of the matrix products."""
    small_cases.on_cpu()
    from distca.parity.cases import ParityCase

    results = []
    for changes, distributed_optimizer in CASES:
        case, ways = replace(ParityCase(micro_batches=MICRO_BATCHES), **changes), []
        for overlap, products in ((True, True), (False, True), (True, False)):
            with pytest.MonkeyPatch.context() as monkeypatch:
                ways.append(_gradients(monkeypatch, case, overlap, distributed_optimizer, products))
        results.append(ways)
    return results


@pytest.fixture(scope="module")
def ways():
    return run_ranks(2, _in_three_ways)[0]


def test_overlapped_reduction_changes_no_bit(ways):
    for case, (overlapped, after, _) in zip(CASES, ways, strict=True):
        for number, (ours, theirs) in enumerate(zip(overlapped, after, strict=True)):
            assert ours[0] == theirs[0], case
            assert ours[1].keys() == theirs[1].keys()
            for name, expected in theirs[1].items():
                assert torch.equal(ours[1][name], expected), (case, number, name)
            # The first global batch only counts; later ones reduce while there are touches to come.
            assert (ours[2] > 0) == (number > 0) and theirs[2] == 0, case


def test_gradients_added_in_products_are_the_same(ways):
    for case, (products, _, separate) in zip(CASES, ways, strict=True):
        for ours, theirs in zip(products, separate, strict=True):
            assert ours[0] == theirs[0] and ours[2] == theirs[2], case
            for name, expected in theirs[1].items():
                assert relative_error(ours[1][name], expected) < 1e-6, (case, name)


class _HostReads(TorchDispatchMode):
    """Counts reads of a number by the host, for each of which a GPU would be waited for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def _ready(**case):
    small_cases.on_cpu()
    from distca.parity.cases import ParityCase

    return small_cases.ready(ParityCase(**case))


def _host_reads(recompute):
    ready = _ready(micro_batches=MICRO_BATCHES, recompute=recompute)
    _loss_and_tokens(*ready)  # before their first step ranks tell each other whether they refuse it
    with _HostReads() as reads:
        _loss_and_tokens(*ready)
    with reads:
        torch.ones(()).item()
    return reads.count - 1


def test_the_host_reads_no_number_of_a_step():
    """So it is done queueing the step, and plans the next one, long before a GPU is done computing it."""
    for recompute in ("none", "mlp"):
        assert run_ranks(2, _host_reads, recompute) == [0, 0]


def _gradients_of_two_steps(micro_batches):
    """(loss, tokens, gradients) of the same step twice, without an optimizer in between."""
    cad, model, step = _ready(micro_batches=micro_batches)
    from distca.parity import unmodified
    from distca.parity.cases import ParityCase
    from megatron_patches.training.training_step import wrap_for_data_parallel

    narrow = wrap_for_data_parallel(
        unmodified.unmodified_model(ParityCase(micro_batches=micro_batches), torch.bfloat16), False
    )
    for parameter in narrow.parameters():
        assert parameter.dtype == torch.bfloat16 and parameter.main_grad.dtype == torch.float32
    narrow = wrap_for_data_parallel(narrow.module.module, False, torch.bfloat16)
    assert {parameter.main_grad.dtype for parameter in narrow.parameters()} == {torch.bfloat16}
    steps = []
    for _ in range(2):
        figures = _loss_and_tokens(cad, model, step)
        steps.append((*figures, [p.main_grad.clone() for p in model.module.parameters()]))
        for parameter in model.module.parameters():
            parameter.grad = None  # which an optimizer does
    return steps


@pytest.mark.parametrize("micro_batches", [MICRO_BATCHES, ((1,), (1, 1))])
def test_a_step_forgets_the_gradients_before_it_and_needs_no_target(micro_batches):
    targets = sum(length - 1 for lengths in micro_batches for length in lengths)
    for first, second in run_ranks(1, _gradients_of_two_steps, micro_batches):
        assert first[1] == second[1] == targets and first[0] == second[0]
        for once, again in zip(first[2], second[2], strict=True):
            assert torch.equal(once, again) and bool(once.any()) == (targets > 0)
            assert once.isfinite().all()


def test_a_weight_without_a_gradient_in_the_first_step_is_refused_as_such():
    from types import SimpleNamespace

    from distca.errors import SupportError
    from megatron_patches.training.training_step import _check_uses

    used, unused = object(), object()
    group = SimpleNamespace(
        per_param_grad_ready_counts={used: 2},
        golden_per_param_grad_ready_counts={},
        is_first_batch=True,
        params={used, unused},
    )
    model = SimpleNamespace(
        bucket_groups=[group],
        expert_parallel_bucket_groups=[],
        ddp_config=SimpleNamespace(overlap_grad_reduce=True),
        named_parameters=lambda: [("module.used", used), ("module.unused", unused)],
    )
    with pytest.raises(SupportError, match=r"^unused got 0 gradients .*, and 1 or more are needed in the first step: "):
        _check_uses(model)
