"""Whole folders of which copies are changed, and how a run or a command reads each."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.train.small_runs import ROOT

TEXT = ("Ä text of several words, ", "and another one. ", "日本語のテキスト。 ")


@dataclass(frozen=True)
class Subject:
    """A kind of folder.

    Attributes:
        name: of it.
        share: of every cases.
        changed: names of its files that are changed.
        read: reads the folder, whose files must still be there afterwards.
    """

    name: str
    share: int
    changed: tuple[str, ...]
    read: Callable[[Path], object]


def _read_tokenizer(folder: Path) -> object:
    from distca.data.cache import CachedTokens
    from distca.data.find_recipe import find_recipe
    from distca.data.texts import open_texts

    recipe = find_recipe(str(folder))
    texts = open_texts("jsonl", str(folder / "texts.jsonl"))
    vocabulary = CachedTokens(folder / "cache", texts, recipe).look()
    (ids,) = recipe.tokenizer.open().encode(["".join(TEXT).encode()])
    assert not len(ids) or 0 <= ids.min() <= ids.max() < vocabulary
    return find_recipe(str(folder), conversations=True).identity()


def _read_table(kind: str, name: str) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        from distca.data.texts import open_texts

        texts, held = open_texts(kind, str(folder / name)), b""
        for file in texts.files:
            held += file.read_bytes() if file.is_file() else b""
        for block in texts.blocks("text", ("other",)):
            for _, value in block.documents("text"):
                value = getattr(value, "value", value)
                if isinstance(value, str):
                    assert value.encode() in held, "text that the file does not hold"
        return texts.digest()

    return read


def _read_cost_table(folder: Path) -> object:
    from distca.plan import load_table, plan_micro_batch
    from distca.plan.cost.table_file import find_table

    cost = load_table(folder / "table.json")
    find_table("NVIDIA H200", "flash4", 32, 8, 128, folder=folder)
    return plan_micro_batch([5000, 300, 1], 2, cost)


def _read_lengths(folder: Path) -> object:
    from distca.commands.lengths import read_lengths

    return read_lengths(str(folder / "lengths.txt"), tokens=1000, seed=1).sum()


def _read_model(folder: Path) -> object:
    from distca.models.description import describe_folder
    from distca.models.folder import copy_companions
    from distca.models.layout import expected_shapes
    from distca.models.tensors import TensorFiles

    described, files = describe_folder(folder), TensorFiles(folder)
    files.check(described)
    for name, shape in expected_shapes(described).items():
        assert tuple(files.read(name).shape) == shape
    (folder / "copied").mkdir()
    return copy_companions(folder, folder / "copied")


def _export(folder: Path) -> object:
    from distca.train.checkpoint.command import export_weights

    export_weights(str(folder), output=str(folder.parent / "exported"))
    return sorted(os.listdir(folder.parent / "exported"))


SUBJECTS = (
    Subject("tokenizer", 6, ("tokenizer.json",), _read_tokenizer),
    Subject(
        "beside a tokenizer",
        3,
        ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"),
        _read_tokenizer,
    ),
    Subject("arrow", 6, ("data.arrow", "data.arrow", "data.arrow", "state.json"), _read_table("arrow", "")),
    Subject("parquet", 4, ("text.parquet",), _read_table("parquet", "text.parquet")),
    Subject("cost table", 4, ("table.json",), _read_cost_table),
    Subject("lengths", 1, ("lengths.txt",), _read_lengths),
    Subject(
        "model",
        4,
        ("model.safetensors.index.json", "model-00001-of-00002.safetensors", "generation_config.json"),
        _read_model,
    ),
    Subject("checkpoint", 4, (".metadata", ".metadata", ".metadata", "__0_0.distcp", "metadata.json"), _export),
)
QUICK = tuple(each.name for each in SUBJECTS if each.name != "checkpoint")


def prepare(root: Path, names: Sequence[str]) -> None:
    """Write whole folders, by the name of their subject, of which copies are changed."""
    makers = {
        "tokenizer": _write_tokenizers,
        "beside a tokenizer": _write_tokenizers,
        "arrow": _write_arrow,
        "parquet": _write_parquet,
        "cost table": _write_cost_tables,
        "lengths": _write_lengths,
        "model": _write_model,
        "checkpoint": _write_checkpoint,
    }
    for name in names:
        (root / name).mkdir(parents=True)
        makers[name](root / name)


def _write_tokenizers(root: Path) -> None:
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors, trainers

    special = ["<unk>", "<s>", "</s>"]
    kinds = {
        "bpe": (models.BPE(unk_token="<unk>"), trainers.BpeTrainer(vocab_size=300, special_tokens=special)),
        "unigram": (
            models.Unigram(),
            trainers.UnigramTrainer(vocab_size=80, special_tokens=special, unk_token="<unk>"),
        ),
        "wordpiece": (models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer(special_tokens=special)),
        "wordlevel": (models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer(special_tokens=special)),
    }
    for name, (model, trainer) in kinds.items():
        folder = root / name
        folder.mkdir()
        made = tokenizers.Tokenizer(model)
        made.pre_tokenizer = pre_tokenizers.ByteLevel() if name == "bpe" else pre_tokenizers.Metaspace()
        made.train_from_iterator(TEXT * 5, trainer)
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        made.save(str(folder / "tokenizer.json"))
        config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "special_tokens_map.json").write_text(json.dumps({"unk_token": "<unk>"}))
        (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
        (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXT))


def _table() -> Any:
    import pyarrow

    rows = [text * (number % 7) for number in range(40) for text in TEXT]
    return pyarrow.table({"text": rows, "other": [[{"role": "user", "number": n}] for n in range(len(rows))]})


def _write_arrow(root: Path) -> None:
    import pyarrow

    for name, kind in (("small", pyarrow.string()), ("large", pyarrow.large_string()), ("view", pyarrow.string_view())):
        (root / name).mkdir()
        table = _table()
        table = table.set_column(0, "text", table["text"].cast(kind))
        with pyarrow.ipc.new_stream(root / name / "data.arrow", table.schema) as stream:
            stream.write_table(table, max_chunksize=50)
        (root / name / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))


def _write_parquet(root: Path) -> None:
    import pyarrow.parquet as parquet

    for name, dictionary, pages in (("plain", False, "1.0"), ("dictionary", True, "2.0")):
        (root / name).mkdir()
        options = {"compression": "none", "use_dictionary": dictionary, "data_page_version": pages}
        parquet.write_table(_table(), root / name / "text.parquet", row_group_size=50, **options)


def _write_cost_tables(root: Path) -> None:
    for file in sorted((ROOT / "distca/plan/cost/tables").glob("*.json")):
        (root / file.stem).mkdir()
        shutil.copy(file, root / file.stem / "table.json")


def _write_lengths(root: Path) -> None:
    (root / "lengths").mkdir()
    (root / "lengths" / "lengths.txt").write_text("".join(f"{number}\n" for number in range(1, 200)))


def _write_model(root: Path) -> None:
    """A folder of two files, made without transformers."""
    import torch
    from safetensors.torch import save_file

    from distca.models.description import CONFIG, ModelDescription, describe
    from distca.models.layout import expected_shapes

    config = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 2, "vocab_size": 31, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}
    config |= {"num_key_value_heads": 2, "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 1e4}
    folder = root / "model"
    folder.mkdir()
    described: ModelDescription = describe(config, "config.json")
    tensors = {name: torch.ones(shape) for name, shape in expected_shapes(described).items()}
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    placed = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (folder / CONFIG).write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "eos_token_id": 2}))


def _write_checkpoint(root: Path) -> None:
    from distca.train.checkpoint.command import import_weights

    _write_model(root)
    (root / "model").rename(root.parent / "first")
    import_weights(str(root.parent / "first"), output=str(root / "saved"))
