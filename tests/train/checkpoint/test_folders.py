"""Runs that begin with a Hugging Face folder and leave one behind, through the real loop on gloo ranks."""

import json
import os
import pickle
import resource
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from benchmarks import family_models
from distca.commands.main import main as distca
from distca.errors import ConfigError, DistcaError, ModelError
from distca.testing.ranks import run_ranks
from distca.train.config.cli import parse_run_config, to_yaml
from distca.train.run.main import _check
from distca.train.run.run_folder import RunFolder
from tests.train.small_runs import arguments, steps_of, train_all, write_texts

pytestmark = pytest.mark.slow

NO_SHAPE = {f"model__{name}": None for name in ("layers", "hidden", "ffn", "heads", "kv_heads")}
CONSTANT = {"optimizer__lr": 0.01, "optimizer__min_lr": 0.01, "optimizer__warmup_steps": 0}
VOCABULARY = 259
"""All bytes and a few more, odd, so that two tensor-parallel ranks need padding."""
RESUMED = "tp1", "tp2"
RANKS = 2
"""On which the runs are; tests/train/test_fine_tuning.py begins with folders on more, some of them data parallel."""


def _line(root: Path, **settings: object) -> list[str]:
    chosen = {
        "output": root / "runs",
        "checkpoint__init_from": root / "first",
        "data__path": root / "texts",
        "data__tokenizer": "bytes",
        "parallel__tp": 2,
    }
    return arguments(**NO_SHAPE | CONSTANT | chosen | settings)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def _train(root: Path, runs: list[list[str]], resumed: list[list[str]]) -> None:
    import torch.distributed as dist

    train_all(runs)
    if dist.get_rank() == 0:
        for name in RESUMED:
            shutil.copytree(root / "runs" / "half", root / "runs" / f"half-on-{name}")
    dist.barrier()
    train_all(resumed)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with texts and the first folder, a Qwen3 in bfloat16."""
    root = tmp_path_factory.mktemp("folders")
    write_texts(root / "texts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(family_models.SIZES, "vocab_size", VOCABULARY)
        family_models.write_folder("qwen3", root / "first", torch.bfloat16)
    for name in ("tokenizer.json", "chat_template.jinja", "preprocessor_config.json", "tekken.json"):
        (root / "first" / name).write_text(f'{{"{name}": 1}}')
    return root


@pytest.fixture(scope="module")
def root(first: Path) -> Path:
    """The same with runs in runs/ and exports beside it."""
    root = first
    runs = [
        _line(root, name="whole", train__steps=2, checkpoint__export=root / "e1"),
        _line(root, name="half", train__steps=1),
        _line(
            root,
            name="requeued",
            train__steps=1,
            optimizer__lr=1e-30,
            optimizer__min_lr=0,
            checkpoint__export=root / "e0",
            checkpoint__resume="auto",
        ),
    ]
    resumed = [
        _line(root, checkpoint__resume=root / "runs" / "half-on-tp2", train__steps=2),
        _line(root, checkpoint__resume=root / "runs" / "half-on-tp1", train__steps=2, parallel__tp=1, parallel__pp=2),
        _line(root, checkpoint__resume=root / "runs" / "whole", train__steps=2, checkpoint__export=root / "e3"),
        _line(root, checkpoint__resume=root / "runs" / "whole", train__steps=2, checkpoint__export=root / "e3"),
    ]
    run_ranks(RANKS, _train, root, runs, resumed)
    return root


def test_a_run_with_nothing_to_resume_begins_with_the_weights_and_writes_them_in_their_type(root: Path) -> None:
    """Its learning rate changes nothing; that training begins with them is in tests/train/test_fine_tuning.py."""
    before, after = _tensors(root / "first"), _tensors(root / "e0")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    beside = ("preprocessor_config.json", "tekken.json")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json", *beside):
        assert (root / "e0" / name).read_bytes() == (root / "first" / name).read_bytes()
    fields, ours = (json.loads((root / name / "config.json").read_text()) for name in ("first", "e0"))
    assert ours["max_position_embeddings"] == 96 > fields["max_position_embeddings"]
    assert {name: ours[name] for name in fields} | {"max_position_embeddings": 64, "rope_parameters": None} == (
        fields | {"rope_parameters": None}
    )


def test_a_finished_run_writes_the_folder_that_it_lacks(root: Path) -> None:
    expected, got = _tensors(root / "e1"), _tensors(root / "e3")
    assert expected.keys() == got.keys() and all(torch.equal(expected[name], got[name]) for name in expected)
    resumed = {"checkpoint__resume": root / "runs" / "whole", "train__steps": 2}
    _checked(root, checkpoint__export=root / "e3", **resumed)
    for other in ("texts", "first"):  # which was there before the run
        with pytest.raises(ConfigError, match=f"{other}, which is not empty"):
            _checked(root, checkpoint__export=root / other, **resumed)


def test_what_was_trained_is_what_transformers_loads(root: Path) -> None:
    before, after = _tensors(root / "first"), _tensors(root / "e1")
    assert not any(torch.equal(before[name], after[name]) for name in before)
    losses = {}
    for name in ("first", "e1"):
        model = family_models.loaded(root / name)
        text = torch.tensor([list((root / "texts" / "000.txt").read_bytes())])
        losses[name] = model(text, labels=text).loss.item()
    assert losses["e1"] < losses["first"] - 0.5


def test_the_configuration_keeps_folder_and_shape(root: Path) -> None:
    written = yaml.safe_load((root / "runs" / "whole" / "config.yaml").read_text())
    assert written["checkpoint"]["init_from"] == str(root / "first")
    assert written["model"]["vocabulary"] == VOCABULARY and written["model"]["qk_norm"]
    assert written["model"]["rope_scaling"]["kind"] == "yarn"


def test_a_runs_own_checkpoint_wins(root: Path) -> None:
    whole = steps_of(root / "runs" / "whole")
    for key in ("loss", "grad_norm"):
        assert steps_of(root / "runs" / "half-on-tp2", key) == steps_of(root / "runs" / "whole", key), key
    assert steps_of(root / "runs" / "half-on-tp1") == pytest.approx(whole, rel=1e-6), "padding is cut anew"


def test_the_folder_may_be_gone_when_a_run_resumes(root: Path, tmp_path: Path) -> None:
    run = root / "runs" / "whole"
    text = (run / "config.yaml").read_text().replace(str(root / "first"), str(tmp_path / "gone"))
    (tmp_path / "config.yaml").write_text(text)
    line = ["--config", str(tmp_path / "config.yaml"), "--train.steps", "3"]
    config = parse_run_config([*line, "--checkpoint.export", str(tmp_path / "e"), "--checkpoint.resume", str(run)])
    _, checkpoint = _check(config, RANKS)
    assert checkpoint is not None and checkpoint.step == 2 and config.model.qk_norm
    with pytest.raises(ModelError, match="gone is no folder"):
        parse_run_config(line)


@pytest.mark.parametrize("run", ["runs/whole", "imported"])
def test_commands_write_the_same(root: Path, tmp_path: Path, run: str) -> None:
    if run == "imported":
        distca(["checkpoint", "import", str(root / "e1"), "--output", str(root / "imported")])
    distca(["checkpoint", "export", str(root / run), "--output", str(tmp_path / "e")])
    expected, got = _tensors(root / "e1"), _tensors(tmp_path / "e")
    assert expected.keys() == got.keys() and all(torch.equal(expected[name], got[name]) for name in expected)
    assert (tmp_path / "e" / "tokenizer.json").read_bytes() == (root / "first" / "tokenizer.json").read_bytes()
    assert family_models.loaded(tmp_path / "e").config.vocab_size == VOCABULARY
    positions = [
        json.loads((folder / "config.json").read_text())["max_position_embeddings"]
        for folder in (root / "e1", tmp_path / "e")
    ]
    assert positions[0] == positions[1]


def test_what_was_imported_loads_on_other_ranks(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    distca(["checkpoint", "import", str(root / "first"), "--output", str(tmp_path / "imported")])
    assert "DEPRECATED" not in capfd.readouterr().err
    assert run_ranks(4, _loads, root / "first", tmp_path / "imported") == [True] * 4


def _loads(folder: Path, imported: Path) -> bool:
    """Whether megatron reads the checkpoint into the weights that the folder gives on TP 2 x PP 2."""
    from megatron.core import dist_checkpointing

    from distca.models.description import describe_folder
    from distca.models.tensors import TensorFiles
    from distca.train.config.initial import model_config
    from megatron_patches.hugging_face.weights import load_weights
    from megatron_patches.layers.block import block_spec
    from megatron_patches.model.gpt import build_gpt, transformer_config
    from megatron_patches.patches.cpu import use_cpu
    from megatron_patches.ranks.groups import initialize_model_parallel

    use_cpu()
    initialize_model_parallel(2, 2, 1)
    described = describe_folder(folder)
    shape = model_config(described)
    config = transformer_config(shape, torch.bfloat16, cpu_initialization=True)
    models = [build_gpt(shape, VOCABULARY, config, block_spec(config, disaggregate=False)) for _ in range(2)]
    load_weights(models[0], described, TensorFiles(folder))
    models[1].load_state_dict(
        dist_checkpointing.load({"model": models[1].sharded_state_dict()}, str(imported))["model"]
    )
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    return all(torch.equal(expected, got) for expected, got in pairs)


@pytest.mark.parametrize(
    ("arguments_of", "said"),
    [
        ("{root}/nowhere --output {tmp}/e", "{root}/nowhere has no complete checkpoint"),
        ("{root}/runs/whole --output {root}/first", "--output is {root}/first, which is not empty"),
        ("{root}/runs/whole --output {tmp}/e --step 1", "--step is 1, but {root}/runs/whole has checkpoints after 2."),
    ],
)
def test_mistakes_of_the_command(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments_of: str, said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        distca(["checkpoint", "export", *arguments_of.format(root=root, tmp=tmp_path).split()])
    assert ended.value.code == 2
    assert said.format(root=root) in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize(("command", "source"), [("import", "first"), ("export", "runs/whole")])
def test_a_folder_that_cannot_be_written_is_a_sentence(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], command: str, source: str
) -> None:
    line = ["checkpoint", command, str(root / source), "--output", str(tmp_path / "e")]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # bytes of a file, as if the disk were full
    try:
        with pytest.raises(SystemExit) as ended:
            distca(line)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = " ".join(capfd.readouterr().err.split())
    assert ended.value.code == 2 and f"--output is {tmp_path / 'e'}, which could not be written (" in said
    assert "make room for it, or name another folder." in said and "Traceback" not in said
    distca(line)


def test_a_damaged_checkpoint_is_not_exported(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(root / "runs" / "whole", tmp_path / "whole")
    shard = tmp_path / "whole" / "checkpoints" / "step_000002" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0x40
    shard.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        distca(["checkpoint", "export", str(tmp_path / "whole"), "--output", str(tmp_path / "e")])
    said = " ".join(capfd.readouterr().err.split())
    assert ended.value.code == 2 and "__1_0.distcp is not what was saved" in said and "with --step." in said
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize("checksums", [True, False], ids=["of a run", "imported"])
def test_code_in_a_checkpoint_is_not_run_by_an_export(
    root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], checksums: bool
) -> None:
    run = tmp_path / "whole"
    shutil.copytree(root / "runs" / "whole", run)
    checkpoint = run / "checkpoints" / "step_000002"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(_Touches(tmp_path / "ran")))
    if checksums:
        RunFolder(run).mark_complete(2)  # which fit
    else:
        shutil.copy(run / "config.yaml", checkpoint)
        (checkpoint / "COMPLETE").unlink()
    with pytest.raises(SystemExit) as ended:
        distca(["checkpoint", "export", str(run if checksums else checkpoint), "--output", str(tmp_path / "e")])
    assert not (tmp_path / "ran").exists() and not (tmp_path / "e").exists()
    said = " ".join(capfd.readouterr().err.split())
    assert ended.value.code == 2 and "Traceback" not in said
    assert "step_000002 is damaged: it names posix.system, which is no part of a checkpoint and was not run." in said
    assert ("with --step." in said) == checksums


class _Touches:
    """What makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.path}",)


