"""Tensors of safetensors files: only what is asked for is read, and what is missing or broken is a sentence."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.family_models import write_folder
from distca.errors import ConfigError, ModelError
from distca.models.description import describe_folder
from distca.models.folder import (
    PARTIAL,
    ExportedModel,
    ShardWriter,
    begin,
    check_empty,
    clear,
    copy_companions,
    count_shards,
    finish,
)
from distca.models.layout import expected_shapes
from distca.models.quantised import part_shapes
from distca.models.tensors import INDEX, SINGLE, TensorFiles


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    write_folder("qwen3", folder)
    return folder


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "mixtral"
    write_folder("mixtral", folder, shard="5GB")
    return folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "gpt_oss"
    write_folder("gpt_oss, mxfp4", folder, shard="5GB")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in made.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def _check(folder: Path) -> None:
    for framework in ("numpy", "pt"):
        TensorFiles(folder, framework).check(describe_folder(folder))


def test_an_expert_that_is_missing_is_a_sentence(mixture: Path, tmp_path: Path) -> None:
    _check(mixture)
    stored = load_file(mixture / SINGLE)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == expected_shapes(describe_folder(mixture))
    missing = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    del stored[missing]
    (tmp_path / "config.json").write_bytes((mixture / "config.json").read_bytes())
    save_file(stored, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=f"has no tensor {missing}, which a model of its config.json has"):
        _check(tmp_path)


def test_experts_in_one_tensor_are_as_many_as_config_json_says(tmp_path: Path) -> None:
    write_folder("gpt_oss", tmp_path, shard="5GB")
    _check(tmp_path)
    stored = load_file(tmp_path / SINGLE)
    stored["model.layers.1.mlp.experts.down_proj"] = stored["model.layers.1.mlp.experts.down_proj"][:3].contiguous()
    save_file(stored, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=r"experts.down_proj of shape \[3, 64, 32\], but .* must be \[4, 64, 32\]"):
        _check(tmp_path)


def test_mxfp4_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """All bytes and scales of numbers that bfloat16 has, expert by expert."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 10, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(1, 250, (3, 10, 2), generator=generator, dtype=torch.uint8)
    save_file({"x_blocks": blocks, "x_scales": scales}, tmp_path / SINGLE)
    files, expected = TensorFiles(tmp_path), convert_moe_packed_tensors(blocks, scales)
    assert files.dtype("x") == "bfloat16"
    for number, theirs in enumerate(expected):
        assert torch.equal(files.read(f"x#{number}"), theirs)
        assert torch.equal(files.read(f"x#{number}", slice(5, 9), slice(3)), theirs[5:9, :3])


PROJECTION = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("blocks", lambda each: each[..., :15], r"_blocks of shape \[4, 32, 2, 15\], but .* must be \[4, 32, 2, 16\]"),
        ("blocks", lambda each: each.flatten(2), r"_blocks of shape \[4, 32, 32\], but .* must be \[4, 32, 2, 16\]"),
        ("blocks", lambda each: each[:3], r"_blocks of shape \[3, 32, 2, 16\], but .* must be \[4, 32, 2, 16\]"),
        ("scales", lambda each: each[:, :, :1], r"_scales of shape \[4, 32, 1\], but .* must be \[4, 32, 2\]"),
        ("scales", lambda each: each.float(), "_scales of type F32, but of mxfp4 it must be U8"),
        ("scales", None, "has no tensor .*_scales, which a model of its config.json has"),
        ("blocks", None, "has no tensor .*down_proj, which a model of its config.json has"),
    ],
)
def test_mxfp4_of_another_shape_or_type(packed: Path, tmp_path: Path, part: str, change: Any, said: str) -> None:
    stored = load_file(packed / SINGLE)
    changed = stored.pop(f"{PROJECTION}_{part}")
    if change is not None:
        stored[f"{PROJECTION}_{part}"] = change(changed).contiguous()
    (tmp_path / "config.json").write_bytes((packed / "config.json").read_bytes())
    save_file(stored, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=said):
        _check(tmp_path)


def test_mxfp4_of_what_is_not_read_so_or_is_there_twice(packed: Path, tmp_path: Path) -> None:
    _check(packed)
    (tmp_path / "config.json").write_bytes((packed / "config.json").read_bytes())
    stored, dense = load_file(packed / SINGLE), "model.layers.0.self_attn.o_proj.weight"
    save_file(stored | {PROJECTION: torch.zeros(4, 64, 32)}, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=r"down_proj and .*down_proj_blocks, which are the same tensor of the model"):
        _check(tmp_path)
    del stored[dense]
    blocks = {f"{dense}_blocks": torch.zeros(32, 2, 16).byte(), f"{dense}_scales": torch.zeros(32, 2).byte()}
    save_file(stored | blocks, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=r"o_proj\.weight in mxfp4, but .* of shape \[32, 64\], and no tensor of that"):
        _check(tmp_path)
    assert part_shapes("mxfp4", (4, 48, 32)) is None and part_shapes("fp8", (48,)) is None


