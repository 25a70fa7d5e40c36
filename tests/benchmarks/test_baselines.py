"""Every baseline against unmodified megatron-core on one rank, and its layouts."""

import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_patches.versions import has_gated_delta_net
from tests.testing.worlds import Worlds

TOLERANCE = 1e-5  # relative norms in float32, as for DistCA itself
CPU = torch.device("cpu")

# Document lengths of each micro-batch, and the context-parallel group of each document of two groups.
SEVERAL = ((13, 7, 1, 29, 3, 1), (50, 2, 9))
TWO_GROUPS = ((0, 1, 0, 1, 0, 1), (1, 0, 0))
ONE_LONG = ((97,), (1, 1, 2))
FEW = ((3, 1), (2,))
FEW_GROUPS = ((0, 1), (1,))


@pytest.fixture(scope="module")
def worlds():
    worlds = Worlds()
    yield worlds
    worlds.close()


def _differences(wanted, tp=1, kv_heads=2):
    warnings.filterwarnings("ignore")
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    from distca.baselines.mode import parse_mode
    from distca.parity.cases import ParityCase, ParityShape
    from tests.benchmarks.baseline_parity import BaselineCase, differences

    cases = [
        BaselineCase(
            parse_mode(mode), ParityCase(micro_batches=lengths, tp=tp, shape=ParityShape(kv_heads=kv_heads)), group_of
        )
        for mode, lengths, group_of in wanted
    ]
    found = differences(cases, torch.float32, CPU, "reference")
    return [(each.mode.name, each.case.micro_batches, result) for each, result in zip(cases, found, strict=True)]


def _one_group(lengths):
    return tuple((0,) * len(each) for each in lengths)


def _hold(results):
    for name, lengths, difference in results:
        assert max(difference.loss, difference.gradient) <= TOLERANCE, (name, lengths, difference)


def _attention_errors(names, lengths):
    from distca.attention.reference import ReferenceKernel
    from distca.baselines.mode import parse_mode
    from distca.plan import AttentionShape
    from tests.benchmarks.baseline_parity import attention_errors

    modes = [parse_mode(name) for name in names]
    return [
        attention_errors(modes, list(each), AttentionShape(8, 4, 8), torch.float64, CPU, ReferenceKernel())
        for each in lengths
    ]


def test_groups_of_all_and_of_two_of_four_ranks(worlds):
    wanted = [(name, SEVERAL, _one_group(SEVERAL)) for name in ("cp4", "cp4-keep", "ring4", "ulysses4")]
    wanted.append(("cp4-keep", FEW, _one_group(FEW)))
    wanted.append(("cp2", SEVERAL, TWO_GROUPS))
    wanted += [(name, FEW, FEW_GROUPS) for name in ("cp2", "ring2", "ulysses2")]
    wanted.append(("packed", SEVERAL, ((3, 2, 1, 0, 3, 1), (1, 0, 2))))
    wanted.append(("variable", FEW, FEW_GROUPS))  # two ranks have no tokens
    _hold(worlds.call(4, _differences, wanted, 1, 4)[0])


@pytest.mark.matrix
def test_further_lengths_in_groups_of_all_and_of_two_of_four_ranks(worlds):
    wanted = [(name, FEW, _one_group(FEW)) for name in ("cp4", "ring4", "ulysses4")]
    wanted += [(name, ONE_LONG, _one_group(ONE_LONG)) for name in ("cp4-keep", "ring4")]
    wanted += [(name, SEVERAL, TWO_GROUPS) for name in ("ring2", "ulysses2")]
    _hold(worlds.call(4, _differences, wanted, 1, 4)[0])


def _hybrid_differences():
    warnings.filterwarnings("ignore")
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    from distca.baselines.mode import parse_mode
    from tests.benchmarks.baseline_parity import BaselineCase, differences
    from tests.parity.hybrid_cases import hybrid_model_cases

    wanted = (("cp2", 2, SEVERAL, TWO_GROUPS), ("cp2", 3, FEW, FEW_GROUPS), ("packed", 0, FEW, ((3, 2), (0,))))
    stacks = hybrid_model_cases()
    cases = [
        BaselineCase(parse_mode(mode), replace(stacks[number], micro_batches=lengths, tp=1, ping_pong=True), group_of)
        for mode, number, lengths, group_of in wanted
    ]
    found = differences(cases, torch.float32, CPU, "reference")
    return [(each.mode.name, each.case.micro_batches, result) for each, result in zip(cases, found, strict=True)]


