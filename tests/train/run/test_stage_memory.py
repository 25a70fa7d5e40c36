"""Memory of pipeline stages: what is alive on CPU ranks against what distca/train/run/memory.py predicts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from distca.data.mixes import Mix, sample_long_context
from distca.plan import route, training_tolerance
from distca.plan.cost.analytic import area_cost
from distca.plan.micro_batch import plan_micro_batch
from distca.runtime.device_routes import StepRoutes
from distca.runtime.recurrent_routes import RecurrentRoutes
from distca.testing.ranks import run_ranks
from distca.train.config.cli import parse_run_config
from distca.train.config.schema import RunConfig
from distca.train.run import memory
from megatron_patches.versions import has_gated_delta_net
from tests.train.live_memory import LiveBytes, allocate_as_on_gpus
from tests.train.small_runs import StepByStep

pytestmark = pytest.mark.slow

TOKENS = 1024
HIDDEN = 256 * TOKENS  # bytes of one bfloat16 activation
SETTINGS = {
    "model.hidden": 128,
    "model.ffn": 448,
    "model.heads": 4,
    "model.kv_heads": 1,
    "model.vocabulary": 64,
    "data.source": "mix",
    "data.path": "pretrain-long",
    "data.vocabulary": 64,
    "data.context_length": TOKENS,
    "data.tokens_per_rank": TOKENS,
    "data.whole_documents": "true",
    "data.validation_fraction": 0,
    "data.seed": 1,  # peaks of some draws are up to 4.4 % below what is predicted
    "train.precision": "bf16",
}
CASES = [
    {"cad.enabled": enabled, "train.recompute": recompute}
    for enabled, recompute in (("true", "none"), ("true", "mlp"), ("true", "all"), ("false", "none"))
]


OFFLOAD = {"train.offload": "all"}
# Without halves: with them the loss, which allocates more on CPUs, would need most.
OUTPUTS = {"train.recompute": "none", "train.keep_outputs": "all", "cad.ping_pong": "false"}
AT_HOME = {"cad.enabled": "false"}
MIXED = {"model.layer_types": "[full,window]", "model.window": "200", "model.sinks": "true"}

# Every row goes to all experts, so that these get equally many: this model would always choose the first ones.
EXPERTS = {"model.experts.count": "8", "model.experts.topk": "8", "model.experts.ffn": "48"}
SHARED = EXPERTS | {"model.experts.shared_ffn": "96", "model.experts.balance": "0.1"}
MIXTURES = [
    EXPERTS | AT_HOME | {"train.recompute": "none"},
    EXPERTS | AT_HOME | {"train.recompute": "all"},
    EXPERTS | AT_HOME | {"train.recompute": "none", "model.experts.biases": "true", "model.experts.clamp": "7"},
    SHARED | {"train.recompute": "none"},
    SHARED | {"train.recompute": "mlp", "model.experts.dense_layers": "1"},
]
LATENT = {"model.kv_heads": 4, "model.latent.kv_rank": 48, "model.latent.key_dim": 24, "model.latent.rotary_dim": "8"}
LATENT |= {"model.latent.value_dim": 24}
OF_LATENT = [LATENT | AT_HOME | {"train.recompute": "none"}, LATENT | {"train.recompute": "mlp"}]
OF_LATENT += [LATENT | {"train.recompute": "all", "model.latent.q_rank": 32}]
if not has_gated_delta_net():  # with which latent attention is refused
    OF_LATENT = []

# Small states, of which a document that goes on in pong has one.
HYBRID = {
    "model.layers": "4", "model.hybrid.pattern": "G-*-", "model.hybrid.key_heads": "2", "model.hybrid.value_heads": "4",
    "model.hybrid.key_dim": "8", "model.hybrid.value_dim": "16", "model.hybrid.output_gate": "true",
}  # fmt: skip
OF_HYBRID = [HYBRID, HYBRID | AT_HOME, HYBRID | {"train.recompute": "all"}]
OF_HYBRID += [HYBRID | AT_HOME | {"model.hybrid.pattern": "M-*-"}]


def _config(stages: int, layers: int, case: dict[str, str]) -> RunConfig:
    settings = SETTINGS | {"parallel.pp": stages, "model.layers": layers, "train.micro_batches": 2 * stages} | case
    return parse_run_config([text for name, value in settings.items() for text in (f"--{name}", str(value))])


def _live(stages: int, layers: int, cases: list[dict[str, str]]) -> list[dict[str, Any]]:
    """By case, of this rank's stage: most bytes alive when a backward begins and at any time, and the prediction."""
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    allocate_as_on_gpus(setattr)
    return [_measure(_config(stages, layers, case)) for case in cases]


def _measure(config: RunConfig) -> dict[str, Any]:
    from megatron.core.pipeline_parallel import schedules

    from megatron_patches.training import pipeline_schedule

    run = StepByStep(config)
    step = run.step()
    live, starts = LiveBytes(), []
    backward_step = schedules.backward_step

    def counted(*arguments: Any) -> Any:
        starts.append(live.now())
        return backward_step(*arguments)

    pipeline_schedule.backward_step = schedules.backward_step = counted
    with live:
        run.run(step)
    pipeline_schedule.backward_step = schedules.backward_step = backward_step
    if step.routes is not None:
        _take_servers_of(step.routes)
    stage = run.trainer.cad.stage
    predicted = memory.predict_memory(config, run.world.size, 64)[stage]
    parking = run.trainer.cad.pool.offload
    host = parking._memory.size if parking is not None else 0
    run.close()
    return {"starts": max(starts) - host, "peak": live.peak - host, "predicted": predicted, "stage": stage}