def test_experts_in_one_tensor_by_version_5(tmp_path: Path) -> None:
    """Projections are read expert by expert, in FP8 too; a layer that has its experts apart is a sentence."""
    write_folder("mixtral, fused", tmp_path, shard="5GB")
    _check(tmp_path)
    stored, described = load_file(tmp_path / SINGLE), describe_folder(tmp_path)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == expected_shapes(described)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    whole = stored.pop(name)
    save_file(
        stored | {f"model.layers.1.mlp.experts.{each}.w1.weight": whole[each] + 0 for each in range(4)},
        tmp_path / SINGLE,
    )
    with pytest.raises(ModelError, match=f"has no tensor {name}, which a model of its config.json has"):
        _check(tmp_path)
    del stored["model.layers.0.mlp.experts.down_proj"]
    save_file(stored, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=r"has no tensor model\.layers\.0\.mlp\.experts\.down_proj, which a model of"):
        _check(tmp_path)
    values, factors = torch.randn(3, 160, 260).to(torch.float8_e4m3fn), torch.rand(3, 2, 3)
    save_file({"x": values, "x_scale_inv": factors}, tmp_path / SINGLE)
    spread = factors.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :160, :260]
    expected, files = (values.float() * spread).to(torch.bfloat16), TensorFiles(tmp_path)
    assert torch.equal(files.read("x#1"), expected[1])
    assert torch.equal(files.read("x#2", slice(100, 150), slice(200, 260)), expected[2, 100:150, 200:])


def test_shapes_are_those_of_transformers(made: Path) -> None:
    _check(made)
    stored: dict[str, torch.Tensor] = {}
    for file in made.glob("*.safetensors"):
        stored |= load_file(file)
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == expected_shapes(describe_folder(made))
    name = "model.layers.1.mlp.down_proj.weight"
    part = TensorFiles(made).read(name, slice(None), slice(8, 24))
    assert torch.equal(part, stored[name][:, 8:24]) and TensorFiles(made).dtype(name) == "float32"


def test_a_file_cut_short(folder: Path) -> None:
    last = sorted(folder.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-10])
    with pytest.raises(ModelError, match=f"{last.name} is no whole safetensors file, perhaps cut short"):
        _check(folder)


def test_an_empty_file(mixture: Path, tmp_path: Path) -> None:
    """Whether experts lie in one tensor is looked up before the file is opened as safetensors."""
    (tmp_path / "config.json").write_bytes((mixture / "config.json").read_bytes())
    (tmp_path / SINGLE).touch()
    with pytest.raises(ModelError, match=f"{SINGLE} is no whole safetensors file, perhaps cut short"):
        _check(tmp_path)


def test_a_file_that_is_gone(folder: Path) -> None:
    last = sorted(folder.glob("*.safetensors"))[-1]
    last.unlink()
    with pytest.raises(ModelError, match=f"{last.name} cannot be read"):
        _check(folder)


def test_one_file_goes_before_an_index_as_in_transformers(folder: Path) -> None:
    """transformers leaves the index of several files there, if it writes one file into their folder."""
    from transformers import AutoModelForCausalLM

    shards = sorted(folder.glob("*.safetensors"))
    tensors = {name: tensor + 1 for file in shards for name, tensor in load_file(file).items()}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()["model.norm.weight"]
    assert torch.equal(TensorFiles(folder).read("model.norm.weight"), theirs)
    for file in shards:
        file.unlink()
    _check(folder)


def test_a_tensor_that_is_missing_or_another(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    place = index["weight_map"].pop("model.norm.weight")
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"has no tensor model\.norm\.weight, which a model of its config\.json has"):
        _check(folder)
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match="which is no file of that folder"):
        _check(folder)
    other = next(file for file in index["weight_map"].values() if file not in (place, "../elsewhere.safetensors"))
    index["weight_map"]["model.norm.weight"] = other
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"has no tensor model\.norm\.weight, though"):
        _check(folder)
    (folder / INDEX).write_text("{}")
    with pytest.raises(ModelError, match="must say in weight_map"):
        _check(folder)


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(31), r"of shape \[31\], but by config\.json it must be \[32\]"),
        (torch.zeros(32, dtype=torch.int8), "of type I8, but quantised weights"),
    ],
)
def test_a_tensor_of_another_shape_or_type(folder: Path, tensor: torch.Tensor, said: str) -> None:
    place = folder / json.loads((folder / INDEX).read_text())["weight_map"]["model.norm.weight"]
    save_file(load_file(place) | {"model.norm.weight": tensor}, place)
    with pytest.raises(ModelError, match=said):
        _check(folder)


