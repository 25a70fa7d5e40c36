"""A run that begins with a folder of a variant of LLaMA: it trains, resumes from its config.yaml, and is exported."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks import family_models
from distca.commands.main import main as distca
from distca.errors import ConfigError
from distca.models.rope import RopeScaling
from distca.models.variant import Variant
from distca.train.checkpoint.checkpoints import _before
from distca.train.config.cli import parse_run_config
from distca.train.config.schema import RunConfig
from megatron_patches.versions import has_gated_delta_net
from tests.testing.worlds import Worlds
from tests.train.checkpoint.test_folders import CONSTANT, NO_SHAPE, VOCABULARY, _tensors
from tests.train.small_runs import arguments, steps_of, train_all, write_texts

pytestmark = pytest.mark.slow
BF16 = torch.bfloat16
HYBRIDS = ("qwen3_5 with images, tied", "nemotron_h", "qwen3_5_moe, fused", "qwen3_next")


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    worlds = Worlds()
    yield worlds
    worlds.close()


def _line(root: Path, **settings: object) -> list[str]:
    chosen = {"output": root / "runs", "data__path": root / "texts", "data__tokenizer": "bytes"}
    chosen |= {"checkpoint__init_from": root / "first", "parallel__tp": 2}
    return arguments(**NO_SHAPE | CONSTANT | chosen | settings)


def _train(root: Path) -> None:
    import torch.distributed as dist

    train_all(
        [
            _line(root, name="whole", train__steps=2, checkpoint__export=root / "exported"),
            _line(root, name="half", train__steps=1),
        ]
    )
    if dist.get_rank() == 0:
        (root / "first").rename(root / "gone")
        shutil.copy(root / "runs" / "half" / "config.yaml", root / "half.yaml")
    dist.barrier()
    resumed = ["--config", str(root / "half.yaml"), "--checkpoint.resume", str(root / "runs" / "half")]
    train_all([[*resumed, "--train.steps", "2", "--parallel.tp", "1", "--parallel.pp", "2"]])


def test_a_gemma_3_trains_resumes_without_its_folder_and_is_exported(worlds: Worlds, tmp_path: Path) -> None:
    write_texts(tmp_path / "texts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(family_models.SIZES, "vocab_size", VOCABULARY)
        family_models.write_folder("gemma3", tmp_path / "first", torch.bfloat16)
    worlds.call(2, _train, tmp_path)
    whole = steps_of(tmp_path / "runs" / "whole")
    assert steps_of(tmp_path / "runs" / "half") == pytest.approx(whole, rel=1e-6)
    written = yaml.safe_load((tmp_path / "runs" / "whole" / "config.yaml").read_text())["model"]["variant"]
    assert (written["norms"], written["window_rope_base"], written["zero_centered_norms"]) == ("both", 50.0, True)
    (tmp_path / "gone").rename(tmp_path / "first")
    losses = {}
    for name in ("first", "exported"):
        model = family_models.loaded(tmp_path / name)
        text = torch.tensor([list((tmp_path / "texts" / "000.txt").read_bytes())])
        losses[name] = model(text, labels=text).loss.item()
    assert losses["exported"] < losses["first"] - 0.2
    distca(["checkpoint", "export", str(tmp_path / "runs" / "whole"), "--output", str(tmp_path / "again")])
    expected, got = _tensors(tmp_path / "exported"), _tensors(tmp_path / "again")
    assert expected.keys() == got.keys() and all(torch.equal(expected[name], got[name]) for name in expected)
    distca(["checkpoint", "import", str(tmp_path / "exported"), "--output", str(tmp_path / "imported")])
    distca(["checkpoint", "export", str(tmp_path / "imported"), "--output", str(tmp_path / "back")])
    got = _tensors(tmp_path / "back")
    assert expected.keys() == got.keys() and all(torch.equal(expected[name], got[name]) for name in expected)
    with pytest.raises(ConfigError, match=r"model\.variant\.norms is post, but the model in checkpoint\.init_from"):
        parse_run_config(_line(tmp_path, model__variant__norms="post"))


@pytest.mark.parametrize(
    "names",
    [
        ("arcee, biases", "gpt_oss", "glm4_moe, fused", *((*HYBRIDS, "deepseek_v3") if has_gated_delta_net() else ())),
        pytest.param(
            ("gpt_oss, dense", "qwen3_moe", "glm4_moe", *(("moonlight",) if has_gated_delta_net() else ())),
            marks=pytest.mark.matrix,
        ),
    ],
    ids=["every kind", "further ones"],
)
def test_sinks_biases_experts_and_recurrent_layers_go_through_a_checkpoint(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    commands = []
    for name in names:
        family_models.write_folder(name, tmp_path / name / "first")
        first, imported, back = (str(tmp_path / name / each) for each in ("first", "imported", "back"))
        commands += [["import", first, "--output", imported], ["export", imported, "--output", back]]
    for command in commands:
        distca(["checkpoint", *command])
    for name in names:
        expected, got = _tensors(tmp_path / name / "first"), _tensors(tmp_path / name / "back")
        assert expected.keys() == got.keys() and all(torch.equal(expected[each], got[each]) for each in expected)
        assert all(expected[each].dtype == got[each].dtype for each in expected)


@pytest.mark.skipif(not has_gated_delta_net(), reason="HybridModel's layers have been there since Megatron-Core 0.19")
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_hybrids_train_from_their_folders_in_stages_and_are_exported(worlds: Worlds, tmp_path: Path, tp: int) -> None:
    """What is not trained comes along to the last bit."""
    roots = [tmp_path / name for name in HYBRIDS[:2]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(family_models.SIZES, "vocab_size", VOCABULARY)
        for root in roots:
            write_texts(root / "texts")
            family_models.write_folder(root.name, root / "first", torch.bfloat16)
    worlds.call(2 * tp, _train_hybrids, roots, tp)
    for root in roots:
        _check_exported(root)


def _check_exported(root: Path) -> None:
    expected, got = _tensors(root / "first"), _tensors(root / "exported")
    carried = {each for each in expected if each.startswith(("mtp.", "model.visual."))}
    assert carried and expected.keys() == got.keys()
    assert {each for each in expected if torch.equal(expected[each], got[each])} >= carried
    losses = {}
    for folder in ("first", "exported"):
        model = family_models.loaded(root / folder)
        text = torch.tensor([list((root / "texts" / "000.txt").read_bytes())])
        losses[folder] = model(text, labels=text).loss.item()
    assert losses["exported"] < losses["first"] - 0.1
    distca(["checkpoint", "export", str(root / "runs" / "whole"), "--output", str(root / "again")])
    again = _tensors(root / "again")
    assert got.keys() == again.keys() and all(torch.equal(got[each], again[each]) for each in got)


def _train_hybrids(roots: list[Path], tp: int) -> None:
    own = {"name": "whole", "train__steps": 2, "parallel__tp": tp, "parallel__pp": 2}
    train_all([_line(root, **own, checkpoint__export=root / "exported") for root in roots])


def test_mixtures_train_from_their_folders_and_are_exported(worlds: Worlds, tmp_path: Path) -> None:
    """Experts in one tensor stay so, a layer that predicts further tokens comes along, and MXFP4 becomes bfloat16."""
    write_texts(tmp_path / "texts")
    cases = {"glm": "glm4_moe, fused", "oss": "gpt_oss, mxfp4"}
    cases |= {"moon": "moonlight"} if has_gated_delta_net() else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(family_models.SIZES, "vocab_size", VOCABULARY)
        models = {name: family_models.write_folder(case, tmp_path / name, BF16) for name, case in cases.items()}
    worlds.call(2, _train_mixtures, tmp_path, list(cases))
    text = torch.tensor([list((tmp_path / "texts" / "000.txt").read_bytes())])
    for name, model in models.items():
        first, last = model.float(), family_models.loaded(tmp_path / f"{name} exported")
        assert last(text, labels=text).loss.item() < first(text, labels=text).loss.item() - 0.1, name
        distca(["checkpoint", "export", str(tmp_path / "runs" / name), "--output", str(tmp_path / f"{name} again")])
        expected, got = (_tensors(tmp_path / f"{name} {each}") for each in ("exported", "again"))
        assert expected.keys() == got.keys() and all(torch.equal(expected[each], got[each]) for each in expected)
    began, got = _tensors(tmp_path / "glm"), _tensors(tmp_path / "glm exported")
    assert began.keys() == got.keys() and torch.equal(began[FURTHER], got[FURTHER])
    assert not torch.equal(began[EXPERTS], got[EXPERTS]) and got[EXPERTS].dtype == BF16
    assert _tensors(tmp_path / "oss exported")[EXPERTS].dtype == BF16


FURTHER, EXPERTS = "model.layers.3.eh_proj.weight", "model.layers.1.mlp.experts.gate_up_proj"


def _train_mixtures(root: Path, names: list[str]) -> None:
    more = {"parallel__tp": 1, "parallel__ep": 2, "model__experts__balance": 0.01, "train__steps": 2}
    for name in names:
        folders = {"checkpoint__init_from": root / name, "checkpoint__export": root / f"{name} exported"}
        train_all([_line(root, name=name, **folders, **more)])


def test_other_positions_of_a_gemma_3_are_written_by_kind_of_layer(tmp_path: Path) -> None:
    from dataclasses import replace

    from distca.models.description import describe, describe_folder
    from distca.models.exported_config import config_fields

    family_models.write_folder("gemma3", tmp_path)
    first = json.loads((tmp_path / "config.json").read_text())
    model = describe_folder(tmp_path)
    assert config_fields(model, "float32", first) == first
    longer = replace(model, rope_base=5e4)
    written = config_fields(longer, "float32", first)
    assert written["rope_parameters"]["full_attention"] == {"rope_type": "linear", "rope_theta": 5e4, "factor": 8.0}
    assert written["rope_parameters"]["sliding_attention"]["rope_theta"] == 50.0
    assert describe(written, "config.json") == longer


def test_a_checkpoint_from_before_a_field_was_there_had_its_default() -> None:
    earlier = asdict(RopeScaling(kind="yarn", factor=4.0, original_length=16))
    for newer in ("short_factors", "long_factors"):
        del earlier[newer]
    saved = {"model.rope_scaling": earlier}
    assert _before(saved, "model.rope_scaling") == asdict(RopeScaling(kind="yarn", factor=4.0, original_length=16))
    groups = {name: value for name, value in asdict(RunConfig().model).items() if isinstance(value, dict)}
    assert {name: _before({}, f"model.{name}") for name in groups} == groups
    assert _before(saved, "model.variant") == asdict(Variant()) and _before(saved, "model.layers") is None
