"""Predicts one step of one mode from its documents.

The mode is DistCA, or a baseline without it, such as context parallelism. Array legend: R servers over all pipeline
stages; a server stands for ``tp`` GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from distca.baselines import Mode
from distca.baselines.dealing import dealt_anew
from distca.errors import SimulationError
from distca.plan import StepPlan, context_rows
from distca.plan.metrics import receive_buffer_gb
from distca.plan.recurrent.traffic import recurrent_nanos
from distca.simulate import memory, one_f_one_b
from distca.simulate.baseline import BaselineLayers
from distca.simulate.baseline_attention import DealtAttention, deal_micro_batch, work_of
from distca.simulate.baseline_recurrent import check_heads
from distca.simulate.cad import Cad, planned
from distca.simulate.job import Job
from distca.simulate.prediction import Prediction
from distca.simulate.reduction import StepEnd, step_end
from distca.simulate.streams import Span, Streams
from distca.simulate.workload import Workload


def simulate(
    job: Job,
    mode: Mode,
    workload: Workload,
    *,
    hidden: bool = False,
    halos: bool = False,
    plan: StepPlan | None = None,
    watched: Collection[int] = (),
) -> Prediction:
    """Returns the prediction of one step.

    Args:
        job: the model, the cluster and the parallelism.
        mode: DistCA or a baseline.
        workload: the step's documents.
        hidden: True makes context parallelism gather keys and values beside computation.
        halos: True makes context parallelism send layers with a window only the keys and values that they see.
        plan: the step's plan for DistCA, if it was made before; None makes it.
        watched: numbers of the servers whose actions are recorded.

    Raises:
        BaselineError: documents, ranks, layers or heads do not fit the mode.
        PlanError: as in :func:`distca.plan.plan_step`.
        SimulationError: the mode is a baseline, and servers are not alike.
    """
    if mode.disaggregated:
        job = replace(job, ping_pong=job.ping_pong and not mode.unsplit)
        return _with_servers(job, mode, workload, plan or planned(job, workload), watched)
    if job.unlike:
        raise SimulationError(
            f"`{mode.name}` is simulated on GPUs that are all alike, and this job has others, or servers without a "
            "model; simulate distca, or leave them out."
        )
    mode.check(job.data_parallel, job.shape.kv_heads)
    check_heads(job, mode)
    micro_batches = workload.micro_batches
    if mode.method == "packed-dealt":
        micro_batches = dealt_anew(micro_batches, job.data_parallel, job.tokens_per_rank, work_of(job))
    dealt = [deal_micro_batch(job, mode, each, workload.bins, halos) for each in micro_batches]
    if job.pp == 1:
        return _without_stages(job, mode, workload, dealt, hidden, watched)
    return _with_stages(job, mode, workload, dealt, hidden, watched)


def _with_servers(job: Job, mode: Mode, workload: Workload, plan: StepPlan, watched: Collection[int]) -> Prediction:
    """Returns the prediction of DistCA."""
    streams = Streams(job.fabric, rendezvous=not job.one_sided, watched=watched)
    cad = Cad(job, plan, streams)
    cad.run()
    phases = len(plan.backward)
    backward = float(streams.now.max()) / 2 / phases  # the last phase takes about half of a phase pair's time
    on_links = float(streams.on_links.max()) / 2 / phases
    end = step_end(job, backward, on_links)
    return _prediction(job, mode.name, workload, streams, cad.attention, end, _cad_memory(job, plan))


def _cad_memory(job: Job, plan: StepPlan) -> np.ndarray:
    """Returns [R] bytes of memory with DistCA at the peak."""
    shape, ranks, resend = job.shape, job.servers, plan.options.resend
    peak = np.zeros(ranks)
    stage = np.arange(ranks) // job.data_parallel
    flight = np.minimum(np.maximum(2 * (job.pp - 1 - stage) + 1, 1), len(plan.layouts))
    shares = plan.options.shares_of_layers.tolist()
    states = _states(job, plan)
    for forward, backward in zip(plan.forward, plan.backward, strict=True):
        rows = np.sum([each.layout.q_rows for each in forward.plans], axis=0)
        q_rows, kv_rows, received = np.zeros((3, ranks))
        for share, plans in zip(shares, backward.by_combination, strict=True):
            for back in plans:
                q = np.bincount(back.tasks.server, back.tasks.stop - back.tasks.start, ranks)
                kept, copied = context_rows(back)
                q_rows, kv_rows = q_rows + share * q, kv_rows + share * kept
                kv = np.maximum(kept, copied)
                # A server in backward holds dO, gradients of its rows in float32 and rounded, and copies of shared
                # keys and values. With resend it holds the rows too, as it kept none.
                sent = q * (shape.q_bytes + shape.o_bytes + job.lse_bytes) + kept * shape.kv_bytes if resend else 0
                wide = 3 * shape.q_bytes + shape.o_bytes
                received = np.maximum(received, q * wide + (kv * 3 + copied) * shape.kv_bytes + sent)
        if resend:
            q_rows = kv_rows = rows
        peak = np.maximum(peak, memory.with_servers(job, rows, q_rows, kv_rows, received, flight, states))
    buffer = receive_buffer_gb(shape, job.tokens_per_rank, resend=resend, sinks=job.model.sinks) * 2**30
    return peak + (buffer if job.one_sided else 0)


def _states(job: Job, plan: StepPlan) -> memory.StateBytes | None:
    """Returns the bytes of states in recurrent layers, for the micro-batch with most of them on each rank; None without
    such layers."""
    if not any(job.recurrent):
        return None
    each = [memory.StateBytes.of(job, recurrent_nanos(layouts, job.recurrence.halo_rows)) for layouts in plan.layouts]
    return memory.StateBytes(*(np.max([getattr(of, name) for of in each], axis=0) for name in ("kept", "at_work")))


def _without_stages(
    job: Job,
    mode: Mode,
    workload: Workload,
    dealt: list[tuple[DealtAttention, ...]],
    hidden: bool,
    watched: Collection[int],
) -> Prediction:
    """Returns the prediction of a baseline without pipeline stages."""
    streams = Streams(job.stage_fabric, rendezvous=True, watched=watched)
    layers = BaselineLayers(job, mode, streams, hidden)
    began, on_links = 0.0, 0.0
    for each in dealt:
        layers.forward(each, each[0].rows)
        streams.compute(each[0].rows * job.head + job.rates.phase_s, "head", job.layers - 1, 0, "forward")
        began, on_links = float(streams.now.max()), float(streams.on_links.max())
        streams.compute(np.full(job.data_parallel, job.rates.phase_s), "phase", 0, 0, "backward")
        layers.backward(each, each[0].rows)
    backward = float(streams.now.max()) - began
    end = step_end(job, backward, float(streams.on_links.max()) - on_links)
    return _prediction(job, mode.name, workload, streams, layers.attention, end, _baseline_memory(job, mode, dealt, 0))


def _with_stages(
    job: Job,
    mode: Mode,
    workload: Workload,
    dealt: list[tuple[DealtAttention, ...]],
    hidden: bool,
    watched: Collection[int],
) -> Prediction:
    """Returns the prediction of a baseline with pipeline stages and the schedule 1F1B.

    A rank's micro-batches are all padded to the rows of its largest one, as in training."""
    rows = np.max([each[0].rows for each in dealt], axis=0)
    layers = [job.model.layer_kinds[stage * job.layers : (stage + 1) * job.layers] for stage in range(job.pp)]
    numbers = {kinds: number for number, kinds in enumerate(layers)}  # stages with the same layers take as long
    run = {kinds: _Stage.of(job, mode, dealt, rows, hidden, number) for kinds, number in numbers.items()}
    stages = [run[kinds] for kinds in layers]
    head = rows * job.head
    forward, backward = (np.stack([getattr(each, way) for each in stages], axis=1) for way in ("forward", "backward"))
    forward[:, -1] += head
    passes = one_f_one_b.run(forward, backward, np.tile(_hop(job, rows), (len(dealt), 1)))
    streams = Streams(job.fabric, rendezvous=True, watched=watched)
    streams.now = np.full(job.servers, max(float(done.end.max()) for done in passes))
    streams.spans += _spans(passes, watched, job.data_parallel)
    both = 2 * job.rates.phase_s * len(dealt)
    busy, streams.exposed, streams.sent, attention = (
        np.concatenate([getattr(each, name) for each in stages]) for name in ("busy", "exposed", "sent", "attention")
    )
    streams.busy = busy + both
    streams.busy[-job.data_parallel :] += len(dealt) * head
    # Activations of each micro-batch go to the next stage, and gradients to the one before.
    neighbours = np.repeat(2.0, job.pp)
    neighbours[[0, -1]] = 1
    streams.sent += len(dealt) * np.outer(neighbours, job.residual_bytes(rows)).ravel()
    end = step_end(job, 0.0, 0.0)
    peak = np.concatenate([_baseline_memory(job, mode, dealt, number) for number in range(job.pp)])
    return _prediction(job, mode.name, workload, streams, attention, end, peak)