def _add(folder: Path, *names: str, **tensors: torch.Tensor) -> None:
    index = json.loads((folder / INDEX).read_text())
    tensors = {name: torch.zeros(2) for name in names} | tensors
    save_file(tensors, folder / "more.safetensors")
    index["weight_map"] |= dict.fromkeys(tensors, "more.safetensors")
    (folder / INDEX).write_text(json.dumps(index))


def test_tensors_that_the_model_does_not_have(folder: Path) -> None:
    _add(folder, "model.layers.0.self_attn.rotary_emb.inv_freq")
    _check(folder)
    _add(folder, "model.layers.0.self_attn.q_proj.bias")
    with pytest.raises(ModelError, match=r"has model\.layers\.0\.self_attn\.q_proj\.bias, which a model of its"):
        _check(folder)
    _add(folder, *(f"model.layers.{number}.mlp.up_proj.weight" for number in range(5, 9)))
    said = r"has model\.layers\.0\..*, model\.layers\.5\..*, model\.layers\.6\..* and 2 others, which a model of its"
    with pytest.raises(ModelError, match=said):
        _check(folder)


def test_an_output_layer_that_is_the_embedding_may_be_there(tmp_path: Path) -> None:
    write_folder("qwen2, tied", tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(json.dumps(json.loads(config) | {"tie_word_embeddings": False}))
    with pytest.raises(ModelError, match=r"has no tensor lm_head\.weight, .* set tie_word_embeddings to true there"):
        _check(tmp_path)
    (tmp_path / "config.json").write_text(config)
    embedding = TensorFiles(tmp_path).read("model.embed_tokens.weight")
    _add(tmp_path, **{"lm_head.weight": embedding})
    _check(tmp_path)


@pytest.mark.parametrize("place", [(0, 0), (-1, -1)])
def test_an_output_layer_beside_a_tied_embedding_is_the_same_to_the_last_byte(
    tmp_path: Path, place: tuple[int, int]
) -> None:
    write_folder("qwen2, tied", tmp_path)
    embedding = TensorFiles(tmp_path).read("model.embed_tokens.weight").clone()
    embedding[place] += 1
    _add(tmp_path, **{"lm_head.weight": embedding})
    with pytest.raises(ModelError, match=r"has lm_head\.weight, which is not .* set it to false there to train both"):
        _check(tmp_path)


@pytest.mark.parametrize("prefix", ["language_model.", ""], ids=["of the hub", "of version 5"])
def test_tensors_of_several_parts(tmp_path: Path, prefix: str) -> None:
    write_folder("mistral3", tmp_path)
    if not prefix:
        _rename(tmp_path, {"language_model.model.": "model.language_model.", "language_model.lm_head": "lm_head"})
    _check(tmp_path)
    files, model = TensorFiles(tmp_path), describe_folder(tmp_path)
    assert files.stored["lm_head.weight"] == f"{prefix}lm_head.weight"
    assert all(name.startswith(("vision_tower.", "multi_modal_projector.")) for name in files.of_other_parts(model))
    assert len(files.of_other_parts(model)) == 15
    _add(tmp_path, "audio_tower.weight")
    with pytest.raises(ModelError, match=r"has audio_tower\.weight, which a model of its"):
        _check(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "served"), [("float8_e8m0fnu", True), ("complex64", True), ("float4_e2m1fn_x2", False)]
)
def test_other_parts_of_rare_types(tmp_path: Path, dtype: str, served: bool) -> None:
    tensor = torch.zeros(8, dtype=torch.uint8).view(getattr(torch, dtype))
    save_file({"vision_tower.weight": tensor}, tmp_path / SINGLE)
    files = TensorFiles(tmp_path, "numpy")
    if served:
        assert files.size("vision_tower.weight") == 8
        return
    with pytest.raises(ModelError, match=r"has vision_tower\.weight of type F4, which cannot be carried along"):
        files.size("vision_tower.weight")


def test_a_model_of_one_part_has_no_tensors_of_several(folder: Path) -> None:
    _rename(folder, {"model.": "model.language_model."})
    with pytest.raises(ModelError, match=r"has model\.language_model\..*, which a model of its config\.json does not"):
        _check(folder)


def _rename(folder: Path, prefixes: dict[str, str]) -> None:
    index = json.loads((folder / INDEX).read_text())
    for file in set(index["weight_map"].values()):
        renamed = {}
        for name, tensor in load_file(folder / file).items():
            prefix = next((each for each in prefixes if name.startswith(each)), "")
            renamed[prefixes.get(prefix, "") + name.removeprefix(prefix)] = tensor
            index["weight_map"].pop(name)
            index["weight_map"] |= dict.fromkeys(renamed, file)
        save_file(renamed, folder / file)
    (folder / INDEX).write_text(json.dumps(index))


