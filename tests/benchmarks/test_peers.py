"""Unmodified Megatron-Core beside the other modes: on CPUs with its local layers in place of Transformer Engine's."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.peers.planning import PlanningTime
from benchmarks.peers.rows import packed_rows
from benchmarks.peers.served import check_served
from benchmarks.throughput.ceiling import Attention, Ceiling, Core, Matrix
from benchmarks.throughput.report import compare
from benchmarks.throughput.settings import parse
from distca.baselines import BaselineError, parse_mode
from distca.errors import ConfigError
from distca.train.config.cli import parse_run_config
from distca.train.launch.machines import free_port
from megatron_patches.versions import has_gated_delta_net
from tests.testing import programs

ROOT = Path(__file__).parents[2]
MODEL = ["--model.layers", "2", "--model.hidden", "32", "--model.ffn", "48", "--model.heads", "2"]
MODEL += ["--model.kv_heads", "2", "--model.vocabulary", "64", "--data.tokens_per_rank", "128"]
MODEL += ["--data.context_length", "128", "--train.recompute", "mlp"]
RUN = ["--mixes", "pretrain", "--contexts", "128", "--batches", "2", "--warm-up", "0"]

# The benchmark, and then what it imported.
PROGRAM = """
import sys
from benchmarks.throughput.__main__ import main
main()
assert not [name for name in sys.modules if name.startswith("megatron_patches")], "Megatron-Core is not as it was"
assert "megatron.core.models.gpt" in sys.modules
print("imported nothing of ours")
"""


def arguments(folder, modes, *settings):
    return "--output", str(folder / "out"), "--modes", *modes.split(), *RUN, "--", *MODEL, *settings


def start(folder, modes, *settings):
    result = programs.torchrun(2, "-m", "benchmarks.throughput", *arguments(folder, modes, *settings))
    assert result.returncode == 0, result.stderr
    return json.loads((folder / "out" / "benchmark.json").read_text())


EXPERTS = ["--model.experts.count", "8", "--model.experts.ffn", "16", "--model.experts.balance", "0.001"]
EXPERTS += ["--model.qk_norm", "true"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU rehearsal")
def test_unmodified_megatron_trains_the_same_batches_from_the_same_weights(tmp_path):
    """Of a model with experts and grouped-query attention in two stages, which run by 1F1B; the other models have one
    stage and two replicas. Norms of queries and keys make attention count: a wrong base of RoPE is seen."""
    settings = ("--model.heads", "4", "--parallel.pp", "2", "--train.micro_batches", "2", *EXPERTS)
    before = start(tmp_path, "packed", *settings)
    report = start(tmp_path, "megatron-te", *settings)
    cell, old = report["cells"]["pretrain 128"], before["cells"]["pretrain 128"]
    assert list(cell["modes"]) == ["packed", "megatron-te"] and cell["modes"]["packed"] == old["modes"]["packed"]
    assert report["ceiling"] == before["ceiling"] and report["command"] == before["command"]
    assert cell["compared"]["loss_difference"]["megatron-te"] < 1e-6 and not cell["compared"]["apart"]
    # Megatron's fused cross-entropy rounds its gradient to bfloat16.
    assert cell["compared"]["gradient_norm_difference"]["megatron-te"] < 1e-3
    made = cell["modes"]["megatron-te"]
    assert made["kernel_planning_s"] == [0, 0] and made["attention_share"] is None
    assert made["tokens"] == cell["modes"]["packed"]["tokens"]
    assert "| megatron-te |" in (tmp_path / "out" / "table.md").read_text()


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU rehearsal")
def test_all_modes_train_the_same_dense_model(tmp_path):
    """Of a model with grouped-query attention, on two replicas."""
    grouped = ("--model.layers", "1", "--model.heads", "4", "--model.qk_norm", "true")
    start(tmp_path, "distca packed", *grouped)
    compared = start(tmp_path, "megatron-te", *grouped)["cells"]["pretrain 128"]["compared"]
    assert max(compared["loss_difference"].values()) < 1e-6 and not compared["apart"]
    assert max(compared["gradient_norm_difference"].values()) < 1e-3


HYBRID = ["--model.layers", "4", "--model.qk_norm", "true", "--model.hybrid.pattern", "G-*-"]
HYBRID += ["--model.hybrid.key_heads", "2", "--model.hybrid.value_heads", "4", "--model.hybrid.key_dim", "8"]
HYBRID += ["--model.hybrid.value_dim", "8", "--model.hybrid.output_gate", "true"]
HYBRID += ["--model.variant.zero_centered_norms", "true", "--model.variant.rotary_percent", "0.5"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU rehearsal")
@pytest.mark.skipif(not has_gated_delta_net(), reason="HybridModel's layers have been there since Megatron-Core 0.19")
@pytest.mark.parametrize("further", ["", pytest.param(" cp2-keep ulysses2", marks=pytest.mark.matrix)])
def test_all_modes_train_the_same_recurrent_layers(tmp_path, further):
    start(tmp_path, f"packed distca{further}", *HYBRID)
    report = start(tmp_path, "megatron-te", *HYBRID)
    compared = report["cells"]["pretrain 128"]["compared"]
    assert max(compared["loss_difference"].values()) < 1e-6 and not compared["apart"]
    modes = report["cells"]["pretrain 128"]["modes"]
    assert 0 < modes["distca"]["summaries_exposed"] < 1 and modes["packed"]["exposed"] == {}
    assert report["ceiling"]["recurrent"]["layers"] == 1 and report["ceiling"]["recurrent"]["backward"] > 0


LATENT = ["--model.latent.kv_rank", "12", "--model.latent.key_dim", "8", "--model.latent.rotary_dim", "4"]
LATENT += ["--model.latent.value_dim", "6", "--model.experts.count", "8", "--model.experts.ffn", "16"]
LATENT += ["--model.experts.dense_layers", "1", "--model.experts.shared_ffn", "8", "--model.experts.balance", "0.001"]
LATENT += ["--model.experts.score", "sigmoid", "--parallel.ep", "2"]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU rehearsal")
@pytest.mark.skipif(not has_gated_delta_net(), reason="Latent attention is served with Megatron-Core 0.19")
def test_all_modes_train_the_same_latent_attention(tmp_path):
    start(tmp_path, "distca packed cp2 cp2-keep", *LATENT)
    compared = start(tmp_path, "megatron-te", *LATENT)["cells"]["pretrain 128"]["compared"]
    assert max(compared["loss_difference"].values()) < 1e-6 and not compared["apart"]
    assert max(compared["gradient_norm_difference"].values()) < 1e-3


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU rehearsal")
def test_its_megatron_is_as_it_was(tmp_path):
    """One rank in a real start: forked programs have Megatron-Core with our changes."""
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{free_port()}",
    }
    words = [sys.executable, "-c", PROGRAM, *arguments(tmp_path, "megatron-te")]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "imported nothing of ours" in done.stdout


class Text(list):
    """Ids that say their document and position."""

    def __init__(self, number, length):
        super().__init__(range(1000 * number, 1000 * number + length))


@pytest.mark.parametrize("ranks,align", [(1, 1), (1, 16), (2, 1), (2, 16), (4, 3)])
def test_ranks_together_hold_every_token_once_with_its_label(ranks, align):
    documents = [Text(1, 5), Text(2, 1), Text(3, 37), Text(4, 16)]
    parts = [packed_rows(documents, ranks, rank, align) for rank in range(ranks)]
    learned = {}
    for rows in parts:
        assert len(rows.tokens) == len(parts[0].tokens) and len(rows.tokens) % align == 0
        assert (rows.borders == parts[0].borders).all() and rows.borders.dtype == np.int32
        pairs = zip(rows.tokens[rows.learned].tolist(), rows.labels[rows.learned].tolist(), strict=True)
        learned |= dict(pairs)
        assert (rows.positions[rows.learned] == rows.tokens[rows.learned] % 1000).all()
    expected = {token: token + 1 for document in documents for token in document[:-1]}
    assert learned == expected and sum(int(rows.learned.sum()) for rows in parts) == len(expected)
    sizes = np.diff(parts[0].borders)
    assert (sizes % (2 * ranks if ranks > 1 else 1) == 0).all() and parts[0].longest == sizes.max()


def test_a_rank_holds_a_chunk_and_its_opposite():
    first, last = (packed_rows([Text(1, 8)], 2, rank) for rank in (0, 1))
    assert first.positions.tolist() == [0, 1, 6, 7] and last.positions.tolist() == [2, 3, 4, 5]


def test_a_group_without_documents_has_padding_that_is_not_learned():
    rows = packed_rows([], 2, 1, 16)
    assert len(rows.tokens) == 16 and not rows.learned.any() and rows.borders.tolist() == [0, 32]


def test_names():
    for name in ("megatron-te", "megatron-te2-p2p", "megatron-te16-a2a"):
        assert parse_mode(name).name == name and parse_mode(name).peer
    assert not parse_mode("cp2-keep").peer
    for name in ("megatron-te2", "megatron-te-p2p", "megatron-te1-p2p"):
        with pytest.raises(BaselineError):
            parse_mode(name)


def test_modes_of_one_start_run_on_one_megatron(tmp_path):
    words = ["--output", str(tmp_path), "--modes", "packed", "megatron-te", "--contexts", "128", "--", *MODEL]
    with pytest.raises(ConfigError, match=r"megatron-te runs on Megatron-Core as it is, .* with the same --output"):
        parse(words, 2)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["--train.recompute", "auto"], "train.recompute is auto"),
        (["--train.linears", "local"], "train.linears is local"),
        (["--model.sinks", "true"], "model.sinks"),
        (["--model.layer_types", "[window, full]", "--model.window", "16"], "windows"),
        (["--model.rope_scaling.kind", "linear", "--model.rope_scaling.factor", "2"], "model.rope_scaling"),
        (["--model.variant.mlp_bias", "true"], "model.variant"),
        ([*HYBRID, "--model.variant.mlp_bias", "true"], "model.variant"),
        ([*HYBRID, "--model.hybrid.pattern", "M-*-"], "model.hybrid.pattern with M or E"),
        ([*HYBRID, "--model.hybrid.plain_norm", "true"], "model.hybrid.plain_norm"),
        ([*HYBRID, "--parallel.pp", "2"], "parallel.pp is 2"),
        ([*LATENT, "--model.latent.norm_epsilon", "1e-6"], "model.latent.norm_epsilon"),
        ([*LATENT, "--model.experts.document_balance", "0.1"], "model.experts.document_balance"),
        (["--model.experts.count", "4", "--model.experts.biases", "true"], "model.experts.biases"),
        (["--model.experts.count", "4", "--model.experts.clamp", "7"], "model.experts.clamp"),
        (["--parallel.tp", "3"], "model.vocabulary is 64"),
    ],
)
def test_what_would_be_computed_differently_is_refused(settings, named):
    with pytest.raises(BaselineError, match=named):
        check_served(parse_run_config([*MODEL, *settings]))


def test_distca_is_compared_with_every_mode_by_the_median_of_batches():
    def mode(*steps):
        alike = {"losses": [1.0], "gradient_norms": [1.0], "tokens": [100] * len(steps)}
        return alike | {"steps_s": list(steps), "tokens_per_s": 100 * len(steps) / sum(steps)}

    compared = compare({"distca": mode(1, 2, 1), "cp2": mode(1.1, 2, 1.1), "megatron-te2-p2p": mode(1.05, 2.1, 9)})
    assert compared["over"]["megatron-te2-p2p"]["median"] == pytest.approx(1.05)
    assert compared["over"]["megatron-te2-p2p"]["mean"] == pytest.approx((1.05 + 1.05 + 9) / 3)
    assert compared["over"]["cp2"]["median"] == pytest.approx(1.1)
    assert compared["ideal_baseline"] == "cp2"  # of this project's


def test_a_call_that_plans_is_told_from_one_that_queues(monkeypatch):
    seconds = iter([0.0, 0.001, 1.0, 1.3, 2.0, 2.2])
    monkeypatch.setattr("benchmarks.peers.planning.time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    extension = ModuleType("an_extension")
    extension.fused_attn_fwd = extension.fused_attn_bwd = lambda value: value + 1
    monkeypatch.setitem(sys.modules, "an_extension", extension)
    planning = PlanningTime("an_extension")
    assert [extension.fused_attn_fwd(1), extension.fused_attn_fwd(2), extension.fused_attn_bwd(3)] == [2, 3, 4]
    assert planning.take() == pytest.approx(0.5) and planning.take() == 0


def test_the_ceiling_of_a_report_is_the_one_that_was_measured():
    matrices = (Matrix("qkv", 8, 24, 2, 1e-6), Matrix("output", 8, 64, 1, 2e-6))
    attention = (Attention(0, 1, 1e-9, 2e-9), Attention(16, 1, 3e-9, 4e-9))
    ceiling = Ceiling(matrices, 1, attention, 256, 4 * 8, Core("a kernel", 1, 1e-6, 3e-6))
    again = Ceiling.of_report(json.loads(json.dumps(ceiling.report())), 1, 4 * 8)
    lengths = np.array([5, 200])
    assert again.step_seconds(lengths, 2) == pytest.approx(ceiling.step_seconds(lengths, 2), rel=1e-12)


def test_apex_has_a_stand_in_that_adds_up_weight_gradients(monkeypatch):
    from benchmarks.peers import world

    monkeypatch.setattr(world, "find_spec", lambda _: None)
    monkeypatch.delitem(sys.modules, world.APEX, raising=False)
    world.stand_in_for_apex()
    rows, gradient, total = torch.randn(6, 3), torch.randn(6, 2), torch.ones(2, 3)
    sys.modules.pop(world.APEX).wgrad_gemm_accum_fp32(rows, gradient, total)
    torch.testing.assert_close(total, 1 + gradient.t() @ rows)
