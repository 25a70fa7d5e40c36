"""The throughput benchmark: one tiny run of every mode on two CPU ranks, and its parts."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.testing import programs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MODEL = ["--model.layers", "1", "--model.hidden", "32", "--model.ffn", "48", "--model.heads", "2"]
MODEL += ["--model.kv_heads", "2", "--model.vocabulary", "64", "--data.tokens_per_rank", "128"]


def run(folder, *arguments, settings=()):
    words = ["-m", "benchmarks.throughput", "--output", str(folder), *arguments, "--", *MODEL, *settings]
    return programs.torchrun(2, *words, "--data.context_length", "128")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU rehearsal")
def test_every_mode_trains_the_same_batches(tmp_path):
    arguments = ("--mixes", "prolong", "--contexts", "128", "--batches", "2", "--warm-up", "1", "--link-channels", "2")
    result = run(tmp_path, *arguments, "--pairs", "2")
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "benchmark.json").read_text())
    cell = report["cells"]["prolong 128"]
    assert list(cell["modes"]) == ["distca", "packed", "cp2", "cp2-keep", "ring2", "ulysses2", "variable"]
    assert cell["compared"]["apart"] == []
    assert cell["pairs"]["baseline"] == cell["compared"]["ideal_baseline"]
    assert len(cell["pairs"]["ratios"]) == 2 and min(cell["pairs"]["ratios"]) > 0
    # In float32 the same documents under the same weights are much closer than the benchmark asks for.
    assert max(cell["compared"]["loss_difference"].values()) < 1e-5
    assert max(cell["compared"]["gradient_norm_difference"].values()) < 1e-4
    for mode in cell["modes"].values():
        assert len(mode["steps_s"]) == mode["batches"] == 2
        assert mode["tokens_per_s"] > 0 and mode["share_of_ceiling"] > 0
        assert mode["share_of_burst_ceiling"] == mode["share_of_ceiling"]  # only GPUs have clocks that they cannot hold
        assert len(mode["idle_shares"]) == 2 and sum(mode["idle_shares"]) / 2 == pytest.approx(mode["idle_share"])
        # The size of a process on a CPU is no peak, and holds what the modes before it left.
        assert mode["memory_gib"] is mode["reserved_gib"] is mode["outside_torch_gib"] is None
    assert cell["modes"]["packed"]["bytes_per_step"] == 0 < cell["modes"]["cp2"]["bytes_per_step"]
    assert set(report["links"]) == {"all_to_all_gb_per_s", "all_gather_gb_per_s", "ring_gb_per_s"}
    assert min(report["links"].values()) > 0
    table = (tmp_path / "table.md").read_text()
    # Nobody takes these rates for those of a network.
    links = "Links, not limited: --link-channels is 2, but only NCCL has channels and CPU ranks use gloo, GB/s"
    assert "| ulysses2 |" in table and f"{links} of each rank: all-to-all" in table
    assert "CPU ranks share cores, so these speeds say nothing" in table and "buys its speed with memory" in table
    assert not [head for head in ("MFU", "burst", "peak") if head in table]
    assert f"INFO {links} of each rank: all-to-all" in result.stderr
    assert "at home" not in result.stderr
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU rehearsal")
def test_a_run_of_which_every_mode_is_skipped_fails(tmp_path):
    # What variable can do is known once documents are drawn.
    arguments = ("--modes", "variable", "--mixes", "pretrain", "--contexts", "384", "--batches", "2", "--warm-up", "0")
    words = ["-m", "benchmarks.throughput", "--output", str(tmp_path), *arguments, "--", *MODEL]
    result = programs.torchrun(3, *words)
    assert result.returncode != 0
    assert "error: No mode ran, so no file was written. variable keeps documents whole" in result.stderr
    assert "Wrote" not in result.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize("device,links,last", [("cuda", None, True), ("cuda", 2, False), ("cpu", None, False)])
def test_nvshmem_memory_never_stands_beside_a_baseline(device, links, last):
    from types import SimpleNamespace

    from benchmarks.baselines import parse_mode
    from benchmarks.throughput.session import Session
    from benchmarks.throughput.settings import Cell

    cells = (Cell("pretrain", 128), Cell("prolong", 128))
    modes = tuple(parse_mode(name) for name in ("distca", "packed", "distca-unsplit", "cp2"))
    session = object.__new__(Session)  # its order needs no ranks
    session._settings = SimpleNamespace(cells=cells, modes=modes, slow_links=links is not None)
    session._world = SimpleNamespace(device=torch.device(device))
    order = [(cell.mix, mode.name) for cell, mode in session._order()]
    plain = [(cell.mix, mode.name) for cell in cells for mode in modes]
    ours = [run for run in plain if run[1].startswith("distca")]
    assert order == ([run for run in plain if run not in ours] + ours if last else plain)


def test_losses_or_gradients_apart_are_found():
    from benchmarks.throughput.report import compare

    def mode(loss, norm, rate=1.0):
        return {"losses": [2.0, loss], "gradient_norms": [1.0, norm], "tokens_per_s": rate, "steps_s": [1.0, 1.0]}

    modes = {"distca": mode(2.0, 1.0, 3.0), "packed": mode(2.001, 1.005, 2.0), "cp2": mode(2.0, 1.0, 2.5)}
    modes["distca-unsplit"] = mode(2.0, 1.0, 4.0)
    compared = compare(modes | {"variable": mode(2.0, 1.0, 5.0)})
    assert compared["apart"] == []
    assert (compared["ideal_baseline"], compared["over_ideal_baseline"]) == ("cp2", 1.2)
    assert compared["over_packed"] == 1.5
    assert compare(modes | {"ring2": mode(2.01, 1.0)})["apart"] == ["ring2"]
    assert compare(modes | {"ring2": mode(2.0, 1.02)})["apart"] == ["ring2"]
    assert compare(modes | {"ring2": mode(float("nan"), 1.0)})["apart"] == ["ring2"]


def test_batches_are_the_same_documents_for_every_mode_and_fit_their_bins():
    from benchmarks.throughput.batches import Replay, draw_batches
    from benchmarks.throughput.settings import Cell

    wanted = {"ranks": 4, "tokens_per_rank": 1000, "micro_batches": 2, "vocabulary": 64, "seed": 5}
    batches = draw_batches(Cell("prolong", 1500), 3, **wanted)
    assert batches.bins == 2  # a document of 1,500 tokens needs two ranks
    spanning, binned = Replay(batches.global_batches, 1, bins=False), Replay(batches.global_batches, 1, bins=True)
    for _ in range(3):
        for free, packed in zip(spanning.next(), binned.next(), strict=True):
            assert free.rank_of is None and np.array_equal(free.documents, packed.documents)
            assert np.bincount(packed.rank_of, weights=packed.lengths).max() <= 2000
            assert packed.lengths.max() <= 1500


def test_a_context_that_fits_nowhere_is_refused():
    from benchmarks.throughput.batches import draw_batches
    from benchmarks.throughput.settings import Cell
    from distca.errors import ConfigError

    with pytest.raises(ConfigError, match="raise data"):
        draw_batches(Cell("pretrain", 5000), 1, ranks=4, tokens_per_rank=1000, micro_batches=1, vocabulary=9, seed=0)


def test_ceiling_adds_up_linear_and_attention_work():
    from benchmarks.throughput.ceiling import Attention, Ceiling, Core, Matrix

    layer, output = Matrix("fc", 10, 10, 2, 1e-3), Matrix("output", 10, 10, 1, 5e-3)
    ceiling = Ceiling((layer, output), 1, (Attention(0, 2, 1e-4, 2e-4),), 64, 16)
    windowed = Ceiling((layer, output), 1, (Attention(0, 1, 1e-4, 2e-4), Attention(8, 1, 1e-3, 2e-3)), 64, 16)
    pairs = 100 * 8 - 28 + 10 * 8 - 28
    linear = 110 * (2 * 1e-3 + 5e-3)
    mixed = linear + 3e-4 * (100 * 101 + 10 * 11) / 2 + 3e-3 * pairs
    assert windowed.step_seconds(np.array([100, 10]), 4) == pytest.approx(mixed / 4)
    expected = 110 * (2 * 1e-3 + 5e-3) + 2 * 3e-4 * (100 * 101 + 10 * 11) / 2
    assert ceiling.step_seconds(np.array([100, 10]), 4) == pytest.approx(expected / 4)
    hybrid = replace(ceiling, core=Core("a kernel", 3, 1e-3, 2e-3))
    assert hybrid.step_seconds(np.array([100, 10]), 4) == pytest.approx((expected + 110 * 3 * 3e-3) / 4)


def test_products_of_a_hybrid_stack_are_all_weights_of_its_layers():
    from benchmarks.throughput.products import products_of
    from distca.train.config.cli import parse_run_config

    config = parse_run_config(["--config", str(ROOT / "configs" / "qwen3.5-9b-like-cut.yaml"), "--parallel.tp", "2"])
    products = {each.name: each for each in products_of(config)}
    assert {name: each.layers for name, each in products.items()} == {
        "qkv": 1,
        "proj": 1,
        "in_proj": 3,
        "out_proj": 3,
        "fc1": 4,
        "fc2": 4,
        "output": 1,
    }
    assert (products["qkv"].out, products["in_proj"].out) == (5120, 6176)
    weights = sum(2 * each.width * each.out * each.layers for each in products.values())
    assert weights == config.model.matmul_weights + 4096 * 32000


def test_summaries_are_exposed_where_the_slowest_rank_waits_for_them():
    from benchmarks.throughput.record import RankRecord
    from benchmarks.throughput.report import _exposed

    one = RankRecord(exposed_s=[{"states": 0.1, "dstates": 0.2, "q,k,v": 0.5}, {"states": 0.1}])
    other = RankRecord(exposed_s=[{"states": 0.3, "q,k,v": 0.9}, {}])
    found = _exposed([one, other], np.array([4.0, 6.0]))
    assert found["exposed"] == pytest.approx({"states": 0.03, "dstates": 0.02, "q,k,v": 0.09})
    assert found["summaries_exposed"] == pytest.approx(0.04)
    assert _exposed([RankRecord(), RankRecord()], np.ones(1)) == {"exposed": {}, "summaries_exposed": None}


@pytest.mark.parametrize("settings", [(), ("--model.latent.q_rank", "768")])
def test_products_of_latent_attention_are_all_weights_of_its_layers(settings):
    from benchmarks.throughput.products import products_of
    from distca.train.config.cli import parse_run_config

    config = parse_run_config(["--config", str(ROOT / "configs" / "moonlight-16b-a3b-cut.yaml"), *settings])
    weights = sum(each.width * each.out * each.layers for each in products_of(config))
    assert weights == config.model.matmul_weights + 2048 * 32000


def test_busy_time_is_the_union_of_spans():
    from benchmarks.throughput.busy import covered

    assert covered([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4
    assert covered([]) == 0


def test_kernels_are_told_apart_by_their_names():
    from benchmarks.throughput.busy import Kernel, summary

    kernels = [
        Kernel("kernel_cutlass_flash_attncuteflash_bwd_sm90", 0.0, 2.0),
        Kernel("nvjet_tst_192x192_64x4", 1.0, 3.0),
        Kernel("Memcpy PtoP (Device -> Device)", 2.5, 9.0),
        Kernel("vectorized_elementwise_kernel", 5.0, 6.0),
        Kernel("nvjet_tst_192x192_64x4", 6.0, 6.5),
        Kernel("chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64", 7.0, 7.25),
    ]
    traced = summary(kernels)
    assert traced.busy_s == pytest.approx(4.75)
    expected = {"attention": 2, "matrix products": 2.5, "communication": 6.5, "recurrent cores": 0.25, "other": 1}
    assert traced.kinds == pytest.approx(expected)
    assert traced.largest["matrix products"] == pytest.approx({"nvjet_tst_192x192_64x4": 2.5})
    assert list(traced.largest["communication"]) == ["Memcpy PtoP (Device -> Device)"]


def test_wrong_settings_are_sentences(tmp_path):
    from benchmarks.throughput.settings import parse
    from distca.errors import ConfigError

    for arguments, settings, words in (
        (["--modes", "tree2"], [], "There is no mode 'tree2'"),
        (["--modes", "cp4"], [], "do not divide the 6 data-parallel"),
        (["--modes", "ulysses3"], [], "key/value heads"),
        (["--modes", "ring2"], ["--model.latent.kv_rank", "8"], "ring2 takes values as wide as keys"),
        (["--batches", "0"], [], "--batches"),
        (["--contexts", "128", "1024"], [], "1,024 tokens does not fit into 6 data-parallel ranks of 128"),
        (["--modes", "packed", "--contexts", "256"], [], "No mode can run. packed keeps a document on one rank of 128"),
        (["--link-channels", "3"], [], "--link-channels is 3"),
        (["--link-channels", "0"], [], "--link-channels is 0"),
        ([], ["--model.vocabulary", "0"], "model.vocabulary is 0"),
        ([], ["--parallel.tp", "4"], "not divisible"),
        ([], ["--cad.servers", "1"], "cad.servers is 1, but the benchmark starts no servers"),
        ([], ["--cad.cost_table", "measure"], "cad.cost_table is measure, but only training measures"),
    ):
        command = ["--output", str(tmp_path), "--contexts", "128", *arguments, "--", *MODEL]
        command += ["--data.context_length", "128", *settings]
        with pytest.raises(ConfigError, match=words):
            parse(command, 6)


def test_distca_without_ping_pong_is_a_mode(tmp_path):
    from benchmarks.throughput.measure import config_of
    from benchmarks.throughput.settings import parse
    from distca.cluster.world import World

    command = ["--output", str(tmp_path), "--contexts", "128", "--modes", "distca", "distca-unsplit", "packed"]
    settings = parse([*command, "--", *MODEL, "--data.context_length", "128"], 2)
    world = World(0, 2, torch.device("cpu"))
    found = [config_of(mode, settings, settings.cells[0], world).cad for mode in settings.modes]
    assert [(cad.enabled, cad.ping_pong) for cad in found] == [(True, True), (True, False), (False, True)]


def test_all_modes_of_one_degree(tmp_path):
    from benchmarks.throughput.settings import parse

    command = ["--output", str(tmp_path), "--contexts", "128", "--degree", "2", "--", *MODEL]
    settings = parse([*command, "--data.context_length", "128"], 4)
    names = [mode.name for mode in settings.modes]
    assert names == ["distca", "packed", "cp2", "cp2-keep", "ring2", "ulysses2", "variable"]
    assert settings.left_out == {}


def test_of_all_modes_what_cannot_run_is_named_with_the_reason(tmp_path):
    from benchmarks.throughput.settings import parse
    from benchmarks.throughput.table import table

    command = ["--output", str(tmp_path), "--contexts", "128", "--", *MODEL, "--data.context_length", "128"]
    settings = parse(command, 4)
    assert "ulysses4" not in [mode.name for mode in settings.modes]
    assert list(settings.left_out) == ["ulysses4"]
    assert settings.left_out["ulysses4"].startswith("ulysses4 shards 2 key/value heads over 4 ranks")
    cell = {"tokens_per_batch": 1.0, "modes": {}, "not_run": settings.left_out}
    report = {"hardware": "x", "command": "y", "links": {}, "link_channels": None, "cells": {"pretrain 128": cell}}
    assert f"Not run: {settings.left_out['ulysses4']}" in table(report)


def test_checking_starts_nothing(tmp_path):
    words = ["-m", "benchmarks.throughput", "--check", "6", "--output", str(tmp_path / "new")]
    words += ["--contexts", "128", "--modes", "cp4", "--", *MODEL, "--data.context_length", "128"]
    wrong = programs.run(*words)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: cp4 needs groups of 4 ranks") and len(wrong.stderr.splitlines()) == 2
    right = programs.run(*("cp3" if word == "cp4" else word for word in words))
    assert (right.returncode, right.stdout, right.stderr) == (0, "", "")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("path", sorted(RESULTS.glob("throughput_*.json")), ids=lambda path: path.stem)
def test_kept_results_still_make_tables(path):
    from benchmarks.throughput.table import table

    report = json.loads(path.read_text())
    modes = [mode for cell in report["cells"].values() for mode in cell["modes"]]
    rows = [line for line in table(report).splitlines() if line.startswith("| ") and line[2:6] not in ("mode", "--- ")]
    assert [row.split()[1] for row in rows] == modes


def test_a_share_of_a_bursts_ceiling_is_written_where_it_differs(tmp_path):
    from benchmarks.throughput.table import table

    report = json.loads((RESULTS / "throughput_2_gpus_pretrain_128k.json").read_text())
    head, _, row, *_ = [line for line in table(report).splitlines() if line.startswith("| ")]
    cells = dict(zip(head.split(" | "), row.split(" | "), strict=True))
    assert (cells["of the ceiling"], cells["of a burst's ceiling"]) == ("92.0%", "85.5%")
    assert "idle" not in cells  # that run was not traced


def test_plots_say_what_they_show():
    from benchmarks.throughput.sweep import PANELS, title

    reports = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("throughput_*.json"))]
    one, all_of_them = title(reports[-1:]), title(reports)
    assert one.startswith("4 × NVIDIA H200, 131,072 tokens per rank") and "vocabulary 128,256" in one
    assert all_of_them.startswith("(1, ") and f"({len(reports)}) 4 × NVIDIA H200" in all_of_them
    assert all_of_them.count("links limited to 2 channels") == 2
    assert "links not limited: --link-channels is 2," in title([{**reports[-1], "device": "cpu", "link_channels": 2}])
    assert PANELS["tokens/s"][1].format(x=250000) == "250,000" and PANELS["idle share"][1].format(x=0.006) == "0.6%"


def test_layers_with_windows_leave_out_modes_of_full_layers(tmp_path):
    from benchmarks.throughput.settings import parse

    kinds = ["--model.layers", "2", "--model.layer_types", "[window, full]", "--model.window", "9"]
    command = ["--output", str(tmp_path), "--contexts", "128", "--", *MODEL, *kinds, "--data.context_length", "128"]
    settings = parse(command, 2)
    names = [mode.name for mode in settings.modes]
    assert names == ["distca", "packed", "cp2", "cp2-keep", "cp2-halo", "variable"]
    assert list(settings.left_out) == ["ring2", "ulysses2"] and "full layers only" in settings.left_out["ring2"]


def test_recurrent_layers_leave_out_modes_that_are_not_built_for_them(tmp_path):
    from benchmarks.throughput.settings import parse

    stack = ["--model.layers", "4", "--model.hybrid.pattern", "G-*-", "--model.hybrid.key_heads", "2"]
    stack += ["--model.hybrid.value_heads", "4", "--data.context_length", "128"]
    command = ["--output", str(tmp_path), "--contexts", "128", "--", *MODEL, *stack]
    settings = parse(command, 4)
    names = [mode.name for mode in settings.modes]
    assert names == ["distca", "packed", "cp2", "cp2-keep", "ulysses2", "variable"]
    assert "without recurrent layers" in settings.left_out["ring2"]
    assert "shards 2 key heads of recurrent layers over 4 ranks" in settings.left_out["cp4"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU rehearsal")
def test_layers_with_windows_and_sinks_train_alike(tmp_path):
    settings = ["--model.layers", "2", "--model.layer_types", "[window, full]", "--model.window", "9"]
    settings += ["--model.sinks", "true"]
    modes = ("distca", "distca-unsplit", "cp2-keep", "cp2-halo")
    arguments = ("--mixes", "prolong", "--contexts", "128", "--batches", "2", "--warm-up", "0")
    result = run(tmp_path, "--modes", *modes, *arguments, settings=settings)
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "benchmark.json").read_text())
    cell = report["cells"]["prolong 128"]
    assert list(cell["modes"]) == list(modes)
    assert max(cell["compared"]["loss_difference"].values()) < 1e-5
    assert max(cell["compared"]["gradient_norm_difference"].values()) < 1e-4
    kept, halo = (cell["modes"][mode]["bytes_per_step"] for mode in ("cp2-keep", "cp2-halo"))
    assert kept / 2 < halo < kept  # documents here are hardly longer than the window
    assert [each["window"] for each in report["ceiling"]["attention_of_others"]] == [9]