def test_a_folder_of_pickles_only(folder: Path) -> None:
    for file in (*folder.glob("*.safetensors"), folder / INDEX):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(ModelError, match=r"has neither .* is never read: it may run code"):
        _check(folder)


def test_shards_are_written_as_they_are_full(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, model = TensorFiles(made), describe_folder(made)
    names = list(expected_shapes(model))
    for limit, expected in ((1 << 30, 1), (20_000, 7), (1, len(names))):
        monkeypatch.setattr("distca.models.folder.SHARD_BYTES", limit)
        target = tmp_path / str(limit)
        target.mkdir()
        exported = ExportedModel(model, json.loads((made / "config.json").read_text()), "float32", made)
        assert count_shards(exported, names) == expected
        writer = ShardWriter(target, 1, expected)
        for name in names:
            writer.add(name, files.read(name))
        writer.flush()
        finish(target, writer.file_of, exported)
        written = TensorFiles(target)
        written.check(describe_folder(target))
        assert all(torch.equal(written.read(name), files.read(name)) for name in names)
        assert len(list(target.glob("*.safetensors"))) == expected and (target / INDEX).exists() == (expected > 1)
        assert (target / SINGLE).exists() == (expected == 1) and (target / "generation_config.json").exists()


def test_weights_of_a_killed_writer_are_not_read_in_place_of_later_ones(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, model = TensorFiles(made), describe_folder(made)
    exported = ExportedModel(model, json.loads((made / "config.json").read_text()), "float32", made)
    for limit, shards, more in ((1 << 30, 1, 1.0), (20_000, 7, 2.0), (1 << 30, 1, 3.0)):
        monkeypatch.setattr("distca.models.folder.SHARD_BYTES", limit)
        begin(tmp_path)
        writer = ShardWriter(tmp_path, 1, shards)
        for name in expected_shapes(model):
            writer.add(name, files.read(name) + more)
        writer.flush()
        finish(tmp_path, writer.file_of, exported)
        assert torch.equal(TensorFiles(tmp_path).read("model.norm.weight"), files.read("model.norm.weight") + more)
        assert len(list(tmp_path.glob("*.safetensors"))) == shards and (tmp_path / INDEX).exists() == (shards > 1)
        (tmp_path / PARTIAL).mkdir()  # as if it was killed before it could delete this
        (tmp_path / "config.json").unlink()
        (tmp_path / "model-notes.txt").write_text("mine")


def test_code_stays_behind(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir(), target.mkdir()
    ours = ["tokenizer.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"]
    (source / "additional_chat_templates").mkdir()
    for name in (*ours, "additional_chat_templates/code.py", "modeling.py", "pytorch_model.bin", "notes.txt"):
        (source / name).write_text(name)
    assert copy_companions(source, target) == ours
    there = (str(file.relative_to(target)) for file in target.rglob("*") if file.is_file())
    assert sorted(there) == sorted(ours)


def test_what_was_not_written_to_its_end_is_nothing(tmp_path: Path) -> None:
    target, notes = tmp_path / "target", tmp_path / "target" / "NOTES.md"
    check_empty(target, "--output")
    begin(target)
    (target / PARTIAL / "model-00001-of-00002.safetensors").write_text("1")
    check_empty(target, "--output")
    begin(target)
    assert not any((target / PARTIAL).iterdir())
    notes.write_text("mine")
    clear(target)
    assert list(target.iterdir()) == [notes]
    clear(tmp_path / "missing")


def test_a_folder_to_write_is_empty(tmp_path: Path) -> None:
    check_empty(tmp_path / "new" / "folder", "--output")
    assert not any(tmp_path.iterdir()), "a look leaves nothing behind"
    with ThreadPoolExecutor(2) as machines:  # which share the file system
        list(machines.map(lambda _: check_empty(tmp_path / "new" / "folder", "--output"), range(100)))
    with pytest.raises(ConfigError, match=r"cannot be made or read \(File name too long\)"):
        check_empty(tmp_path / "new" / ("x" * 300), "--output")
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=r"--output is .*, which is not empty"):
        check_empty(tmp_path, "--output")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made or read"):
        check_empty(tmp_path / "file", "--output")


def test_a_folder_to_write_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dir: Path) -> None:
        raise OSError(30, "Read-only file system", str(dir / "tmp"))

    monkeypatch.setattr("distca.models.folder.TemporaryFile", refuse)
    said = r"checkpoint\.export is .*, but nothing can be written into it \(Read-only file system\); let this user"
    with pytest.raises(ConfigError, match=said):
        check_empty(tmp_path, "checkpoint.export")
