"""How many layers stages have, and may have."""

from distca.plan.pipeline import StageLayers
from distca.train.config.cli import parse_run_config
from distca.train.config.schema import RunConfig
from distca.train.run.stage_layers import last_stage_layers_that_fit, stage_layers

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


def test_what_fits() -> None:
    assert last_stage_layers_that_fit(32, 4) == [2, 5, 8]
    assert last_stage_layers_that_fit(7, 2) == [1, 2, 3]
    assert last_stage_layers_that_fit(6, 4) == []