@pytest.mark.skipif(not has_gated_delta_net(), reason="HybridModel's layers have been there since Megatron-Core 0.19")
def test_recurrent_layers_at_home_and_by_an_all_to_all_of_heads(worlds):
    _hold(worlds.call(4, _hybrid_differences)[0])


def test_with_tensor_and_sequence_parallelism(worlds):
    wanted = [(name, SEVERAL, _one_group(SEVERAL)) for name in ("cp2", "ring2", "ulysses2")]
    _hold(worlds.call(4, _differences, wanted, 2, 4)[0])


def test_attention_alone_in_float64(worlds):
    names = ["cp4", "cp4-keep", "ring4", "ulysses4"]
    for errors in worlds.call(4, _attention_errors, names, [(13, 7, 1, 59, 3, 1), (301,), (1, 2, 1)])[0]:
        for name, by_tensor in errors.items():
            assert max(by_tensor.values()) < 1e-12, (name, by_tensor)


LENGTHS = np.array([13, 1, 1, 700, 8, 2, 1, 31])
GROUPS = np.array([0, 1, 0, 1, 0, 0, 1, 1])


@pytest.mark.parametrize("method", ["head_tail", "zigzag", "contiguous"])
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_layouts_hold_every_token_once_and_equally_many_on_the_ranks_of_a_group(method, degree):
    from distca.baselines import layouts

    pieces = getattr(layouts, method)(LENGTHS, GROUPS, degree)
    layout = layouts.layout_of(pieces, LENGTHS, 2 * degree)
    held = {
        (document, position)
        for document, start, stop, _, _ in zip(*(column.tolist() for column in layout.q.columns()), strict=True)
        for position in range(start, stop)
    }
    assert len(held) == LENGTHS.sum() == layout.q_rows.sum()
    assert (layout.q.rank // degree == GROUPS[layout.q.document]).all()
    for group in layout.q_rows.reshape(2, degree):
        assert group.max() - group.min() <= (2 if method == "zigzag" else 1)


def test_head_tail_gives_every_rank_the_same_share_of_a_documents_attention():
    from distca.baselines.layouts import head_tail

    pieces = head_tail(np.array([8000]), np.zeros(1, np.int64), 4)
    pairs = np.bincount(pieces.rank, weights=(pieces.stop * (pieces.stop + 1) - pieces.start * (pieces.start + 1)) / 2)
    assert pairs.max() / pairs.mean() < 1.001


def test_dealing_levels_work_and_respects_room():
    from distca.baselines.dealing import Work, deal

    work = Work(per_token=1.0, per_pair=0.01)
    lengths = np.array([1000, 500, 500, 400, 300, 200, 100, 50, 50, 20])
    bins = deal(lengths, 2, work)
    load = np.bincount(bins, weights=work.seconds(lengths))
    assert load.max() / load.mean() < 1.05
    capped = deal(lengths, 2, work, 1600)
    assert np.bincount(capped, weights=lengths).max() <= 1600
    assert deal(lengths, 2, work, 900) is None


def test_a_step_dealt_anew_levels_ranks_over_all_its_micro_batches():
    from distca.baselines.dealing import Work, dealt_anew
    from distca.data.sampler import MicroBatch

    work = Work(per_token=0.0, per_pair=1.0)
    columns = ([100, 30, 40, 60], [0, 1, 1, 0]), ([90, 50, 30], [0, 1, 1])
    sampled = [
        MicroBatch(np.arange(len(each)) + 10 * n, *map(np.array, (each, at))) for n, (each, at) in enumerate(columns)
    ]
    dealt = dealt_anew(sampled, 2, 160, work)
    documents = {d: n for each in dealt for d, n in zip(each.documents.tolist(), each.lengths.tolist(), strict=True)}
    assert documents == {0: 100, 1: 30, 2: 40, 3: 60, 10: 90, 11: 50, 12: 30}

    def loads(batches):
        return sum(np.bincount(each.rank_of, work.seconds(each.lengths), 2) for each in batches)

    assert loads(sampled).max() > 1.5 * loads(sampled).mean() and loads(dealt).max() < 1.1 * loads(dealt).mean()
    assert max(np.bincount(each.rank_of, each.lengths, 2).max() for each in dealt) <= 160
    assert dealt_anew(sampled, 2, 99, work) == tuple(sampled)  # the longest fits nowhere


def test_modes_by_name():
    from benchmarks.baselines import BaselineError, every_mode, parse_mode

    for mode in every_mode(4):
        assert parse_mode(mode.name) == mode
    grouped = ["cp2", "cp2-keep", "ring2", "ulysses2"]
    for name in ("packed-dealt", "distca-unsplit"):
        assert parse_mode(name).name == name
    assert [parse_mode(name).disaggregated for name in ("distca", "distca-unsplit", "packed")] == [True, True, False]
    assert [mode.name for mode in every_mode(2)] == ["distca", "packed", *grouped, "variable"]
    for name in ("cp", "cp1", "distca2", "distca2-unsplit", "tree4", "cp4-lose", "cp4-dealt", "packed2-dealt", ""):
        with pytest.raises(BaselineError):
            parse_mode(name)
    with pytest.raises(BaselineError, match="key/value heads"):
        parse_mode("ulysses4").check(4, 2)
    with pytest.raises(BaselineError, match="do not divide"):
        parse_mode("cp4").check(6, 8)


def test_a_mode_that_documents_do_not_fit_is_refused():
    from benchmarks.baselines import BaselineError, Work, groups_of, parse_mode

    lengths, bins, work = np.array([200, 30, 40]), np.array([0, 1, 1]), Work(1.0, 0.0)
    with pytest.raises(BaselineError, match=r"packed keeps .* on one rank of 100 tokens, but .* needs 2 ranks"):
        groups_of(parse_mode("packed"), lengths, bins, 2, 4, 100, work)
    assert groups_of(parse_mode("cp2"), lengths, bins, 2, 4, 100, work).tolist() == [0, 1, 1]
    assert groups_of(parse_mode("cp4"), lengths, bins, 2, 4, 100, work).tolist() == [0, 0, 0]
    full, bins = np.array([200, 200, 200]), np.array([0, 1, 2])
    with pytest.raises(BaselineError, match=r"cp3 deals .* that hold 3 × 100 tokens.*multiple of 2"):
        groups_of(parse_mode("cp3"), full, bins, 3, 6, 100, work)
    assert groups_of(parse_mode("cp3"), full[:2], bins[:2], 3, 6, 100, work).tolist() == [0, 1]


def _kind_errors(names, lengths, kinds):
    from distca.attention.reference import ReferenceKernel
    from distca.baselines.mode import parse_mode
    from distca.plan import AttentionKind, AttentionShape
    from tests.benchmarks.baseline_parity import attention_errors

    modes, shape = [parse_mode(name) for name in names], AttentionShape(4, 2, 8)
    return {
        (window, tuple(each)): attention_errors(
            modes, list(each), shape, torch.float64, CPU, ReferenceKernel(), AttentionKind(8**-0.5, window, 0.0, sink)
        )
        for window, sink in kinds
        for each in lengths
    }


KINDS = [(1, True), (5, True), (40, False), (200, True), (0, True)]
FURTHER_KINDS = [(2, False), (1000, False)]


@pytest.mark.parametrize("kinds", [KINDS, pytest.param(FURTHER_KINDS, marks=pytest.mark.matrix)], ids=["", "further"])
def test_windows_and_sinks_in_float64(worlds, kinds):
    """Windows shorter and longer than pieces, longer than documents; sinks with and without."""
    names = ["packed", "cp3", "cp3-keep", "cp3-halo"]
    lengths = [(13, 7, 1, 129, 3, 1), (301,), (1, 2, 1)]
    for case, errors in worlds.call(3, _kind_errors, names, lengths, kinds)[0].items():
        for name, by_tensor in errors.items():
            assert max(by_tensor.values()) < 1e-12, (case, name, by_tensor)


def test_halos_move_what_a_count_over_documents_says():
    from benchmarks.baselines.halo import halo_rows
    from distca.baselines.layouts import head_tail, layout_of

    pieces = head_tail(LENGTHS, GROUPS, 3)
    rank_of = {}
    for document, start, stop, rank in zip(pieces.document, pieces.start, pieces.stop, pieces.rank, strict=True):
        rank_of |= {(document, position): rank for position in range(start, stop)}
    for window in (1, 2, 40, 5000):
        needed = {
            (start, rank_of[document, key], document, key)
            for document, start, rank in zip(pieces.document, pieces.start, pieces.rank, strict=True)
            for key in range(max(0, start - window + 1), start)
            if rank_of[document, key] != rank
        }
        assert halo_rows(layout_of(pieces, LENGTHS, 6), window) == len(needed)


def test_ring_and_ulysses_refuse_other_layers_than_full_ones():
    from benchmarks.baselines import BaselineError, parse_mode
    from distca.plan import AttentionKind

    for name in ("ring2", "ulysses2"):
        parse_mode(name).check(2, 2, [AttentionKind(1.0)])
        for kind in (AttentionKind(1.0, 8), AttentionKind(1.0, sink=True)):
            with pytest.raises(BaselineError, match="full layers only"):
                parse_mode(name).check(2, 2, [AttentionKind(1.0), kind])
    parse_mode("cp2-halo").check(2, 2, [AttentionKind(1.0, 8, sink=True)])


@pytest.mark.parametrize("rank,own", [(0, 3), (1, 4)])
def test_parts_for_fla_are_equal_and_begin_with_padding(monkeypatch, rank, own):
    """With functions in fla's place that return what they get, a rank's rows are where they were."""
    from benchmarks.baselines.fla_parts import FlaParts
    from distca.recurrent import CoreParameters, Recurrence

    calls = {}

    def convolution(x, weight, bias, activation, cp_context):
        calls["convolution"] = x.shape, cp_context
        return x, None

    def rule(q, k, v, g, beta, scale, cp_context):
        calls["rule"] = q.shape, k.shape, g.shape, beta.shape, scale
        return v, None

    def context(borders, group, conv1d_kernel_size, cu_seqlens_cpu):
        return borders.tolist(), group, conv1d_kernel_size, cu_seqlens_cpu.tolist()

    made = {
        "fla.modules.causal_conv1d": {"causal_conv1d": convolution},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": rule},
        "fla.ops.cp": {"build_cp_context": context},
    }
    for name, functions in {"fla": {}, "fla.modules": {}, "fla.ops": {}, **made}.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**functions))
    group = SimpleNamespace(size=2, rank=rank, group="its group")
    parts = FlaParts.of(group, own, np.array([3, 4]), torch.device("cpu"))
    what = Recurrence.gated_delta_net(2, 4, 8, 6)
    mixed, g, beta = torch.randn(6, what.channels), torch.randn(6, 4), torch.rand(6, 4)
    o = parts.recur(what, CoreParameters(torch.zeros(what.channels, 4)), mixed, g, beta)
    assert calls["convolution"] == ((1, 4, what.channels), ([0, 1, 4, 8], "its group", 4, [0, 1, 4, 8]))
    assert calls["rule"] == ((1, 4, 4, 8), (1, 4, 4, 8), (1, 4, 4), (1, 4, 4), 8**-0.5)
    assert torch.equal(o[:own].flatten(1), mixed[:own, 32:]) and not o[own:].any() and o.shape == (6, 4, 6)


def test_rows_that_come_back_from_heads_are_not_kept_for_backward(monkeypatch):
    from benchmarks.baselines import heads

    monkeypatch.setattr(heads._Exchange, "apply", lambda parts, _: parts.clone())
    place = np.array([0, 2, 3])  # of two ranks with room for two rows, of which the first has one
    whole = heads.GroupHeads.of(SimpleNamespace(group=None, size=2), 1, 2, place, np.array([3]), (), CPU)
    rows, kept = torch.arange(1.0, 7.0).reshape(3, 2).requires_grad_(), []

    def keep(each):
        kept.append(each)
        return each

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        found = whole._to_rows(rows)
    assert found.flatten().tolist() == [1, 2, 3, 4] and not any(each.is_floating_point() for each in kept)
