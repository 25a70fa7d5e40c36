"""Two CPU nodes with a slow network between them: what is measured, and the prediction of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import slow_network
from benchmarks.slow_network import Cores, _check, _report, rate_of, run
from distca.errors import ConfigError, LaunchError
from distca.testing.nodes import why_not
from tests.testing.forked_nodes import ForkedNodes

SETTINGS = ["--model.layers", "1", "--model.hidden", "128", "--model.ffn", "128", "--model.heads", "4"]
SETTINGS += ["--model.kv_heads", "2", "--model.vocabulary", "64", "--data.vocabulary", "64"]
SETTINGS += ["--data.tokens_per_rank", "512", "--data.context_length", "512", "--train.precision", "fp32"]
RUN = ["--modes", "packed", "distca", "--mixes", "pretrain", "--contexts", "512", "--batches", "1", "--warm-up", "0"]


@pytest.mark.slow
@pytest.mark.matrix  # what it runs and what it reports have tests of their own (test_throughput.py, test_predict.py)
@pytest.mark.skipif(why_not() is not None, reason=f"no nodes: {why_not()}")
@pytest.mark.usefixtures("all_cores")
def test_modes_train_over_a_slow_link_and_are_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_network, "Nodes", ForkedNodes)
    (modes,) = run(1000, tmp_path, [*RUN, "--traced", "0", "--", *SETTINGS]).values()
    assert list(modes) == ["packed", "distca"]
    assert modes["packed"]["bytes_per_step"] == 0 < modes["distca"]["bytes_per_step"]
    # Half of them pass each node's link, at 125 MB/s.
    assert modes["distca"]["rows_alone_s"] == pytest.approx(modes["distca"]["bytes_per_step"] / 2 / 125e6)
    assert sum(modes["distca"]["steps_s"]) > modes["distca"]["rows_alone_s"]
    content = _report(tmp_path)
    (cell,) = content["cells"].values()
    cores = Cores(content, cell)
    predicted = cores.tokens_per_s("packed", rate_of(content, "packed"))
    assert predicted == pytest.approx(modes["packed"]["tokens_per_s"], rel=1e-3)
    # A link on which rows alone take ten steps; how long a step takes depends on what else this machine does.
    slow = modes["distca"]["bytes_per_step"] / 2 / (10 * sum(modes["packed"]["steps_s"])) / 1e9
    assert cores.tokens_per_s("distca", slow) < 0.5 * cores.tokens_per_s("distca", 100 * slow)
    assert 8e3 * rate_of(content, "distca") < 1.1 * 1000


@pytest.mark.skipif(why_not() is not None, reason=f"no nodes: {why_not()}")
@pytest.mark.usefixtures("all_cores")
def test_what_cannot_be_is_refused_before_anything_starts() -> None:
    with pytest.raises(LaunchError, match="--megabits has -1"):
        _check([100, -1], [])
    with pytest.raises(LaunchError, match="no cost table of CPUs for 4 query heads and 4 key/value heads of size 32"):
        _check([100], [*RUN, "--", *SETTINGS, "--model.kv_heads", "4"])
    with pytest.raises(ConfigError, match=r"data\.context_length"):
        _check([100], [*RUN, "--", *SETTINGS, "--data.context_length", "99999"])
