"""Files of models, tokenizers, tables and checkpoints that were changed, each read as a run or a command would.

    python -m tests.faults.changed_files --cases 1500 --seed 1 --output benchmarks/results/changed_files.json

A case must end in a sentence, or in values that the file holds. It fails where it ends with another exception, where
its process dies or takes longer than half a minute, where text comes from elsewhere in memory, or where a file is
deleted. Cases run in processes of their own, in which a broken offset ends no other case.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from distca.errors import DistcaError
from distca.versions import command_line, versions, write_report
from tests.faults import mutations
from tests.train.small_runs import ROOT

_TOO_LONG_S = 30.0
_SPECIAL = ("a named pipe", "a folder", "a link to nothing", "a device without end")
_VALUES: tuple[Any, ...] = (None, True, -1, 0, 2**31, 2**70, 1.5, "", "..", "/etc/passwd", "a/b", "\0", [], {}, [[]])
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


def change(folder: Path, file: Path, randomly: random.Random) -> str:
    """Change one file of a folder; what was done."""
    drawn = randomly.random()
    if drawn < 0.08:
        special = randomly.choice(_SPECIAL)
        file.unlink()
        {
            "a named pipe": lambda: os.mkfifo(file),
            "a folder": file.mkdir,
            "a link to nothing": lambda: file.symlink_to(folder / "nothing"),
            "a device without end": lambda: file.symlink_to("/dev/zero"),
        }[special]()
        return special
    if drawn < 0.6 and file.suffix == ".json":
        content = json.loads(file.read_bytes())
        said = _other_value(content, randomly)
        file.write_text(json.dumps(content))
        return said
    kinds = mutations.TEXT if file.suffix in (".json", ".jinja", ".txt") else mutations.BINARY
    if file.name == ".metadata":
        kinds = mutations.PICKLE
    changed, name = mutations.change(file.read_bytes(), kinds, randomly)
    file.write_bytes(changed)
    return name


def _other_value(content: Any, randomly: random.Random) -> str:
    """Put another value somewhere into JSON."""
    while True:
        keys = list(content) if isinstance(content, dict) else list(range(len(content)))
        key = randomly.choice(keys)
        inner = content[key]
        if isinstance(inner, dict | list) and inner and randomly.random() < 0.8:
            content = inner
        elif isinstance(content, dict) and randomly.random() < 0.2:
            del content[key]
            return "an entry left out"
        else:
            content[key] = randomly.choice(_VALUES)
            return "another value"


def attempt(root: Path, scratch: Path, subject: Subject, number: int, seed: int) -> tuple[str, str, str]:
    """(what was changed, how it ended, what was said) of one case."""
    randomly = random.Random(f"{seed} {subject.name} {number}")
    source = randomly.choice(sorted((root / subject.name).iterdir()))
    folder, work = scratch / "given", scratch / "work"
    shutil.copytree(source, folder)
    work.mkdir()
    (work / "kept").touch()
    name = randomly.choice(subject.changed)
    said = f"{name}: {change(folder, folder / name, randomly)}"
    before = set(os.listdir(folder))
    os.chdir(work)
    try:
        ended, words = "read", str(subject.read(folder))
    except DistcaError as error:
        ended, words = "sentence", str(error)
        words.encode()
    except BaseException as error:
        ended, words = "failed", "".join(traceback.format_exception(error, limit=-6)).replace(f"{ROOT}/", "")
    if os.listdir(work) != ["kept"] or before - set(os.listdir(folder)):
        ended, words = "failed", "it deleted something"
    return said, ended, words


def _work(root: Path, seed: int, pipe: Connection) -> None:
    """Attempt the cases that come in until None does."""
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries say of damage
    by_name = {each.name: each for each in SUBJECTS}
    while (case := pipe.recv()) is not None:
        with tempfile.TemporaryDirectory(dir=root) as scratch:
            pipe.send(attempt(root, Path(scratch), by_name[case[0]], case[1], seed))
            os.chdir(root)


class _Worker:
    """A process that attempts cases, and another one where it died."""

    def __init__(self, root: Path, seed: int) -> None:
        self._root, self._seed = root, seed
        self._process: BaseProcess | None = None

    def run(self, case: tuple[str, int]) -> tuple[str, str, str]:
        if self._process is None:
            context = multiprocessing.get_context("forkserver")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_work, args=(self._root, self._seed, theirs))
            self._process.start()
            theirs.close()
        self._pipe.send(case)
        try:
            if self._pipe.poll(_TOO_LONG_S):
                found: tuple[str, str, str] = self._pipe.recv()
                return found
            said = f"it took longer than {_TOO_LONG_S:.0f} s"
        except (EOFError, ConnectionError):
            self._process.join()
            said = f"its process ended with code {self._process.exitcode}"
        self._process.kill()
        self._process = None
        return "", "failed", said

    def stop(self) -> None:
        if self._process is not None:
            self._pipe.send(None)
            self._process.join()


def run_cases(cases: int, seed: int, names: Sequence[str], workers: int = 2) -> list[dict[str, Any]]:
    """Attempt cases of the subjects of these names, each as often as its share says; what became of each."""
    from concurrent.futures import ThreadPoolExecutor

    shares = [each.name for each in SUBJECTS for _ in range(each.share) if each.name in names]
    with tempfile.TemporaryDirectory(prefix="distca-changed-") as folder:
        root = Path(folder)
        prepare(root, names)
        pool = [_Worker(root, seed) for _ in range(workers)]

        def part(first: int) -> list[dict[str, Any]]:
            found = []
            for number in range(first, cases, workers):
                kind = shares[number % len(shares)]
                changed, ended, said = pool[first].run((kind, number))
                found.append({"case": number, "kind": kind, "change": changed, "ended": ended, "said": said})
            pool[first].stop()
            return found

        with ThreadPoolExecutor(workers) as threads:
            parts = list(threads.map(part, range(workers)))
    return sorted((each for part in parts for each in part), key=lambda each: each["case"])


def main() -> None:
    """Attempt as many cases as asked and write what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[each.name for each in SUBJECTS], help="kinds of folders")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    began = time.monotonic()
    found = run_cases(asked.cases, asked.seed, asked.only)
    counts: dict[str, collections.Counter[str]] = {}
    for each in found:
        counts.setdefault(each["kind"], collections.Counter())[each["ended"]] += 1
    failures = [each for each in found if each["ended"] == "failed"]
    report = {
        "command": command_line("python -m tests.faults.changed_files"),
        "versions": versions(),
        "cases": asked.cases,
        "kinds": {kind: dict(counted) for kind, counted in sorted(counts.items())},
        "failures": failures,
        "seconds": round(time.monotonic() - began, 1),
    }
    if asked.output:
        write_report(asked.output, report)
    for each in failures[:20]:
        sys.stderr.write(f"case {each['case']}, {each['kind']}, {each['change']}:\n{each['said']}\n")
    sys.stdout.write(f"{json.dumps(report['kinds'])}\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