def _checked(first: Path, **settings: object) -> None:
    _check(parse_run_config(_line(first, **settings)), RANKS)


def test_positions_may_be_stretched_and_nothing_else(first: Path) -> None:
    config = parse_run_config(_line(first, model__rope_base=2e6, model__rope_scaling__factor=32))
    scaling = config.model.rope_scaling
    assert (config.model.rope_base, scaling.kind, scaling.factor, scaling.original_length) == (2e6, "yarn", 32, 16)
    assert parse_run_config(_line(first)).model.rope_scaling.factor == 4
    with pytest.raises(ConfigError, match=r"model\.layers is 3, but the model in .* has 2; leave out model\.layers"):
        parse_run_config(_line(first, model__layers=3))


def test_the_written_configuration_is_read_back(first: Path, tmp_path: Path) -> None:
    config = parse_run_config(_line(first, model__rope_scaling__factor=32))
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert parse_run_config(["--config", str(tmp_path / "config.yaml")]) == config


def test_the_tokenizer_and_a_mixs_vocabulary_come_along(first: Path) -> None:
    config = parse_run_config(_line(first, data__tokenizer=None, data__source="mix", data__path="pretrain"))
    assert config.data.tokenizer == str(first / "first") and config.data.vocabulary == VOCABULARY


