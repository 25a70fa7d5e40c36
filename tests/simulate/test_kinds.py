"""Predicted steps of models whose layers have windows and sinks."""

from dataclasses import dataclass, fields, replace
from itertools import product

import numpy as np
import pytest

from distca.baselines import BaselineError, parse_mode
from distca.models.shape import ModelShape
from distca.plan import server_seconds
from distca.simulate import Cluster, Job, Workload, simulate
from distca.simulate.cad import planned
from distca.simulate.job import VALUE
from distca.simulate.sweep import parse, run_mode
from tests.simulate.cases import documents, small_job

RANDOM = np.random.default_rng(3).integers(1, 700, size=24)
WINDOW = 100


@dataclass(frozen=True, kw_only=True)
class AnyWindows(ModelShape):
    """A model whose layers have these windows, from the first on again where there are more layers."""

    given: tuple[int, ...]

    @property
    def windows(self) -> tuple[int, ...]:
        return tuple(self.given[layer % len(self.given)] for layer in range(self.layers))


def mixed(job: Job, *windows: int, sinks: bool = False, **how) -> Job:
    sizes = {item.name: getattr(job.model, item.name) for item in fields(ModelShape)}
    return replace(job, model=AnyWindows(**sizes | {"sinks": sinks}, given=windows), **how)


def workload(ranks: int = 4, micro_batches: int = 1) -> Workload:
    return Workload.draw(RANDOM, 700, ranks, 2000, micro_batches, seed=1)


def pairs(lengths: np.ndarray, window: int) -> int:
    """Counted key by key."""
    return sum(min(position + 1, window or position + 1) for length in lengths.tolist() for position in range(length))


@pytest.mark.parametrize("mode", ["distca", "packed", "packed-dealt", "variable", "cp2", "cp4-keep", "ulysses2"])
def test_pairs_inside_windows_alone_are_computed(mode: str) -> None:
    job = mixed(small_job(4, layers=3, tokens_per_rank=2000, gpus_per_node=2), WINDOW, 0, 20)
    found = simulate(job, parse_mode(mode), workload(micro_batches=2))
    lengths = np.concatenate([each.lengths for each in workload(micro_batches=2).micro_batches])
    counted = sum(pairs(lengths, window) for window in (WINDOW, 0, 20))
    # With tiles of one row a window is exact.
    assert found.attention_s.sum() == pytest.approx(3.5e-6 * counted)


@pytest.mark.parametrize(
    ("pp", "backward", "sinks"), [*product([1], ["keep", "resend"], [False, True]), (2, "keep", True)]
)
def test_the_plans_own_bytes_travel_and_its_own_seconds_are_served(pp: int, backward: str, sinks: bool) -> None:
    """Also with stages that have different kinds at equal depth."""
    job = small_job(4, layers=3, pp=pp, tokens_per_rank=2000, level_time=False, gpus_per_node=2, backward=backward)
    job = mixed(job, 0, WINDOW, WINDOW, 20, sinks=sinks)
    micro_batches = workload(4 // pp, 2)
    plan = planned(job, micro_batches)
    assert len(plan.options.combinations) == (2 if pp == 1 else 3)
    found = simulate(job, parse_mode("distca"), micro_batches, plan=plan)
    served, options = np.zeros(4), plan.options
    for way, phase in plan.phases:
        for combination in options.layer_combinations:
            plans = phase.by_combination[combination]
            served += sum(server_seconds(each, options.cost_of_kind, way) for each in plans)
    assert found.attention_s == pytest.approx(served)
    passed = 0
    if pp > 1:  # activations and gradients of all micro-batches, once
        passed = 2 * sum(each.tokens for each in micro_batches.micro_batches) * job.model.hidden * VALUE
    moved = job.layers * plan.balance().bytes_moved + passed
    assert found.sent_bytes.sum() == pytest.approx(moved, abs=job.layers)


def test_one_plan_for_all_layers_sends_more_and_computes_the_same() -> None:
    for pp in (1, 2):
        job = mixed(small_job(4, layers=4, pp=pp, tokens_per_rank=2000), WINDOW, 0)
        one, own = (
            simulate(replace(job, plan_by_kind=by_kind), parse_mode("distca"), workload(4 // pp))
            for by_kind in (False, True)
        )
        assert one.sent_bytes.sum() > own.sent_bytes.sum()
        assert one.attention_s.sum() == pytest.approx(own.attention_s.sum())


def test_a_model_of_one_kind_has_the_plan_that_it_had() -> None:
    job = small_job(4, tokens_per_rank=2000)
    plain, one = (planned(replace(job, plan_by_kind=by_kind), workload()) for by_kind in (True, False))
    assert plain.fingerprint == one.fingerprint
    assert planned(mixed(job, 0), workload()).fingerprint == plain.fingerprint


def test_halos_by_hand() -> None:
    """Pieces of 100 tokens: rank 0 has the first and the last, rank 1 those between."""
    cluster = Cluster(2, 1, network_gb_s=1e-3, network_latency_us=0)
    job = mixed(small_job(cluster=cluster, layers=1), 31)
    found = {
        (name, halos): simulate(job, parse_mode(name), documents([(400, 0)], bins=1), halos=halos)
        for name in ("cp2", "cp2-keep")
        for halos in (False, True)
    }
    row = job.shape.kv_bytes
    # Each rank has a piece whose first rows see 30 of the other's: there, and gradients back; again where not kept.
    assert found["cp2-keep", True].sent_bytes.tolist() == [2 * 30 * row] * 2
    assert found["cp2", True].sent_bytes.tolist() == [3 * 30 * row] * 2
    assert found["cp2-keep", False].sent_bytes.tolist() == [2 * 200 * row] * 2
    assert found["cp2", True].step_s < found["cp2", False].step_s
    assert found["cp2", True].attention_s.sum() == pytest.approx(3.5e-6 * pairs(np.array([400]), 31))


def test_names_of_modes_with_halos() -> None:
    mode, halos, hidden = parse("cp4-halo-hidden")
    assert (mode.method, mode.degree, halos, hidden) == ("cp-halo", 4, False, True)
    assert parse("best-cp-halo")[1:] == (True, False)
    with pytest.raises(BaselineError, match="packed-halo"):
        parse("packed-halo")
    job = mixed(small_job(4, tokens_per_rank=2000), WINDOW, 0)
    best = run_mode(job, "best-cp-halo", [workload()])
    assert best.chosen == "packed" or best.chosen.endswith("-halo")
    assert best.step_s <= run_mode(job, "best-cp", [workload()]).step_s


def test_a_ring_knows_no_windows() -> None:
    with pytest.raises(BaselineError, match="ring2 has no layers with windows; choose another mode"):
        simulate(mixed(small_job(4), WINDOW, 0), parse_mode("ring2"), workload())


@pytest.mark.parametrize("mode", ["distca", "cp4-keep"])
def test_windows_keep_fewer_keys_and_sinks_more_of_log_sum_exp(mode: str) -> None:
    def peak(*windows: int, sinks: bool = False) -> float:
        job = mixed(small_job(4, layers=8, tokens_per_rank=1000, nccl=True), *windows, sinks=sinks)
        return simulate(job, parse_mode(mode), documents([(4000, 0)], bins=1)).memory_bytes.max()

    assert peak(WINDOW) < peak(WINDOW, 0) < peak(0)
    if mode == "distca":
        assert peak(0, sinks=True) == pytest.approx(peak(0) + 8 * 1000 * 2 * 4)
