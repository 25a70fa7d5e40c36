"""A run of the throughput benchmark predicted from its command line: beside kept runs, and what is said of the rest."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.calibration_runs import RESULTS
from benchmarks.measured_runs import run_of, workloads_of
from benchmarks.predict import Machine, _read_both, joined, predicted
from benchmarks.predicted_kept import asked_of, beside
from benchmarks.run_costs import GPUS, costs_of
from distca.errors import ConfigError
from distca.simulate import MODELS

H200, H100 = GPUS
SMALL = ["--output", "x", "--mixes", "pretrain", "--contexts", "65536", "--batches", "1", "--warm-up", "0", "--modes"]


def kept(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return content


def test_a_kept_run_is_predicted_from_its_command_line() -> None:
    found = beside(kept("throughput_2_gpus_peers_64k.json"))
    assert {name: set(modes) for name, modes in found["cells"].items()} == {
        "pretrain 128K": {"cp2-keep", "distca"}, "prolong 128K": {"cp2-keep", "distca"}
    }  # fmt: skip
    assert 0 < found["median_error"] < 0.05
    row = found["cells"]["pretrain 128K"]["distca"]
    assert row["error"] == row["tokens_per_s"]["predicted"] / row["tokens_per_s"]["measured"] - 1
    # What moves is counted alike.
    assert row["gib_per_step"]["predicted"] == pytest.approx(row["gib_per_step"]["measured"], rel=0.01)
    assert len(row["step_errors"]) == 8 and found["median_step_error"] < 0.05
    assert "pretrain 128K, megatron-te2-p2p" in found["not_predicted"]


def test_a_kept_run_of_two_nodes_is_predicted_from_its_command_line() -> None:
    """Its links are slow, and gathers are faster on them than rows."""
    content = kept("kinds_gemma_3_like_two_nodes.json")
    (cell,) = beside(content)["cells"].values()
    assert set(cell) == {"cp2-keep", "cp2-halo", "distca"}
    assert all(abs(row["error"]) < 0.05 and row["gib_per_step"]["predicted"] for row in cell.values())


def test_nodes_of_several_ranks_share_what_enters_them() -> None:
    content = kept("throughput_4_gpus_128k.json") | {"socket_nodes": 2}
    content["links"] = {"all_to_all_gb_per_s": 9.0, "all_gather_gb_per_s": 8.0}
    cell = content["cells"]["pretrain 128K"]
    job = run_of("", content, cell, "distca", workloads_of(content, cell)).job
    # Two of three shares of an all-to-all leave the node. An all-gather goes from node to node once, at 8 GB/s.
    assert (job.cluster.gpus_per_node, job.cluster.network_gb_s) == (2, 6.0) and not job.one_sided
    assert job.stage_fabric.ring(4)[0] == 8e9 and job.links.ranks_per_node == 2


def test_a_kept_pipeline_is_predicted_from_its_command_line() -> None:
    content = kept("pipeline_8b_8_layers_pp2_tp2_prolong_256k.json")
    of, asked = asked_of(content)
    asked.remove("on")  # whose plans take seconds
    found = joined(predicted(asked, Machine(4), of) | {"command": ""}, content)
    (cell,) = found["cells"].values()
    assert (
        list(cell) == ["off"] and abs(cell["off"]["error"]) < 0.05 and cell["off"]["gib_per_step"]["measured"] is None
    )
    assert list(found["not_predicted"]) == ["prolong 256K, seed 1234, on"]
    at = asked.index("--ranks")
    for again in (asked, [*asked[:at], "--ranks=4", *asked[at + 2 :]]):
        with pytest.raises(ConfigError, match="--ranks is 2, and that of the benchmark 4"):
            predicted(again, Machine(2), of)


def test_a_run_that_was_ended_is_compared_over_its_own_batches() -> None:
    before = {"tokens": [10, 30], "steps_s": [1.0, 1.0], "tokens_per_s": 20.0, "idle_share": 0.1, "memory_gib": 1.0}
    before |= {"gib_per_step": 0.0}
    both = {"command": "", "hardware": "1 × NVIDIA H200", "seed": 1}
    ran = both | {"cells": {"a": {"modes": {"packed": {"tokens_per_s": 8.0, "steps_s": [1.25], "batches": 1}}}}}
    report = both | {"notes": [], "cells": {"a": {"modes": {"packed": before}, "not_predicted": {}}}}
    row = joined(report, ran)["cells"]["a"]["packed"]
    assert row["error"] == pytest.approx(0.25) and row["step_errors"] == [0.25]
    with pytest.raises(ConfigError, match="of a run with another seed; predict this one"):
        joined(report, ran | {"seed": 2})
    model = {"layers": 4, "latent": {"kv_rank": 0}}
    with pytest.raises(ConfigError, match="of a run with another model, another parallel; predict this one"):
        joined(report | {"model": model, "parallel": {"tp": 2}}, ran | {"model": {"layers": 8}, "parallel": {"tp": 1}})
    joined(report | {"model": model}, ran | {"model": {"layers": 4}})  # an older report lacks what came later
    ran["cells"]["a"]["modes"]["packed"] |= {"steps_s": [1.0] * 3, "batches": 3}
    with pytest.raises(ConfigError, match="The prediction has batches 2, and the run 3; predict as many"):
        joined(report, ran)


def test_files_in_each_others_place_are_named(tmp_path: Path) -> None:
    before, ran = tmp_path / "predicted.json", tmp_path / "benchmark.json"
    before.write_text('{"simulated": true, "cells": {}}')
    ran.write_text('{"cells": {}}')
    assert _read_both(before, ran) == ({"simulated": True, "cells": {}}, {"cells": {}})
    with pytest.raises(ConfigError, match=r"benchmark\.json is not a prediction by this command; give one"):
        _read_both(ran, before)
    ran.write_text("[1]")
    with pytest.raises(ConfigError, match=r"benchmark\.json is not the benchmark\.json of a run"):
        _read_both(before, ran)


def test_predictions_of_kept_runs_are_close_in_the_median() -> None:
    found = kept("predicted_kept.json")
    assert found["modes"] >= 100 and found["median_error"] < 0.03 and found["within_5_percent"] > 0.8 * found["modes"]


def test_parallelism_and_experts_of_a_report_reach_the_simulator() -> None:
    content = kept("experts_a3b_cut_2_gpus.json")
    cell = content["cells"]["pretrain 128K"]
    job = run_of("", content, cell, "distca", workloads_of(content, cell)).job
    assert (job.model.experts.count, job.ep, job.tp, job.cluster.gpus) == (128, 2, 1, 2) and job.hide_experts
    content["parallel"] |= {"tp": 2, "ep": 1}
    job = run_of("", content, cell, "cp2-keep", workloads_of(content, cell)).job
    assert (job.tp, job.cluster.gpus, job.data_parallel, job.shape.heads) == (2, 4, 2, 16)


def test_a_missing_table_is_named_and_taken_from_another_gpu_only_where_that_is_asked_for() -> None:
    gemma = MODELS["gemma-3-like"]
    with pytest.raises(ConfigError, match="--table-of 'NVIDIA H100 80GB HBM3'"):
        costs_of(H200, gemma, 1)
    costs = costs_of(H200, gemma, 1, table_of=H100)
    assert len(costs.notes) == 2 and all("stands in for it" in note for note in costs.notes)
    own, dense = costs_of(H100, gemma, 1), costs_of(H200, MODELS["8b"], 1)
    assert not own.notes and not dense.notes and own.full.measured.keys() == costs.full.measured.keys()
    assert costs.full.linear == dense.full.linear != own.full.linear
    scaled = costs_of(H200, MODELS["qwen3-30b-a3b"], 1)
    assert "scaled to it" in scaled.notes[0] and (scaled.full.shape.heads, scaled.full.shape.kv_heads) == (32, 4)
    narrow = costs_of(H200, MODELS["moonlight-16b-a3b"], 1, table_of=H100)
    assert "192 with values of 128" in narrow.notes[0] and "NVIDIA H200 for 32 query heads" in narrow.notes[0]


def test_what_is_not_known_is_left_out_by_name() -> None:
    def why(mode: str, gpu: str, *settings: str) -> str:
        asked = [*SMALL, mode, "--", "--config", "configs/llama-8b-cut.yaml", *settings]
        (cell,) = predicted(asked, Machine(2, gpu))["cells"].values()
        assert not cell["modes"]
        return str(cell["not_predicted"][mode])

    assert "train.fp8" in why("distca", H100, "--train.linears", "te", "--train.fp8", "current")
    assert "unmodified Megatron-Core" in why("megatron-te", H200, "--train.recompute", "none")