def test_what_fits_is_accepted(first: Path, tmp_path: Path) -> None:
    _checked(first, checkpoint__export=tmp_path / "new")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"checkpoint__export": "{root}/first"}, "checkpoint.export is {root}/first, which is not empty"),
        ({"checkpoint__init_from": "{root}/texts"}, "{root}/texts/config.json cannot be read"),
        ({"checkpoint__init_from": "{root}/frist", "checkpoint__resume": "auto"}, "{root}/frist is no folder"),
        (
            {"data__source": "mix", "data__path": "pretrain", "data__vocabulary": 260},
            "but the data uses 260 tokens; it is that of checkpoint.init_from, so use the tokenizer of",
        ),
    ],
)
def test_mistakes_are_sentences_before_anything_is_built(first: Path, settings: dict[str, object], said: str) -> None:
    given = {name: str(value).format(root=first) for name, value in settings.items()}
    with pytest.raises(DistcaError) as refused:
        _checked(first, **given)
    assert said.format(root=first) in str(refused.value)


def test_a_file_cut_short_is_found_before_anything_is_built(first: Path, tmp_path: Path) -> None:
    shutil.copytree(first / "first", tmp_path / "first")
    file = sorted((tmp_path / "first").glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match="perhaps cut short"):
        _checked(first, checkpoint__init_from=tmp_path / "first")


def test_a_model_that_transformers_has_not_is_not_exported(first: Path, tmp_path: Path) -> None:
    both = {"model__qkv_bias": True, "model__qk_norm": True}
    plain = arguments(data__path=first / "texts", output=tmp_path, checkpoint__export=tmp_path / "e", **both)
    with pytest.raises(ModelError, match=r"has both model\.qkv_bias and model\.qk_norm"):
        _check(parse_run_config(plain), RANKS)
