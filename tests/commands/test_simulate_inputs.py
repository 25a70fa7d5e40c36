from pathlib import Path

import pytest

from distca.commands.simulate_inputs import read_model
from distca.errors import OptionError
from distca.simulate import MODELS, Model


def test_models_are_names_or_configurations(tmp_path: Path) -> None:
    configurations = Path(__file__).parents[2] / "configs"
    for name in ("8b", "34b"):
        assert read_model(str(configurations / f"llama-{name}.yaml")) == MODELS[name]
    (tmp_path / "tied.yaml").write_text(
        "model: {layers: 2, hidden: 64, ffn: 64, heads: 2, kv_heads: 1, tie_embeddings: true}"
    )
    assert read_model(str(tmp_path / "tied.yaml")) == Model(2, 64, 64, 2, 1, 32, tied=True)
    sizes = "layers: {}, hidden: 64, ffn: 64, heads: {}, kv_heads: 1"
    for content in ("name: x", f"model: {{{sizes.format(2, 0)}}}", f"model: {{{sizes.format('.inf', 2)}}}"):
        (tmp_path / "none.yaml").write_text(content)
        with pytest.raises(OptionError, match="has no model"):
            read_model(str(tmp_path / "none.yaml"))
