"""How many layers stages have, and what is advised."""

import logging

import pytest

from distca.plan.phases import StageLayers
from distca.train.config import parse_run_config
from distca.train.settings import RunConfig
from distca.train.stage_layers import advise_stage_layers, stage_layers

VOCABULARY = 128_256


def _config(*settings: str) -> RunConfig:
    return parse_run_config(["--config", "configs/llama-8b.yaml", "--parallel.tp", "1", *settings])


def test_the_last_stage_serves_nothing_while_it_computes_the_output_layer() -> None:
    four = ("--parallel.pp", "4")
    assert stage_layers(_config(), VOCABULARY) == StageLayers(32, 32)
    assert stage_layers(_config(*four), VOCABULARY) == StageLayers(8, 8)
    # As long as 2.4 layers' products, and as 1.2 layers with attention; in backward half as much again.
    assert stage_layers(_config(*four, "--parallel.last_stage_layers", "5"), VOCABULARY) == StageLayers(9, 5, 1, 2)
    assert stage_layers(_config(*four, "--parallel.last_stage_layers", "5"), 1000) == StageLayers(9, 5, 1, 1)
    fewer = ("--model.layers", "31", *four, "--parallel.last_stage_layers", "7")
    assert stage_layers(_config(*fewer), VOCABULARY) == StageLayers(8, 7, 1, 1)


@pytest.mark.parametrize(
    "settings,vocabulary,said",
    [
        # max(9, 5 + 2.4) + max(18, 10 + 3 x 2.4) = 27 layers' forward, three of a layer
        (("--parallel.pp", "4"), VOCABULARY, "parallel.last_stage_layers 5 would shorten .* from 10.4 layers to 9.0"),
        (("--parallel.pp", "4", "--parallel.last_stage_layers", "5"), VOCABULARY, None),
        (("--parallel.pp", "4", "--cad.enabled", "false"), VOCABULARY, None),
        (("--parallel.pp", "4"), 1000, None),
        ((), VOCABULARY, None),
    ],
)
def test_fewer_layers_are_advised_where_they_help(
    settings: tuple[str, ...], vocabulary: int, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    advise_stage_layers(_config(*settings), vocabulary)
    assert len(caplog.messages) == (said is not None)
    if said is not None:
        import re

        assert re.search(said, caplog.messages[0])
