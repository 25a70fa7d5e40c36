"""From a command line to a trained model: parse, refuse what cannot work, then start."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from distca.data.corpus import Corpus
from distca.data.errors import DataError
from distca.log import die, setup_logging
from distca.plan import PlanError
from distca.train.config import ConfigError, parse_run_config
from distca.train.run_folder import Checkpoint, RunFolder, check_undamaged, create_run_folder, resume_run_folder
from distca.train.settings import RunConfig
from distca.train.validate import validate

if TYPE_CHECKING:
    from distca.train.world import World

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> None:
    """Run ``pretrain_llama.py``. A mistake of the user ends in one sentence and exit code 2.

    ``--check WORLD_SIZE`` in front of the settings only checks them, the data and the checkpoint for that many ranks;
    it takes a second and needs no torch.
    """
    arguments = sys.argv[1:] if argv is None else argv
    setup_logging(int(os.environ.get("RANK", "0")))
    try:
        if arguments[:1] == ["--check"]:
            _check(parse_run_config(arguments[2:]), int(arguments[1]))
        else:
            _run(parse_run_config(arguments))
    except (ConfigError, DataError, PlanError) as error:
        die(error)


def _check(config: RunConfig, world_size: int) -> tuple[Corpus, Checkpoint | None]:
    """Everything that can be refused without torch, process groups or tokens."""
    from distca.train.checkpoints import check_fits
    from distca.train.corpus import open_corpus, open_sampler

    validate(config, world_size)
    corpus = open_corpus(config)
    validate(config, world_size, corpus.vocabulary)
    data_parallel = config.parallel.data_parallel(world_size)
    sampler = open_sampler(config, corpus.train, data_parallel)
    if len(corpus.validation):
        open_sampler(config, corpus.validation, data_parallel)
    checkpoint = None
    if config.checkpoint.resume:
        _, checkpoint = resume_run_folder(config)
        if os.environ.get("RANK", "0") == "0":  # one rank is enough to look at every file
            check_undamaged(checkpoint.path)
        check_fits(checkpoint.path, config, corpus.vocabulary, sampler)
        if checkpoint.step >= config.train.steps:
            raise ConfigError(
                f"{checkpoint.path} was saved after step {checkpoint.step} and train.steps is {config.train.steps}: "
                "nothing is left to do. Raise train.steps."
            )
    return corpus, checkpoint


def _run(config: RunConfig) -> None:
    with warnings.catch_warnings():
        # megatron-core warns at import, in every rank, that Transformer Engine and Apex are missing; `distca doctor`
        # says so once.
        warnings.simplefilter("ignore")
        from distca.attention import KernelError
        from distca.train.checkpoints import CheckpointError
        from distca.train.companions import Companions
        from distca.train.world import join_world, leave_world, world_size_of_environment
        from distca.transport import TransportError

        corpus, _ = _check(config, world_size_of_environment())
        world = join_world()
    setup_logging(world.rank)
    companions = Companions()
    try:
        run_on(replace(world, companions=companions), config, corpus)
        companions.part()
    except (KernelError, TransportError, CheckpointError) as error:
        die(error)
    except (ConfigError, DataError, PlanError):
        raise
    except Exception:
        companions.explain_failure()
        raise
    finally:
        leave_world()


def run_on(world: World, config: RunConfig, corpus: Corpus) -> RunFolder:
    """Train on the ranks of an initialised torch.distributed; every rank calls it. Returns the run's folder.

    Raises:
        ConfigError, DataError, PlanError: as :func:`main` reports them.
        KernelError, TransportError: what the settings ask for cannot run here.
        CheckpointError: a checkpoint cannot be written.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in _run
        from distca.train.checkpoints import with_saved_warmup
        from distca.train.loop import train
        from distca.train.setup import build_trainer

    if config.checkpoint.resume:
        config = with_saved_warmup(config, resume_run_folder(config)[1].path)
    _check_same_documents(corpus, world)
    trainer = build_trainer(config, world, corpus.vocabulary)
    folder, checkpoint = _folder(config, world.rank)
    logger.info("Run folder: %s", folder.path)
    train(trainer, corpus, folder, checkpoint)
    return folder


def _check_same_documents(corpus: Corpus, world: World) -> None:
    """Every rank plans from its own list of documents: refuse lists that differ, on all ranks."""
    import torch.distributed as dist

    lengths = np.concatenate((corpus.train.lengths, corpus.validation.lengths))
    digest = hashlib.sha256(lengths.tobytes()).hexdigest()
    digests: list[str] = [""] * world.size
    dist.all_gather_object(digests, digest)
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        raise DataError(
            f"Ranks {others} see other documents than rank 0 (another copy of the data, or another Python version with "
            "data.source stdlib); put the same data at data.path on every machine."
        )


def _folder(config: RunConfig, rank: int) -> tuple[RunFolder, Checkpoint | None]:
    """The run's folder, chosen by rank 0; all ranks see the same file system."""
    import torch.distributed as dist

    chosen: list[tuple[str, int | None]] = [("", None)]
    if rank == 0:
        if config.checkpoint.resume:
            resumed, checkpoint = resume_run_folder(config)
            resumed.write_resumed_config(config, checkpoint.step)
            chosen = [(str(resumed.path), checkpoint.step)]
        else:
            chosen = [(str(create_run_folder(config).path), None)]
    dist.broadcast_object_list(chosen)
    path, step = chosen[0]
    folder = RunFolder(Path(path))
    return folder, None if step is None else Checkpoint(step, folder.checkpoint_path(step))