@dataclass(frozen=True)
class _Stage:
    """Times of a stage's layers. Array legend: M micro-batches, L data-parallel ranks of a stage.

    Attributes:
        forward, backward: [M, L] seconds of a micro-batch; ranks of a context-parallel group wait for each other.
        busy: [L] seconds of computation, over all micro-batches.
        exposed: [L] seconds of waiting for bytes.
        attention: [L] seconds of core attention.
        sent: [L] bytes that the rank sent inside the stage.
    """

    forward: np.ndarray
    backward: np.ndarray
    busy: np.ndarray
    exposed: np.ndarray
    attention: np.ndarray
    sent: np.ndarray

    @staticmethod
    def of(
        job: Job, mode: Mode, dealt: list[tuple[DealtAttention, ...]], rows: np.ndarray, hidden: bool, stage: int
    ) -> _Stage:
        forward, backward = np.zeros((2, len(dealt), job.data_parallel))
        busy, exposed, attention, sent = np.zeros((4, job.data_parallel))
        together = math.lcm(mode.degree, job.servers_of_experts)
        for number, each in enumerate(dealt):
            streams = Streams(job.stage_fabric, rendezvous=True)
            layers = BaselineLayers(job, mode, streams, hidden, stage)
            layers.forward(each, rows)
            middle = streams.now.copy()
            layers.backward(each, rows)
            for seconds, into in ((middle, forward), (streams.now - middle, backward)):
                slowest = seconds.reshape(-1, together).max(axis=1)
                into[number] = np.repeat(slowest, together) + job.rates.phase_s
            busy, exposed, sent = busy + streams.busy, exposed + streams.exposed, sent + streams.sent
            attention = attention + layers.attention
        return _Stage(forward, backward, busy, exposed, attention, sent)


