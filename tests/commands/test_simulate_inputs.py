from pathlib import Path

import pytest

from distca.commands.simulate_inputs import read_model
from distca.errors import OptionError
from distca.simulate import MODELS


def test_models_are_names_or_configurations(tmp_path: Path) -> None:
    configurations = Path(__file__).parents[2] / "configs"
    for name in ("8b", "34b"):
        assert read_model(str(configurations / f"llama-{name}.yaml")) == MODELS[name]
    (tmp_path / "none.yaml").write_text("name: x")
    with pytest.raises(OptionError, match="has no model"):
        read_model(str(tmp_path / "none.yaml"))
