"""What is damaged, and how it is read: as a run or a command would."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from distca.data.sources.index_file import Index
from distca.errors import DamagedCheckpointError
from distca.plan import load_table, plan_micro_batch
from distca.train.checkpoint.integrity import COMPLETE
from distca.train.config.cli import parse_run_config
from distca.train.config.validate import validate
from distca.train.data.corpus import dealt, open_corpus, open_sampler
from tests.faults import mutations
from tests.train.small_runs import ROOT, StepByStep, arguments, train_all, write_texts


@dataclass(frozen=True)
class Subject:
    """A kind of file.

    Attributes:
        name: of it.
        share: of every cases.
        change: puts a damaged copy into an empty folder and says what was done.
        read: reads what is in the folder, and says what was found.
    """

    name: str
    share: int
    change: Callable[[Path, random.Random], str]
    read: Callable[[Path], str]


def subjects(folder: Path) -> list[Subject]:
    """All kinds, made in a folder; it begins a world of one rank."""
    write_texts(folder / "texts")
    run = _Resumed(folder)
    tables = sorted((ROOT / "distca/plan/cost/tables").glob("*.json"))
    configs = sorted((ROOT / "configs").glob("*.yaml"))
    lines = folder / "documents.jsonl"
    lines.write_text("".join(json.dumps({"text": f"document {n} " * (n + 1), "id": n}) + "\n" for n in range(6)))
    _write_indexed(folder / "tokens")
    pair = [folder / "tokens.idx", folder / "tokens.bin"]
    return [
        Subject("checkpoint", 8, run.damage, run.resume),
        Subject("checkpoint with new checksums", 4, run.forge, run.resume_forged),
        Subject("checkpoint to export", 4, run.forge, run.export_forged),
        Subject("idx", 3, _one_of(pair, pair[:1], mutations.BINARY), _indexed),
        Subject("bin", 1, _one_of(pair, pair[1:], mutations.BINARY), _indexed),
        Subject("jsonl", 3, _one_of([lines], [lines], mutations.TEXT), _json_lines),
        Subject("yaml", 3, _one_of(configs, configs, mutations.TEXT), _yaml),
        Subject("cost table", 3, _one_of(tables, tables, mutations.TEXT), _table),
    ]


def _one_of(files: list[Path], damaged: list[Path], kinds: tuple[str, ...]) -> Callable[[Path, random.Random], str]:
    def change(scratch: Path, randomly: random.Random) -> str:
        chosen = randomly.choice(damaged)
        for file in files if len(damaged) < len(files) else [chosen]:
            shutil.copy(file, scratch / file.name)
        return _damage(scratch / chosen.name, kinds, randomly)

    return change


def _damage(file: Path, kinds: tuple[str, ...], randomly: random.Random) -> str:
    changed, name = mutations.change(file.read_bytes(), kinds, randomly)
    file.write_bytes(changed)
    return f"{file.name}: {name}"


def _write_indexed(prefix: Path) -> None:
    lengths = [5, 90, 1, 17, 33]
    Index.of_documents(lengths, np.uint16).write(prefix.with_suffix(".idx"))
    np.arange(sum(lengths), dtype="<u2").tofile(prefix.with_suffix(".bin"))


def _documents(**settings: Any) -> str:
    """Open a corpus, deal some steps, and read all their tokens as a batch does."""
    config = parse_run_config(arguments(**settings))
    validate(config, 2)
    corpus = open_corpus(config)
    validate(config, 2, corpus.vocabulary)
    read = 0
    for step in dealt(corpus.train, open_sampler(config, corpus.train, 2), 3):
        for document in step.micro_batches[0]:
            tokens = np.asarray(document[0 : len(document)])
            assert len(tokens) == len(document)
            read += len(tokens)
    return f"{read} tokens"


def _indexed(scratch: Path) -> str:
    return _documents(data__source="indexed", data__path=scratch / "tokens", data__vocabulary=160)


def _json_lines(scratch: Path) -> str:
    return _documents(data__source="jsonl", data__path=scratch / "documents.jsonl", data__longer="split")


def _yaml(scratch: Path) -> str:
    (file,) = scratch.iterdir()
    config = parse_run_config(["--config", str(file)])
    validate(config, 8)
    return config.name


def _table(scratch: Path) -> str:
    (file,) = scratch.iterdir()
    cost = load_table(file)
    plan_micro_batch([5000, 300, 1], 2, cost)
    return "a plan"


class _Resumed:
    """A run with two checkpoints, and a model to resume it with."""

    def __init__(self, folder: Path) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        line = {"output": folder, "name": "saved", "data__path": folder / "texts", "checkpoint__save_every": 1}
        self._line = arguments(**line, train__steps=3, checkpoint__keep=2)
        (saved,) = train_all([self._line])
        self._saved = Path(saved)
        self._run = StepByStep(parse_run_config(self._line))
        self._expected: dict[int, str] = {}
        for checkpoint in sorted((self._saved / "checkpoints").iterdir()):
            self._load(self._saved, int(checkpoint.name.removeprefix("step_")))
            self._expected[int(checkpoint.name.removeprefix("step_"))] = self._fingerprint()

    def damage(self, scratch: Path, randomly: random.Random) -> str:
        """A copy with one file that is damaged."""
        shutil.copytree(self._saved, scratch / "saved")
        return self._damage_one(scratch / "saved", randomly, [file.name for file in self._files(scratch / "saved")])

    def forge(self, scratch: Path, randomly: random.Random) -> str:
        """The same, with checksums that fit, as one makes it who means harm."""
        shutil.copytree(self._saved, scratch / "saved")
        run = scratch / "saved"
        said = self._damage_one(run, randomly, [each.name for each in self._files(run) if each.name != COMPLETE])
        for checkpoint in (run / "checkpoints").iterdir():
            facts = {}
            for file in checkpoint.rglob("*"):
                if file.is_file() and file.name != COMPLETE:
                    data = file.read_bytes()
                    facts[file.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            (checkpoint / COMPLETE).write_text(json.dumps(facts))
        return said

    def resume(self, scratch: Path) -> str:
        """Go on as a run does, and compare with what was saved."""
        step = self._resume(scratch / "saved")
        if self._fingerprint() != self._expected[step]:
            raise AssertionError(f"step {step} was resumed with other values than those that were saved")
        return f"step {step}"

    def resume_forged(self, scratch: Path) -> str:
        """Go on as a run does; the values are what the file says."""
        return f"step {self._resume(scratch / 'saved')}"

    def export_forged(self, scratch: Path) -> str:
        """Export it as a command does."""
        from distca.train.checkpoint.command import export_weights

        export_weights(str(scratch / "saved"), output=str(scratch / "exported"))
        return f"{len(list((scratch / 'exported').iterdir()))} files"

    def _files(self, run: Path) -> list[Path]:
        newest = max((run / "checkpoints").iterdir())
        return sorted(file for file in newest.iterdir() if file.is_file())

    def _damage_one(self, run: Path, randomly: random.Random, names: list[str]) -> str:
        file = max((run / "checkpoints").iterdir()) / randomly.choice(names)
        is_text = file.name == COMPLETE or file.suffix == ".json"
        return _damage(file, mutations.TEXT if is_text else mutations.PICKLE, randomly)

    def _resume(self, run: Path) -> int:
        from distca.train.checkpoint.checkpoints import check_contents_together, check_fits
        from distca.train.run.folder_choice import resume_run_folder
        from distca.train.run.main import _intact
        from distca.train.run.run_folder import warn_of_damage

        warn_of_damage.cache_clear()
        config = parse_run_config([*self._line, "--checkpoint.resume", str(run)])
        found = resume_run_folder(config)
        assert found is not None
        folder, newest = found
        corpus = open_corpus(config)
        check_fits(newest.path, config, corpus.vocabulary, open_sampler(config, corpus.train, 1))
        checkpoint = _intact(folder, newest, self._run.world)
        if check_contents_together(checkpoint, self._run.world):
            raise DamagedCheckpointError("damaged")
        self._load(run, checkpoint.step)
        return checkpoint.step

    def _load(self, run: Path, step: int) -> None:
        from distca.train.checkpoint.checkpoints import load
        from distca.train.run.run_folder import Checkpoint, RunFolder

        with torch.no_grad():
            for weight in self._run.trainer.model.parameters():
                weight.zero_()
        self._run.trainer.optimizer.schedule.num_steps = 0  # megatron's adds what it loads
        load(self._run.trainer, Checkpoint(step, RunFolder(run).checkpoint_path(step)))

    def _fingerprint(self) -> str:
        """Of weights, moments and learning rate."""
        digest = hashlib.sha256()
        optimizer = self._run.trainer.optimizer
        for weight in self._run.trainer.model.parameters():
            digest.update(weight.detach().numpy().tobytes())
        from megatron_patches.training.optimizer import torch_adams

        for adam in torch_adams(optimizer.optimizer):
            for group in adam.param_groups:
                for weight in group["params"]:
                    state = adam.state[weight]
                    for name in ("exp_avg", "exp_avg_sq"):
                        digest.update(state[name].detach().numpy().tobytes())
        digest.update(repr(sorted(optimizer.schedule.state_dict().items())).encode())
        return digest.hexdigest()
