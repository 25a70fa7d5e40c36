"""A cost table that is measured when a run starts: only if none is shipped, once, and kept beside the runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from distca.attention import AttentionSpec
from distca.attention.reference import ReferenceKernel
from distca.cluster import agreement
from distca.errors import ConfigError
from distca.plan.cost import table_file
from distca.profile.timing import EndedEarlyError
from distca.train.config.cli import parse_run_config
from distca.train.config.schema import MEASURE, RunConfig
from distca.train.config.validate import validate
from distca.train.run import measured_costs

SHIPPED = Path(table_file.__file__).parent / "tables" / "cpu_reference_4x2x32.json"
CPU = torch.device("cpu")


def config_for(tmp_path: Path, heads: int) -> RunConfig:
    settings = {
        "output": tmp_path, "cad.cost_table": MEASURE, "model.hidden": 32 * heads, "model.heads": heads,
        "model.kv_heads": heads // 2, "model.vocabulary": 64, "data.source": "mix", "data.path": "pretrain",
        "data.vocabulary": 64,
    }  # fmt: skip
    return parse_run_config([word for name, value in settings.items() for word in (f"--{name}", str(value))])


def test_a_table_is_measured_once_if_none_is_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def measure(_: Any, shape: Any, device: Any, dtype: Any, **sizes: Any) -> dict[str, Any]:
        asked.append((shape.heads, shape.kv_heads, shape.head_dim, device, dtype, sizes["hidden"], sizes["ffn"]))
        return json.loads(SHIPPED.read_text()) | {"heads": 6, "kv_heads": 3, "head_dim": 32}

    monkeypatch.setattr(measured_costs, "find_table", lambda *_, **__: None)
    monkeypatch.setattr(measured_costs, "measure_device", measure)
    config = config_for(tmp_path, 6)
    validate(config, 1, 64, True)
    kernel = measured_costs.kernel_of(config, CPU)
    found = [measured_costs.tables_for(config, kernel, CPU, 0) for _ in range(2)]
    assert found == [str(tmp_path / "cost_tables")] * 2
    assert asked == [(6, 3, 32, CPU, torch.float32, 192, config.model.ffn)]
    assert table_file.open_table(f"{found[0]}/cpu_reference_6x3x32.json", 6, 3, 32).shape.heads == 6
    validate(replace(config, cad=replace(config.cad, cost_table=found[0])), 1, 64, True)


def test_a_shipped_table_is_taken(tmp_path: Path) -> None:
    config = config_for(tmp_path, 4)
    assert measured_costs.tables_for(config, measured_costs.kernel_of(config, CPU), CPU, 0) is None
    assert not (tmp_path / "cost_tables").exists()
    beside = replace(config, cad=replace(config.cad, servers=1))  # which measures what is missing for its GPU
    found = measured_costs.tables_for(beside, measured_costs.kernel_of(config, CPU), CPU, 0)
    assert found == str(tmp_path / "cost_tables") and Path(found).is_dir()


def test_a_server_without_a_model_measures_attention_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any, progress: Any, **sizes: Any) -> dict[str, Any]:
        progress("reference kernel", 1)()
        with pytest.raises(EndedEarlyError):
            progress("linear layers", 1)
        return {"sizes": sizes}

    monkeypatch.setattr(measured_costs, "measure_device", measure)
    spec = AttentionSpec(4, 2, 8, torch.float32, CPU)
    assert measured_costs.measured_attention(ReferenceKernel(), spec)["sizes"] == {"hidden": 0, "ffn": 0}


def test_the_first_rank_of_each_device_and_kernel_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, measured = config_for(tmp_path, 4), []
    kernel = measured_costs.kernel_of(config, CPU)
    monkeypatch.setattr(measured_costs, "find_table", lambda *_, **__: None)
    monkeypatch.setattr(measured_costs, "_measure", lambda *given: measured.append(given[-1].name))
    others: Any
    for others, names in ((("cpu", "torch"), ["cpu_reference_4x2x32.json"]), (("cpu", "reference"), [])):
        monkeypatch.setattr(
            measured_costs, "of_ranks", lambda mine, first=others: [first if isinstance(mine, tuple) else True, mine]
        )
        assert measured_costs.tables_for(config, kernel, CPU, 1) == str(tmp_path / "cost_tables")
        assert measured == names
        measured.clear()


def test_half_a_table_is_not_taken_by_a_later_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(path: Path, _: Any) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"device":')
        raise KeyboardInterrupt

    monkeypatch.setattr(measured_costs, "find_table", lambda *_, **__: None)
    monkeypatch.setattr(measured_costs, "measure_device", lambda *_, **__: {})
    monkeypatch.setattr(measured_costs, "write_table", killed)
    config = config_for(tmp_path, 6)
    for _ in range(2):  # it is measured again
        with pytest.raises(KeyboardInterrupt):
            measured_costs.tables_for(config, measured_costs.kernel_of(config, CPU), CPU, 0)
    assert not list((tmp_path / "cost_tables").glob("*.json"))


def test_a_table_that_cannot_be_written_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_costs, "find_table", lambda *_, **__: None)
    monkeypatch.setattr(measured_costs, "measure_device", lambda *_, **__: {})
    (tmp_path / "cost_tables").mkdir()
    (tmp_path / "cost_tables" / "cpu_reference_6x3x32.unfinished").symlink_to("/dev/full")
    config, said = config_for(tmp_path, 6), list[str]()
    kernel = measured_costs.kernel_of(config, CPU)
    monkeypatch.setattr(agreement, "of_ranks", lambda mine: [said.append(mine)])
    with pytest.raises(ConfigError, match=f"output is {tmp_path}, but the cost table .*No space left on device"):
        measured_costs.tables_for(config, kernel, CPU, 0)
    assert "No space left on device" in said[0], "ranks that measure nothing are told"
