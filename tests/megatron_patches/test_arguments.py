"""The arguments of ``distca.CAD``: one set of options for the API, a run's settings and the planner."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from typing import Any

import numpy as np
import pytest

from distca.cad_options import CadOptions
from distca.errors import SupportError
from distca.train.config.schema import CadConfig
from megatron_patches.api import CAD
from megatron_patches.arguments import CadArguments


def test_a_user_gives_every_argument_as_a_keyword_and_only_tokens_per_rank_must_be_given() -> None:
    config, *keywords = inspect.signature(CAD).parameters.values()
    assert config.name == "config"
    assert {each.name for each in keywords} == {each.name for each in fields(CadArguments)}
    assert {each.kind for each in keywords} == {inspect.Parameter.KEYWORD_ONLY}
    assert [each.name for each in keywords if each.default is inspect.Parameter.empty] == ["tokens_per_rank"]
    with pytest.raises(TypeError, match=r"^CAD has no argument 'tokens_per_rnk'\. Did you mean tokens_per_rank\?$"):
        CAD(None, tokens_per_rnk=5)
    with pytest.raises(TypeError, match=r"^CAD has no argument 'zzz'\. It has .*tokens_per_rank"):
        CAD(None, tokens_per_rank=5, zzz=1)
    with pytest.raises(SupportError, match=r"^config is a dict; give CAD the model's TransformerConfig\.$"):
        CAD({"num_layers": 2}, tokens_per_rank=5)


def test_every_argument_has_its_meaning() -> None:
    documented: set[str] = set()
    for kind in (CadOptions, CadArguments):
        listed = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2]
        documented |= set(re.findall(r"^    (\w+): ", listed, re.MULTILINE))
    assert documented == {each.name for each in fields(CadArguments)}


def test_settings_and_arguments_share_options_and_their_defaults() -> None:
    settings = CadConfig(tolerance=0.3, backward="resend")
    given = CadArguments(tokens_per_rank=5, **settings.shared)
    assert given.shared == settings.shared and given.tolerance == 0.3
    assert {each.name for each in fields(CadConfig)} - set(settings.shared) == {"enabled"}
    assert all(each.default is not MISSING for each in fields(CadOptions))


def test_a_server_that_comes_later_has_the_speed_that_its_number_began_with() -> None:
    given = CadArguments(tokens_per_rank=5, servers=4, speeds=(1.0, 0.5, 0.25, 2.0), ranks_per_node=2)
    later = given.with_servers([2, 3, 4, 5], [0, 1, 2, 3], homes=2, tp=2)
    assert later.speeds == (1.0, 0.5, 2.0, 1.0) and later.ranks_per_node == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"backward": "both"}, r"`backward` is 'both'; it can be auto, keep, resend\."),
        ({"level": "all"}, r"`level` is 'all'; it can be auto, attention, time\."),
        ({"recompute": "mlp"}, r"`recompute` is 'mlp'; it can be none, all\."),
        ({"linears": "own"}, r"`linears` is 'own'; it can be"),
        ({"tokens_per_rank": 0}, r"`tokens_per_rank` is 0; it must be at least 1\."),
        ({"tokens_per_rank": 1.5}, r"`tokens_per_rank` is 1\.5; it must be a whole number\."),
        ({"tolerance": -0.1}, r"`tolerance` is -0\.1; it must be at least 0\."),
        ({"nvshmem_buffer_gb": float("nan")}, r"`nvshmem_buffer_gb` is nan; it must be at least 0\."),
        ({"disaggregate": "no"}, r"`disaggregate` is 'no'; it can be True or False\."),
        ({"ping_pong": None}, r"`ping_pong` is None; it can be True or False\."),
        ({"ranks_per_node": "2"}, r"`ranks_per_node` is '2'; it must be a whole number\."),
        ({"cost_table": 3}, r"`cost_table` is 3; it must be the path of a file or folder, or None\."),
        ({"speeds": (1, "fast")}, r"`speeds` is \(1, 'fast'\); it must be a tuple of numbers\."),
        ({"hybrid_layer_pattern": None}, r"`hybrid_layer_pattern` is None; it must be a text\."),
        ({"model_options": {"norms": "post"}}, r"`model_options` is .*; it must be a distca\.ModelOptions\."),
    ],
)
def test_values_that_mean_nothing_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(SupportError, match=said):
        CadArguments(**{"tokens_per_rank": 5} | given).check()


def test_numpys_truth_values_are_taken() -> None:
    CadArguments(tokens_per_rank=5, ping_pong=np.bool_(False)).check()


def test_ranks_compare_every_argument_that_changes_what_they_send_each_other() -> None:
    alike = CadArguments(tokens_per_rank=5, tolerance=0.1).alike
    assert {"tokens_per_rank", "disaggregate", "ping_pong", "backward", "deal", "level", "tolerance"} <= set(alike)
    assert {"ranks_per_node", "deterministic", "model_options", "transport"} <= set(alike)
    assert {"recompute", "offload", "linears", "nvshmem_buffer_gb"} <= set(alike)
    assert not {"kernel", "cost_table", "keep_outputs"} & set(alike)


def test_what_backward_does_follows_from_stages_and_host_memory() -> None:
    assert CadArguments(tokens_per_rank=5).how(1) == "keep"
    assert CadArguments(tokens_per_rank=5).how(2) == "resend"
    assert CadArguments(tokens_per_rank=5, offload=True, recompute="all").how(1) == "resend"
    assert CadArguments(tokens_per_rank=5, backward="resend").how(1) == "resend"
    assert CadArguments(tokens_per_rank=5, level="time", speeds=(1.0, 2.0)).how(1) == "keep"
    with pytest.raises(SupportError, match="level is 'time', but there are no pipeline stages"):
        CadArguments(tokens_per_rank=5, level="time").how(1)
    with pytest.raises(SupportError, match="ping_pong is False, so idle servers could not help others: set level"):
        CadArguments(tokens_per_rank=5, level="time", ping_pong=False).how(2)
    with pytest.raises(SupportError, match="offload is True, but recompute is 'none'"):
        CadArguments(tokens_per_rank=5, offload=True).how(1)
