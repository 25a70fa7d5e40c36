"""Windows and sinks of Megatron's configuration against unmodified megatron-core, which runs one document at a time.

``distca parity --kinds`` has more models and layouts of ranks.
"""

from types import SimpleNamespace

import pytest
import torch

from distca.errors import SupportError
from distca.testing.ranks import run_ranks
from tests.parity.test_parity import _check, _suite

CPU = torch.device("cpu")


def _kinds(tp, pp, per_node, float64, numbers):
    suite = _suite()
    cases = [suite.replace(case, ranks_per_node=per_node) for case in suite.kind_cases(tp, pp=pp)]
    cases = [cases[number] for number in numbers]
    compare = suite.float64_errors if float64 else suite.float32_differences
    tolerance = suite.FLOAT64_TOLERANCE if float64 else suite.FLOAT32_TOLERANCE
    return [(case, figures, tolerance) for case, figures in zip(cases, compare(cases, CPU), strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [(0, 1, 3, 5), pytest.param((2, 4), marks=pytest.mark.matrix)])
def test_block_of_several_kinds_in_float64(numbers):
    _check(run_ranks(3, _kinds, 1, 1, 0, True, numbers)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "tp,pp,per_node,numbers",
    [  # number 3 has windows, sinks and full layers; of 3 and 5, stages run different kinds at the same time
        (1, 1, 2, (3,)),
        (2, 2, 0, (3, 5)),
        pytest.param(1, 1, 2, (4, 5), marks=pytest.mark.matrix),
        pytest.param(2, 2, 0, (2, 4), marks=pytest.mark.matrix),
    ],
)
def test_loss_and_every_gradient_of_several_kinds(tp, pp, per_node, numbers):
    _check(run_ranks(4, _kinds, tp, pp, per_node, False, numbers)[0])


def _config(**fields):
    default = {"num_layers": 4, "softmax_scale": None, "kv_channels": 16, "softmax_type": "vanilla"}
    return SimpleNamespace(**{**default, "window_size": None, "window_attn_skip_freq": None, **fields})


def test_kinds_of_layers():
    from megatron_patches.model.layer_kinds import LayerKinds

    only = LayerKinds.of(_config())
    assert [kind.window for kind in only.kinds] == [0] and only.of_layer == (0, 0, 0, 0)
    mixed = LayerKinds.of(_config(window_size=(127, 0), window_attn_skip_freq=4, softmax_type="learnable"))
    assert [(kind.window, kind.sink, kind.scale) for kind in mixed.kinds] == [(0, True, 0.25), (128, True, 0.25)]
    assert mixed.of_layer == (1, 1, 1, 0) and mixed.of_stages(2) == ((1, 1), (1, 0))
    assert LayerKinds.of(_config(window_size=(-1, 0))).of_layer == (0, 0, 0, 0)


@pytest.mark.parametrize(
    "fields,named",
    [
        ({"window_size": (127, 3)}, r"window_size is \(127, 3\)"),
        ({"window_size": 128}, "window_size is 128"),
        ({"window_size": (7, 0), "window_attn_skip_freq": [1, 0]}, r"window_attn_skip_freq is \[1, 0\]"),
        ({"window_size": (7, 0), "window_attn_skip_freq": 0}, "window_attn_skip_freq is 0"),
        ({"window_size": (7, 0), "window_attn_skip_freq": [[1], 0, 0, 1]}, r"window_attn_skip_freq is \[\[1\], 0"),
    ],
)
def test_windows_that_are_none_are_refused(fields, named):
    from megatron_patches.model.layer_kinds import LayerKinds

    with pytest.raises(SupportError, match=named):
        LayerKinds.of(_config(**fields))