def _take_servers_of(routes: StepRoutes) -> None:
    """The rows of the busiest server of the step that was run, in place of those of long-context plans."""
    layers = [[layer for layer in own if not isinstance(layer[0], RecurrentRoutes)] for own in routes.own]
    halves = [half.backward for own in layers for half in own[0]]
    if len(layers[0]) > 1:  # those of layers with a window, in the mean of a micro-batch's halves
        at_home = np.mean([half.backward.kv_rows for own in layers for half in own[1]])
        memory.HALOS = (at_home - TOKENS // 2) / (200 - 1)
    memory.BUSY_SERVER_Q = max(half.q_rows for half in halves) / (TOKENS // 2)
    memory.BUSY_SERVER_KV = max(half.kv_rows for half in halves) / (TOKENS // 2)
    memory.REGIONS_KV = (max(half.region_rows for half in halves) / (TOKENS // 2), memory.REGIONS_KV[1])


@pytest.mark.parametrize(
    "stages, cases",
    [
        (1, [OFFLOAD, MIXED, OUTPUTS, *MIXTURES[1:], *OF_LATENT[::2], *OF_HYBRID[::2], OF_HYBRID[3]]),
        (2, [CASES[0], *CASES[2:], OUTPUTS | AT_HOME]),
        (3, CASES[1:2]),
        pytest.param(1, [MIXTURES[0], *OF_LATENT[1:2], OF_HYBRID[1]], marks=pytest.mark.matrix),
        pytest.param(2, [CASES[1], MIXED], marks=pytest.mark.matrix),
    ],
)
def test_live_bytes(stages: int, cases: list[dict[str, str]]) -> None:
    by_rank = run_ranks(stages, _live, stages, 2 * stages, cases)
    for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        for rank in ranks:
            predicted, where = rank["predicted"], (case, rank["stage"])
            turned = int(case.get("model.latent.rotary_dim", 32))
            between = _between_layers(rank["stage"], stages, case.get("cad.enabled") != "false", turned)
            assert rank["starts"] == pytest.approx(predicted.activations + between, rel=0.005), where
            # Rounded rows and halves that differ: exact where attention is at home.
            # A recurrent core at work counts with what its kernel for GPUs allocates.
            most = 0.04 if case.get("cad.enabled") != "false" or "model.hybrid.pattern" in case else 0.001
            assert rank["peak"] == pytest.approx(predicted.activations + predicted.working, rel=most), where


def _between_layers(stage: int, stages: int, ticks: bool, turned: int) -> int:
    """Bytes outside of layers when a backward begins."""
    last, first = stage == stages - 1, stage == 0
    angles = 4 * TOKENS * turned
    # The loss keeps two gradients until its backward, the final norm its input.
    loss = 2 * HIDDEN + 4 * 64 * 128 if last else 0
    gradient_and_sent = (0 if last else HIDDEN) * (2 if ticks else 1)
    # The next micro-batch's input; 1F1B still has the gradient that it passed on.
    other = 0 if first else HIDDEN
    return angles + loss + gradient_and_sent + other


def test_rows_of_busy_servers() -> None:
    """The constants are what the busiest server of six steps has in plans for 2 to 8 ranks, in the mean."""
    context, steps = 131_072, 6
    mixes: tuple[Mix, ...] = ("pretrain", "prolong")
    found = []
    for ranks, mix in itertools.product((2, 4, 8), mixes):
        drawn = [sample_long_context(mix, ranks * context, context, seed) for seed in range(3 * steps)]
        busiest = np.array([_busiest_server(lengths, ranks) for lengths in drawn]) / (context // 2)
        found += list(busiest.reshape(3, steps, -1).max(axis=1))
    constants = [memory.BUSY_SERVER_Q, memory.BUSY_SERVER_KV, memory.BUSY_SERVER_OTHERS, memory.REGIONS_KV[0]]
    assert np.mean(found, axis=0) == pytest.approx(constants, rel=0.05)


@pytest.mark.parametrize("halves", [1, 2])
def test_keys_at_the_busiest_server_of_a_document_that_spans_all_ranks(halves: int) -> None:
    """The constant is the mean of pools of 2, 4 and 8, none of which is far from it."""
    tokens = 131_072
    busiest = [_busiest_server(np.array([ranks * tokens]), ranks, halves) for ranks in (2, 4, 8)]
    for column, constants, ranges in (
        (1, {halves: memory.LONG_DOCUMENT_KV}, {1: (1.0, 1.1), 2: (1.0, 1.1)}),
        (3, memory.REGIONS_KV[1], {1: (1.0, 1.1), 2: (1.3, 2.2)}),
    ):
        found = [each[column] / (tokens // halves) / ranks for each, ranks in zip(busiest, (2, 4, 8), strict=True)]
        assert np.mean(found) == pytest.approx(constants[halves], rel=0.05)
        least, most = ranges[halves]
        assert least <= min(found) and max(found) <= most


def _busiest_server(lengths: np.ndarray, ranks: int, halves: int = 2) -> tuple[float, float, float, float]:
    """Most rows of queries in a half; of keys, of queries that live elsewhere, and of keys that tasks compute with, in
    the mean of both."""
    tolerance = training_tolerance(ranks)
    plan = plan_micro_batch(lengths, ranks, area_cost(32, 8, 128), nano_batches=halves, tolerance=tolerance)
    servers = [[route(half.forward, rank) for half in plan.nano_batches] for rank in range(ranks)]
    q = max(half.q.destination_rows for server in servers for half in server)
    kv = max(sum(half.kv.destination_rows for half in server) / len(server) for server in servers)
    regions = max(sum(half.cu_kv[-1] for half in server) / len(server) for server in servers)
    return q, kv, max(sum(half.q.receive.rows.sum() for half in server) / len(server) for server in servers), regions
