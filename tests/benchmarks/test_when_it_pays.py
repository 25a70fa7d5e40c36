"""README's table of when DistCA pays."""

from benchmarks.when_it_pays import row_of, table


def test_the_way_that_distca_is_least_ahead_of_counts() -> None:
    speeds = {"packed": 50, "cp2-keep": 80, "cp4-keep": 90, "distca": 100}
    modes = {mode: {"tokens_per_s": speed} for mode, speed in speeds.items()}
    assert row_of(modes, {}) == ["50 (**2.000×**)", "90 (**1.111×**)", "not measured", "100"]
    # By the median over batches the slower one in tokens/s is nearer to DistCA.
    compared = {"over": {"cp2-keep": {"median": 1.02}, "cp4-keep": {"median": 1.05}}}
    found = row_of(modes, {"compared": compared, "not_run": ["megatron-te"]})
    assert found[1:3] == ["80 (**1.020×**)", "cannot hold the longest document"]


def test_runs_of_two_and_of_four_gpus_have_rows_of_their_own() -> None:
    rows = [line.split(" | ") for line in table().splitlines() if line.startswith("| Pretrain, 128K, bf16")]
    assert [row[-1][1:8] for row in rows] == ["2 × H20", "4 × H20"]
