"""Against the trainer's own prediction, which tests hold against measured peaks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from distca.models.experts import Experts
from distca.models.layer_bytes import LayerBytes, parameters_of_rank
from distca.plan import analytic_cost
from distca.plan.cost.linear import LinearRate
from distca.simulate import MODELS, Cluster, Job, dense
from distca.simulate.memory import at_home, static_bytes, with_servers
from distca.train.config.cli import parse_run_config
from distca.train.run.memory import predict_memory
from tests.simulate.cases import pair_cost

CONFIGURATION = str(Path(__file__).parents[2] / "configs" / "llama-8b.yaml")


@pytest.mark.parametrize("tp", [1, 2])
def test_parameters_of_a_rank_count_what_every_tensor_parallel_rank_has(tp: int) -> None:
    """Latent attention's projections to latent rows, and routers."""
    model = replace(MODELS["moonlight-16b-a3b"], layers=2)
    model = replace(model, experts=replace(model.experts, dense_layers=0))
    part = model.attention_shape(tp)
    cost = analytic_cost(part.heads, part.kv_heads, part.head_dim, value_dim=part.value_dim)
    job = Job(model, Cluster(8), cost, tp=tp)
    layers = [LayerBytes(shape=model, kind=kind, tp=tp) for kind in model.layer_kinds]
    norms = 5 * model.hidden + 2 * model.latent.norm_weights()
    assert job.parameters == parameters_of_rank(model, layers, model.vocabulary, True, True) - norms


@pytest.mark.parametrize(
    ("tp", "pp", "recompute", "fp8"),
    [
        (1, 1, "none", "none"),
        (1, 1, "mlp", "none"),
        (2, 2, "none", "none"),
        (2, 1, "mlp", "none"),
        (1, 1, "none", "current"),
        (1, 1, "mlp", "current"),
        (2, 1, "mlp", "delayed"),
        (1, 2, "all", "delayed"),
    ],
)
def test_packed_documents_need_what_the_trainer_predicts(tp: int, pp: int, recompute: str, fp8: str) -> None:
    words = {
        "model.layers": 4,
        "parallel.tp": tp,
        "parallel.pp": pp,
        "train.recompute": recompute,
        "train.fp8": fp8,
        "cad.enabled": False,
    }
    words |= {"train.micro_batches": 4, "data.tokens_per_rank": 65_536}
    line = [str(word) for name, value in words.items() for word in (f"--{name}", str(value).lower())]
    config = parse_run_config(["--config", CONFIGURATION, *line])
    stages = predict_memory(config, 8, MODELS["8b"].vocabulary)
    shape = dense(4, 4096, 14336, 32, 8)
    part = shape.attention_shape(tp)
    job = Job(
        shape,
        Cluster(8),
        replace(
            analytic_cost(part.heads, part.kv_heads, part.head_dim),
            linear=LinearRate(1e-15, 2e-15, {"current": 0.6, "delayed": 0.6}),
        ),
        tp=tp,
        pp=pp,
        tokens_per_rank=65_536,
        recompute=recompute,  # type: ignore[arg-type]
        fp8=fp8,  # type: ignore[arg-type]
    )
    first = stages[0]
    assert static_bytes(job) == pytest.approx(first.model.held, rel=1e-3)
    rows = np.array([65_536])
    found = at_home(job, rows, rows, np.zeros(1), first.micro_batches)[0]
    assert found == pytest.approx(first.total, rel=0.03)


@pytest.mark.parametrize("pp", [1, 2])
def test_tied_embeddings_are_held_once_without_stages(pp: int) -> None:
    own = ["--model.layers=4", "--model.tie_embeddings=true", "--parallel.tp=1", f"--parallel.pp={pp}"]
    config = parse_run_config(["--config", CONFIGURATION, *own])
    shape = dense(4, 4096, 14336, 32, 8, tie_embeddings=True)
    job = Job(shape, Cluster(8), replace(analytic_cost(32, 8, 128), linear=LinearRate(1e-15, 2e-15, {})), pp=pp)
    first = predict_memory(config, 8, shape.vocabulary)[0]
    assert static_bytes(job) == pytest.approx(first.model.held, rel=1e-3)


def test_a_stage_holds_its_own_experts() -> None:
    configuration = Path(CONFIGURATION).with_name("moonlight-16b-a3b-like.yaml")
    line = ["--parallel.pp=9", "--parallel.tp=1", "--parallel.ep=1", "--train.recompute=all", "--cad.enabled=false"]
    rows = ["--data.tokens_per_rank=32768", "--data.context_length=32768", "--train.micro_batches=18"]
    config = parse_run_config(["--config", str(configuration), *line, *rows])
    model = MODELS["moonlight-16b-a3b"]
    part = model.attention_shape()
    cost = replace(
        analytic_cost(part.heads, part.kv_heads, part.head_dim, value_dim=part.value_dim),
        linear=LinearRate(1e-15, 2e-15, {}),
    )
    job = Job(model, Cluster(9, 9), cost, pp=9, tokens_per_rank=32_768, micro_batches=18, recompute="all")
    read = np.full(1, 32_768)
    for number, stage in enumerate(predict_memory(config, 9, model.vocabulary)):
        found = at_home(job, read, read, np.zeros(1), stage.micro_batches, number)[0]
        assert static_bytes(job, number) == pytest.approx(stage.model.held, rel=1e-3)
        assert found == pytest.approx(stage.total, rel=0.03)


def test_servers_of_each_stage_keep_its_own_layers() -> None:
    """The first of two stages has the dense layer. What the second one keeps is as much as with experts everywhere."""
    experts = Experts(count=8, topk=2, ffn=64)
    model = dense(4, hidden=16, ffn=32, heads=2, kv_heads=2, head_dim=8, vocabulary=8, experts=experts)
    rows, flight = np.full(2, 1000), np.ones(2)
    alone, mixed = (
        with_servers(job, rows, rows, rows, np.zeros(2), flight)
        for each in (experts, replace(experts, dense_layers=2))
        for job in (Job(replace(model, experts=each), Cluster(2), pair_cost(), pp=2),)
    )
    assert mixed[1] == alone[1] and mixed[0] < alone[0]


def test_a_recomputed_layer_with_latent_attention_needs_its_expanded_keys_and_values() -> None:
    model = replace(MODELS["moonlight-16b-a3b"], vocabulary=64)
    part = model.attention_shape(1)
    cost = analytic_cost(part.heads, part.kv_heads, part.head_dim, value_dim=part.value_dim)
    job, rows = Job(model, Cluster(1), cost, recompute="all"), np.array([65_536])
    layers = [LayerBytes(shape=model, kind=kind, recompute="all") for kind in model.layer_kinds]
    kept = sum(layer.kept_beside_attention() for layer in layers)
    kept += len(layers) * (part.q_bytes + part.kv_bytes + layers[0].lse)
    at_work = max(layer.latent_at_work() for layer in layers) / 2 + layers[0].around_work(1)
    assert max(layer.latent_at_work() for layer in layers) > max(layer.mlp_at_work() for layer in layers)
    found = with_servers(job, rows, rows, rows, np.zeros(1), np.ones(1))[0]
    assert found == static_bytes(job) + rows[0] * (kept + at_work) + layers[-1].copies_at_work()
