"""Rows on their way to experts: beside the other half's compute, with one question to the device in each forward."""

import os
import signal
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from distca.testing.ranks import RankFailure, run_ranks
from tests.megatron_patches.small_cases import on_cpu

pytestmark = pytest.mark.slow

LAYERS, MICRO_BATCHES = 2, 2
FORWARD = ["start 0", "start 1", "finish 0", "start 0", "finish 1", "start 1", "finish 0", "finish 1"]
"""Exchanges of a layer by half; backward is the mirror image."""
BACKWARD = ["start 1", "start 0", "finish 1", "start 1", "finish 0", "start 0", "finish 1", "finish 0"]


def _prepared(recompute):
    """A case of two layers with experts on two ranks, its CAD and its model in Megatron's DDP."""
    from distca.parity import disaggregated, experts, unmodified

    case = experts.expert_case("auxiliary loss, shared expert", ep=2, recompute=recompute)
    weights = {name: p.detach() for name, p in unmodified.unmodified_model(case, torch.float32).named_parameters()}
    cad, model = disaggregated.attached(case, torch.float32, torch.device("cpu"), "reference", weights)
    return case, cad, cad.data_parallel(model)


def _step(case, cad, ddp):
    from distca.parity.cases import case_documents
    from megatron_patches.training.training_step import summed_loss_step

    cad.forward_backward(cad.plan_step(case_documents(case)), summed_loss_step, ddp)


def _noted(monkeypatch):
    """A list of all exchanges to come, and one of what the device is asked."""
    from megatron_patches.experts import dispatch, exchange, layer

    events, asked, made = [], [], []
    start, finish, ask = exchange.Exchange.start, exchange.Exchange.finish, dispatch.asked

    def build(*arguments):
        made.append(exchange.Exchange(*arguments))
        made[-1].nano = (len(made) - 1) % 2
        return made[-1]

    def starting(self, tensors, to_experts):
        events.append(f"start {self.nano}")
        return start(self, tensors, to_experts)

    def finishing(self):
        events.append(f"finish {self.nano}")
        return finish(self)

    monkeypatch.setattr(layer, "Exchange", build)
    monkeypatch.setattr(exchange.Exchange, "start", starting)
    monkeypatch.setattr(exchange.Exchange, "finish", finishing)
    monkeypatch.setattr(dispatch, "asked", lambda counts: asked.append(1) or ask(counts))
    return events, asked


def _counts_kept(monkeypatch):
    """How many earlier functions that count a nano-batch's rows are still there at each call of a router."""
    from megatron_patches.experts.layer import BalancedRouter

    forward, counts, kept = BalancedRouter.forward, [], []

    def routed(self, *given):
        kept.append(sum(count() is not None for count in counts))
        found = forward(self, *given)
        counts.append(weakref.ref(found[-1]))
        return found

    monkeypatch.setattr(BalancedRouter, "forward", routed)
    return kept


def _orders():
    on_cpu()
    found = {}
    for recompute in ("none", "mlp", "all"):
        prepared = _prepared(recompute)
        with pytest.MonkeyPatch.context() as patch:
            (events, asked), kept = _noted(patch), _counts_kept(patch)
            _step(*prepared)
        found[recompute] = events, len(asked), max(kept)
    return found


def _dies(folder):
    """Rank 1 ends without a word on its way to experts; rank 0, which nobody ends, notes after how many seconds it
    knows."""
    on_cpu()
    from megatron_patches.experts import exchange

    prepared, rank, began = _prepared("none"), torch.distributed.get_rank(), []
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start = exchange.Exchange.start

    def starting(self, tensors, to_experts):
        began.append(time.monotonic())
        if rank == 1 and len(began) == 3:
            os._exit(9)
        return start(self, tensors, to_experts)

    exchange.Exchange.start = starting
    try:
        _step(*prepared)
    except RuntimeError:
        (folder / "seconds").write_text(str(time.monotonic() - began[2]))
        raise


def _as_lists(outputs, inputs, group, async_op):
    """Does what NCCL's all-to-all of lists does."""
    arrived = torch.cat(outputs)
    sizes = [len(each) for each in outputs], [len(each) for each in inputs]
    torch.distributed.all_to_all_single(arrived, torch.cat(inputs), *sizes, group=group)
    for into, part in zip(outputs, arrived.split(sizes[0]), strict=True):
        into.copy_(part)
    return SimpleNamespace(wait=lambda: None)


def _with_and_without_lists():
    """Whether gradients are equal, by recomputation; the number of lists that were sent, and of those with copies."""
    on_cpu()
    from megatron_patches.experts import exchange

    equal, sent = {}, []
    for recompute in ("none", "mlp"):
        gradients = []
        for lists in (False, True):
            case, cad, ddp = _prepared(recompute)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(exchange, "takes_lists", lambda _, lists=lists: lists)
                patch.setattr(exchange.dist, "all_to_all", lambda *a, **k: sent.append(a[1]) or _as_lists(*a, **k))
                _step(case, cad, ddp)
            gradients.append([weight.main_grad.clone() for weight in ddp.parameters()])
        equal[recompute] = all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    return equal, len(sent), sum(any(each is not given[0] for each in given) for given in sent)


def test_rows_that_go_everywhere_are_sent_without_copies():
    for equal, sent, copies in run_ranks(2, _with_and_without_lists):
        assert equal == {"none": True, "mlp": True}
        assert (sent > 0, copies) == (True, 0)


def test_rows_travel_beside_the_other_half_and_hosts_ask_once():
    halves = LAYERS * MICRO_BATCHES * 2
    for rank in run_ranks(2, _orders):
        for recompute, (events, asked, kept) in rank.items():
            assert (asked, kept) == (halves, 0), recompute  # a function that is kept would keep all scores
            if recompute != "all":  # in which a layer is computed again as a whole, exchanges too
                step = LAYERS * FORWARD + LAYERS * BACKWARD
                assert events == MICRO_BATCHES * step, recompute


def test_a_rank_that_dies_on_the_way_to_experts_ends_the_others(tmp_path):
    with pytest.raises(RankFailure):
        run_ranks(2, _dies, tmp_path)
    assert float((tmp_path / "seconds").read_text()) < 10
