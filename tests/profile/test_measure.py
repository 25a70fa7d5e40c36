import numpy as np
import pytest
import torch

from distca.attention.reference import ReferenceKernel
from distca.plan import AttentionShape, load_table
from distca.plan.cost.table_file import write_table
from distca.profile import measure as measuring
from distca.profile import timing
from tests.profile.machine import TINY, PretendMachine, true_backward, true_forward

CPU = torch.device("cpu")
SHAPE = AttentionShape(2, 1, 8, 4)


def silent(name, steps):
    return lambda: None


def measure(kernel):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "grid_for", lambda device, shape: TINY)
        return measuring.measure_device(kernel, SHAPE, CPU, torch.float32, hidden=16, ffn=32, progress=silent)


@pytest.fixture(scope="module")
def pretend_table(tmp_path_factory):
    """What a machine of known costs is measured to cost: the file's content and its path."""
    machine = PretendMachine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "Clock", lambda device: machine)
        content = measure(machine)
    path = tmp_path_factory.mktemp("tables") / "table.json"
    write_table(path, content)
    return content, path


def points_only(content, path):
    """The table without what was fitted to mixed batches."""
    plain = path.with_name("points_only.json")
    write_table(plain, {key: value for key, value in content.items() if key != "load_factors"})
    return plain


def test_table_holds_the_true_cost_of_shards_at_its_points(pretend_table):
    cost = load_table(points_only(*pretend_table))
    points = [(q, kv) for q in TINY.q_rows for kv in TINY.kv_rows if q < kv]
    q, kv = np.array(points).T
    np.testing.assert_allclose(cost.forward(q, kv), true_forward(q, kv), rtol=1e-4)
    np.testing.assert_allclose(cost.backward(q, kv), true_backward(q, kv), rtol=1e-4)


def test_whole_documents_pay_for_their_unfilled_tiles(pretend_table):
    """A document of any length up to a tile more or less costs half a tile more than one that ends with its tile."""
    cost = load_table(points_only(*pretend_table))
    for rows in (64, 128, 256):
        lengths = np.arange(rows - 8, rows + 8)
        np.testing.assert_allclose(
            cost.forward(lengths, lengths).sum(), true_forward(lengths, lengths).sum(), rtol=0.02
        )


def test_validation_finds_how_far_predictions_are_off(pretend_table):
    content, _ = pretend_table
    validation = content["validation"]
    assert 0 < validation["forward_error"]["mean"] <= validation["forward_error"]["worst"] < 0.12
    for batch in validation["batches"]:
        assert batch["tasks"] > 3
        assert batch["backward_measured_s"] > 2.5 * batch["forward_measured_s"]


def test_batches_that_take_longer_than_their_tasks_alone_are_predicted(monkeypatch):
    """A machine that is slower by 8 % forward, 5 % backward, as soon as batches are mixed."""
    slow = {"forward": 1.08, "backward": 1.05}

    class Throttled(PretendMachine):
        def forward(self, q_THD, k_SGD, v_SGD, batch, kind):
            return self._run("forward", batch, q_THD, k_SGD, v_SGD, batch, kind)

        def backward(self, *args):
            return self._run("backward", args[6], *args)

        def _run(self, name, batch, *args):
            before = self.time
            result = getattr(super(), name)(*args)
            kv = np.diff(batch.borders_kv)
            self.time += (self.time - before) * (slow[name] - 1) * (kv.max() > 4 * kv.min())
            return result

    machine = Throttled()
    monkeypatch.setattr(timing, "Clock", lambda device: machine)
    content = measure(machine)
    plain = PretendMachine()
    monkeypatch.setattr(timing, "Clock", lambda device: plain)
    unthrottled = measure(plain)
    for name, factor in slow.items():
        np.testing.assert_allclose(content["load_factors"][name], factor * unthrottled["load_factors"][name], rtol=1e-6)
        np.testing.assert_allclose(content[f"{name}_seconds"], unthrottled[f"{name}_seconds"], rtol=1e-12)
        assert content["validation"][f"{name}_error"]["mean"] == pytest.approx(
            unthrottled["validation"][f"{name}_error"]["mean"], abs=1e-3
        )


def test_reference_kernel_on_this_machine(tmp_path):
    content = measure(ReferenceKernel())
    write_table(tmp_path / "table.json", content)
    cost = load_table(tmp_path / "table.json")
    measured = np.array(content["forward_seconds"])
    load = content["load_factors"]["forward"][0]  # one for all lengths of a grid this small
    for row, q in enumerate(TINY.q_rows):
        for column, kv in enumerate(TINY.kv_rows):
            if q <= kv:
                assert measured[row, column] > 0
                assert cost.forward(np.array(q), np.array(kv)) == pytest.approx(load * measured[row, column], rel=1e-5)
            else:
                assert np.isnan(measured[row, column])
    assert content["linear"]["forward_s_per_token"] > 0
    assert content["linear"]["backward_s_per_token"] > 0