def _hop(job: Job, rows: np.ndarray) -> np.ndarray:
    """Returns [L] seconds in which activations or gradients of ``rows`` [L] travel to the next stage.

    Rank r of a stage sends to rank r of the next one. If there are several nodes, all of these count as sent to another
    node."""
    size, fabric = job.residual_bytes(rows), job.fabric
    near, far = (fabric.nvlink, fabric.nvlink_latency), (fabric.network, fabric.network_latency)
    rate, latency = near if fabric.one_node else far
    return np.asarray(size / rate + latency)


def _spans(passes: list[one_f_one_b.Pass], watched: Collection[int], lanes: int) -> list[Span]:
    """Returns the passes of the watched ranks as spans of a timeline."""
    spans = []
    for rank in watched:
        stage, lane = divmod(rank, lanes)
        for done in passes:
            if stage == done.stage:
                start = float(done.start[lane])
                name = f"{done.direction} of micro-batch {done.micro_batch}"
                spans.append(Span(rank, "stage", name, start, float(done.end[lane]) - start))
    return spans


def _baseline_memory(job: Job, mode: Mode, dealt: list[tuple[DealtAttention, ...]], stage: int) -> np.ndarray:
    """Returns [L] bytes of memory of a stage's ranks with a baseline at the peak."""
    in_flight = min(job.pp - stage, len(dealt))
    peak = np.zeros(job.data_parallel)
    for each in dealt:
        layers = [each[kind] for kind in job.layer_kinds[stage]]
        rows, read = layers[0].rows, [layer.read_rows for layer in layers]
        # These modes keep the gathered keys and values of a rank in place of its own.
        kept = np.mean(read, axis=0) if mode.method in ("cp-keep", "cp-halo") else rows
        # The layer at work has gathered keys and values, and their gradients in float32 and rounded: 4 times the bytes.
        gathered = np.max(read, axis=0) * 4 * job.shape.kv_bytes
        peak = np.maximum(peak, memory.at_home(job, rows, kept, gathered, in_flight, stage))
    return peak


def _prediction(
    job: Job, name: str, workload: Workload, streams: Streams, attention: np.ndarray, end: StepEnd, peak: np.ndarray
) -> Prediction:
    step = float(streams.now.max()) + end.transfers + end.compute + job.rates.step_s
    has_model = np.arange(job.servers) < job.homes  # servers without one have no optimizer
    return Prediction(
        name,
        step,
        workload.tokens,
        streams.busy + np.where(has_model, end.compute, 0.0),
        attention,
        streams.exposed,
        end.transfers,
        streams.sent,
        peak,
        streams.spans,
    )
