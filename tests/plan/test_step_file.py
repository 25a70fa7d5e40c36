"""The file of a step that could not be planned: what is planned from it is the same, and `distca plan` takes it."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from distca.commands.plan import plan
from distca.commands.plan_step_results import replanned
from distca.errors import FailedPlanError, OptionError, PlanError
from distca.plan import AttentionKind, AttentionShape, Layout, Links, Plan, PlanOptions, analytic_cost, area_cost
from distca.plan.cost.analytic import AnalyticCost, cost_of_kind
from distca.plan.cost.linear import LinearRate, NonAttention
from distca.plan.cost.pool import PoolCost
from distca.plan.cost.scaled import ScaledCost, scaled
from distca.plan.cost.table import TableCost
from distca.plan.cost.table_file import TABLES, find_table, load_table
from distca.plan.step_file import StepInputs, read_step, write_step
from distca.words import format_bytes

KINDS = (AttentionKind(0.125), AttentionKind(0.125, window=700, softcap=30.0, sink=True))
LENGTHS = [[700, 12_000, 900, 31], [5000, 6000, 1]]
TABLE = TABLES / "cpu_reference_4x2x32.json"


def _inputs() -> dict[str, StepInputs]:
    measured = find_table("NVIDIA H200", "flash4", 32, 8, 128)  # with load factors and holes
    assert measured is not None and measured.load is not None
    assert np.isnan(measured.measured["forward_seconds"]).any()
    stages = PlanOptions(
        4, measured, stages=2, nano_batches=2, align=16, shares=2, resend=True, links=Links(2, 3.5),
        non_attention=NonAttention(1e-9, 3e-9), tolerance=0.01,
    )  # fmt: skip
    modelled = analytic_cost(8, 2, 64)
    mixed = replace(
        stages, cost=modelled, kinds=KINDS, costs=(modelled, cost_of_kind(KINDS[1], modelled)),
        layer_kinds=((0, 1, 1), (1, 1, 0)), non_attention=None,
    )  # fmt: skip
    windows = TableCost(measured.shape, *measured.measured.values(), load=measured.load, window=700)
    return {
        "mixed, in stages": StepInputs(LENGTHS, mixed),
        "mixed, measured": StepInputs(
            LENGTHS,
            PlanOptions(4, measured, kinds=KINDS, costs=(measured, windows), layer_kinds=((0, 1),), nano_batches=2),
        ),
        "measured, in stages": StepInputs(LENGTHS, stages, room=[14_000, 14_000]),
        "measured": StepInputs(LENGTHS, PlanOptions(4, load_table(TABLE))),
        "analytic, with homes": StepInputs(
            LENGTHS, PlanOptions(2, analytic_cost(8, 2, 64)), [np.array([0, 1, 0, 0]), None]
        ),
        "unlike servers": StepInputs(
            LENGTHS,
            PlanOptions(
                2,
                PoolCost((modelled, scaled(modelled, 2.0, 3.0)), (0, 1, 1)),
                nano_batches=2,
                servers=1,
                server_gb_s=(25.0,),
                non_attention=NonAttention(1e-9, 3e-9, (1.0, 2.0)),
            ),
        ),
        "at home": StepInputs([[5, 6]], PlanOptions(2, area_cost(), disaggregate=False), [[0, 1]]),
    }


@pytest.mark.parametrize("name", list(_inputs()))
def test_a_step_is_planned_from_its_file_as_it_was(name: str, tmp_path: Path, capsys: Any) -> None:
    inputs, path = _inputs()[name], tmp_path / "step.json"
    write_step(path, inputs)
    again = read_step(path)
    assert again is not None and list(tmp_path.iterdir()) == [path]
    write_step(tmp_path / "again.json", again)
    assert (tmp_path / "again.json").read_text() == path.read_text()
    ours, theirs = inputs.plan(), again.plan()
    assert ours.fingerprint == theirs.fingerprint
    for before, after in zip(ours.drawn, theirs.drawn, strict=True):
        assert np.array_equal(before, after)
    assert np.array_equal(ours.balance().seconds_after, theirs.balance().seconds_after)
    plan(str(path))
    assert f"{ours.tokens:,} tokens" in capsys.readouterr().out


def test_a_steps_file_may_have_numbers_of_numpy(tmp_path: Path) -> None:
    options = PlanOptions(2, area_cost(), tolerance=0.5)
    numpys = replace(options, ranks=np.int64(2), tolerance=np.float32(0.5))
    for name, room, of in (("python", [20], options), ("numpy", [np.int64(20)], numpys)):
        write_step(tmp_path / name, StepInputs([[5, 6]], of, room=room))
    assert (tmp_path / "numpy").read_text() == (tmp_path / "python").read_text()


def test_processes_of_one_id_on_two_machines_write_a_steps_file_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, inputs, finish = tmp_path / "step.json", _inputs()["at home"], Path.replace

    def finish_after_another(part: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", finish)
        write_step(path, inputs)
        return finish(part, target)

    monkeypatch.setattr("os.getpid", lambda: 7)
    monkeypatch.setattr(Path, "replace", finish_after_another)
    write_step(path, inputs)
    assert read_step(path) is not None and list(tmp_path.iterdir()) == [path]


def test_a_steps_file_has_every_option_and_all_that_a_cost_is_made_from(tmp_path: Path) -> None:
    names = {
        "options": {option.name for option in fields(PlanOptions)} - {"scheduler"},
        "analytic": {part.name for part in fields(AnalyticCost)},
        "table": set(signature(TableCost).parameters),
        "kind": {part.name for part in fields(AttentionKind)},
        "shape": {part.name for part in fields(AttentionShape)},
        "linear": {part.name for part in fields(LinearRate)},
        "pool": {part.name for part in fields(PoolCost)},
        "scaled": {part.name for part in fields(ScaledCost)},
    }
    for inputs in _inputs().values():
        write_step(tmp_path / "step.json", inputs)
        content = json.loads((tmp_path / "step.json").read_text())
        assert {*content, *content["options"]} >= names["options"]
        costs = [content["cost"], *content["costs"]]
        for cost in costs:
            assert set(cost) - {"model"} == names[cost["model"]]
            costs += [*cost.get("tables", ()), *(cost[name] for name in ("measured",) if cost["model"] == "scaled")]
            if cost["model"] in ("pool", "scaled"):
                continue
            assert set(cost["shape"]) == names["shape"] and (
                not cost["linear"] or set(cost["linear"]) == names["linear"]
            )
        assert [kind.keys() for kind in content["kinds"]] == [names["kind"]] * len(inputs.options.kinds)


def test_a_step_of_a_mixed_stack_shows_and_routes_every_combination(monkeypatch: pytest.MonkeyPatch) -> None:
    routed: set[int] = set()
    monkeypatch.setattr("distca.commands.plan_step_results.route", lambda plan, *_: routed.add(id(plan)))
    inputs, console = _inputs()["mixed, in stages"], Console(record=True, width=160)
    step = inputs.plan()
    monkeypatch.setattr(StepInputs, "plan", lambda _: step)
    console.print(replanned(inputs))
    shown, windowed = console.export_text(), KINDS[1].name
    for number, combination in enumerate((f"full | {windowed}", f"{windowed} | {windowed}", f"{windowed} | full")):
        moved = format_bytes(step.of_combination(number).balance().bytes_moved)
        assert f"1 of 3 layers: {combination}" in shown and moved in shown
    assert routed == {id(plan) for _, phase in step.phases for plans in phase.by_combination for plan in plans}
    each = [step.of_combination(number).balance() for number in range(3)]
    np.testing.assert_allclose(step.balance().seconds_after, np.mean([one.seconds_after for one in each], axis=0))
    assert step.balance().bytes_moved == pytest.approx(np.mean([one.bytes_moved for one in each]), abs=1)


@pytest.mark.parametrize("format", [1, 2, None])
def test_a_steps_file_of_another_format_is_refused(format: int | None, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    write_step(path, _inputs()["measured"])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"distca_step": format}))
    with pytest.raises(
        PlanError, match=rf"step\.json is of format {format}, and this version of DistCA reads format 5;"
    ):
        read_step(path)


def test_options_beside_a_steps_file_are_refused(tmp_path: Path) -> None:
    write_step(tmp_path / "step.json", _inputs()["measured"])
    with pytest.raises(OptionError, match=r"--ranks is given, but .*step\.json is a step's file, with options of its"):
        plan(str(tmp_path / "step.json"), ranks=4)


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": "many"}, {"lengths": None}, {"options": {}}, {"cost": {}}, {"links": {"ranks": 1}}, {"room": 3},
        {"lengths": [[5, 0]]}, {"lengths": []}, {"homes": [[0], [1]]}, {"links": None}, {"cost": {"shape": {}}},
        {"kinds": [{"width": 3}]}, {"layer_kinds": [[0], [0]]}, {"layer_kinds": 1}, {"costs": None}, {"kinds": None},
        {"layer_kinds": [[4]]}, {"costs": [{}]}, {"kinds": []}, {"homes": [[0, 0, 0, 0]]},
    ],
)  # fmt: skip
def test_a_steps_file_that_was_changed_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    write_step(path, _inputs()["measured"])
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(PlanError):
        plan(str(path))


@pytest.mark.parametrize("text", ["7\n5\n", "{", '{"lengths": [1]}', ""])
def test_other_files_are_no_steps(text: str, tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text(text)
    assert read_step(tmp_path / "lengths.txt") is None
    assert read_step(tmp_path) is None and read_step("pretrain") is None


def _fails(layout: Layout, direction: str) -> Plan:
    raise IndexError(f"index {layout.ranks} is out of bounds")


def test_a_step_that_the_planner_fails_on_is_written_and_named(tmp_path: Path, capsys: Any) -> None:
    from megatron_patches.steps.step import Taker, make_step
    from megatron_patches.steps.step_documents import StepDocuments

    documents = StepDocuments([[np.arange(length) for length in each] for each in LENGTHS])
    options = PlanOptions(2, area_cost(), nano_batches=2, scheduler=_fails)
    with pytest.raises(FailedPlanError) as failed:
        make_step(documents, options, Taker(0, 0, "cpu"), number=12, folder=tmp_path, room=40_000)
    path = tmp_path / "failed_plan_of_step_12.json"
    assert str(failed.value) == (
        "Step 12, of 7 documents and 24,632 tokens, could not be planned (IndexError('index 2 is out of bounds')). "
        f"{path} has the step's lengths and options; `distca plan {path}` plans the step again. Please report the "
        "error with that file, which holds no token ids."
    )
    plan(str(path))
    assert "24,632 tokens" in capsys.readouterr().out
    written = read_step(path)
    assert written is not None and written.room == [40_000, 40_000]


def test_a_step_that_cannot_be_written_where_it_should_be_is_written_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_patches.steps.failed_plans import reporting_failure

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with (
        pytest.raises(FailedPlanError, match=r"failed_plan_of_step_3\.json has the step's lengths"),
        reporting_failure(StepInputs([[5]], PlanOptions(1, area_cost())), 3, tmp_path / "missing"),
    ):
        raise ZeroDivisionError
    assert (tmp_path / "failed_plan_of_step_3.json").exists()
    with (
        pytest.raises(PlanError, match=r"^no layout$"),
        reporting_failure(StepInputs([[5]], PlanOptions(1, area_cost())), 4, tmp_path),
    ):
        raise PlanError("no layout")
    assert not (tmp_path / "failed_plan_of_step_4.json").exists()
