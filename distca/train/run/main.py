"""From a command line to a trained model: parse, refuse what cannot work, then start."""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from distca.data.corpus import Corpus
from distca.errors import ConfigError, DamagedCheckpointError, DataError, DistcaError
from distca.log import die, early_lines, setup_logging
from distca.train.config.cli import check_data_named, files_first, parse_run_config
from distca.train.config.names import settings_named, with_settings
from distca.train.config.schema import MEASURE, RESUME_OR_START, RunConfig
from distca.train.config.validate import validate
from distca.train.config.validate_servers import servers_not_started
from distca.train.config.without_effect import without_effect
from distca.train.launch.check import read_check
from distca.train.metrics.writer import check_wandb
from distca.train.run.folder_choice import create_run_folder, hold, resume_run_folder
from distca.train.run.run_folder import Checkpoint, RunFolder, newest_intact, warn_of_damage
from distca.words import count

if TYPE_CHECKING:
    from megatron_patches.ranks.world import World

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> None:
    """Run ``pretrain_llama.py``. A mistake of the user ends in one sentence and exit code 2.

    ``--check WORLD_SIZE`` in front of the settings only checks them, the data and the checkpoint for that many ranks;
    it takes a second and needs no torch. ``--check WORLD_SIZE cpu`` is for ranks that run on CPUs; of their devices
    nothing is known otherwise.
    """
    arguments = sys.argv[1:] if argv is None else argv
    setup_logging(int(os.environ.get("RANK", "0")))
    try:
        if check := read_check(arguments):
            logging.getLogger("distca").setLevel(logging.WARNING)  # the ranks say the rest
            _check(_parsed(check.settings), check.world_size, check.on_cpus, launcher=True)
        else:
            with early_lines():
                _run(_parsed(arguments))
    except DistcaError as error:
        _die(error)


def _parsed(arguments: list[str]) -> RunConfig:
    """The run that a command line asks for."""
    arguments = files_first(arguments)
    config = parse_run_config(arguments)
    check_data_named(arguments, config)
    return config


def _die(error: DistcaError, everywhere: bool = False) -> NoReturn:
    """End with the error's sentence, in which parameters of lower layers are named by their settings."""
    die(with_settings(str(error)), error.next_step, everywhere)


def _check(
    config: RunConfig, world_size: int, on_cpus: bool = False, launcher: bool = False
) -> tuple[Corpus | None, Checkpoint | None]:
    """Everything that can be refused without torch, process groups or tokens; the documents, unless they have to be
    tokenized first, and the checkpoint to go on from. A ``launcher`` starts servers as well."""
    from distca.train.checkpoint.folders import check_folders
    from distca.train.data.corpus import open_corpus
    from distca.train.data.tokens import find_tokens, is_read_directly, vocabulary_of
    from megatron_patches.versions import check_version

    check_version()
    validate(config, world_size, on_cpus=on_cpus)
    if launcher and (wrong := servers_not_started(config)):
        raise ConfigError(wrong[0])
    if config.log.wandb:
        check_wandb()
    check_folders(config)
    corpus = None
    if is_read_directly(config):
        corpus = open_corpus(config)
    elif (prefixes := find_tokens(config)) is not None:
        corpus = open_corpus(config, prefixes)
    if corpus is None:
        validate(config, world_size, vocabulary_of(config))
        return None, None
    return corpus, _check_corpus(config, corpus, world_size)


def _check_corpus(config: RunConfig, corpus: Corpus, world_size: int) -> Checkpoint | None:
    """Refuses what can be refused once the documents are known; returns the checkpoint to go on from."""
    from distca.train.checkpoint.checkpoints import changes_since, check_fits, with_saved_warmup
    from distca.train.data.corpus import open_sampler

    if len(corpus.train) and corpus.train.lengths.max() < 2:
        raise DataError("No document has more than one token, so there is no next token to learn; change data.path.")
    if config.data.validation_fraction and not len(corpus.validation):
        raise DataError(
            "The documents for validation are longer than data.context_length, and no piece of them has a token to "
            "learn; raise data.validation_fraction or data.context_length, or set data.validation_fraction to 0."
        )
    if len(corpus.validation) and corpus.validation.lengths.max() < 2:
        raise DataError(
            f"No document for validation has more than one token ({count(len(corpus.validation), 'document')}); raise "
            "data.validation_fraction, or set it to 0 for no validation."
        )
    validate(config, world_size, corpus.vocabulary)
    data_parallel = config.parallel.data_parallel(world_size)
    sampler = open_sampler(config, corpus.train, data_parallel)
    if len(corpus.validation):
        open_sampler(config, corpus.validation, data_parallel)
    if config.checkpoint.resume and os.environ.get("RANK", "0") == "0":  # one rank is enough to look at every file
        found = resume_run_folder(config)
        if found is None:
            if config.train.evaluate and not config.checkpoint.init_from:
                raise ConfigError(
                    f"train.evaluate is true, but checkpoint.resume is {config.checkpoint.resume} and no run "
                    f"{config.output}/{config.name} has a complete checkpoint; check name and output."
                )
            return None
        run, checkpoint = found
        try:
            check_fits(checkpoint.path, config, corpus.vocabulary, None if config.train.evaluate else sampler)
        except DataError as error:
            changed = [each for each in changes_since(run, checkpoint, config, world_size) if each.startswith("data.")]
            raise DataError(" ".join([str(error), *(f"{each}." for each in changed)])) from None
        done = checkpoint.step >= config.train.steps and not config.train.evaluate
        if done and config.checkpoint.resume not in RESUME_OR_START and not config.checkpoint.export:
            raise ConfigError(
                f"{checkpoint.path} was saved after step {checkpoint.step} and train.steps is {config.train.steps}: "
                "nothing is left to do. Raise train.steps."
            )
        if not done and not config.train.evaluate:
            try:
                validate(with_saved_warmup(config, checkpoint.path), world_size, corpus.vocabulary)
            except ConfigError as error:
                raise ConfigError(
                    f"{error} The warm-up is that of the resumed run; optimizer.warmup_steps sets another."
                ) from None
        return checkpoint
    return None


def _run(config: RunConfig) -> None:
    # Shapes differ from step to step, which fragments the allocator's fixed blocks; read when CUDA starts.
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with warnings.catch_warnings(), _without_collections():
        # megatron-core warns at import, in every rank, that Transformer Engine and Apex are missing; `distca doctor`
        # says so once.
        warnings.simplefilter("ignore")
        from distca.cluster.environment import launched
        from distca.cluster.health import Health
        from distca.cluster.members import Members
        from megatron_patches.ranks.world import join_world, leave_world

        corpus, _ = _check(config, launched().size)
        world = join_world()
    setup_logging(world.rank)
    health = Health(pool=Members.of_homes(config.cad.servers) if config.cad.servers else None)
    with health.ends_failures(), settings_named():
        run_on(replace(world, health=health), config, tokenized_corpus(config, world, corpus))
        health.part()
    leave_world()


@contextmanager
def _without_collections() -> Iterator[None]:
    """For imports: they make no garbage, and looking for some takes time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def tokenized_corpus(config: RunConfig, world: World, corpus: Corpus | None = None) -> Corpus:
    """The run's documents on every rank, tokenized by rank 0 where they have to be; every rank calls it.

    Args:
        config: the run.
        world: the ranks.
        corpus: the documents, where this rank has found them already.
    """
    from distca.train.data.corpus import open_corpus
    from distca.train.data.tokens import is_read_directly, make_tokens_together

    if is_read_directly(config):
        return corpus or open_corpus(config)
    if world.health is not None:
        world.health.doing("tokenizing")
    # Also by ranks that have found them: others may not.
    prefixes = make_tokens_together(config, world)
    corpus = open_corpus(config, prefixes)
    _check_corpus(config, corpus, world.size)
    return corpus


def run_on(world: World, config: RunConfig, corpus: Corpus) -> RunFolder:
    """Train on the ranks of an initialised torch.distributed; every rank calls it. Returns the run's folder.

    Raises:
        ConfigError, PlanError: as :func:`main` reports them, alike on all ranks.
        DataError, ModelError: in a document or a file of checkpoint.init_from, on the rank that reads it.
        KernelError, TransportError: what the settings ask for cannot run here.
        CheckpointError: a checkpoint cannot be written.
        VersionError: a newer megatron-core saved the checkpoint to resume; alike on all ranks.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as in _run
        from distca.cluster.agreement import of_first_rank
        from distca.train.checkpoint.checkpoints import changes_since, with_saved_warmup
        from distca.train.checkpoint.folders import lacks_export
        from distca.train.run.builder import build_trainer
        from distca.train.run.consistency import check_same_start
        from distca.train.run.loop import evaluate, export_only, train
        from distca.train.run.record import rank_log, record_start
        from distca.train.run.stopping import say_finished

    check_same_start(config, corpus, world)
    if world.rank == 0 and (said := without_effect(config)):
        logger.info("%s", said)
    finished = False
    with ExitStack() as held:
        resumed = of_first_rank(lambda: _hold_resumed(config, held)) if config.checkpoint.resume else None
        if resumed is not None:
            folder, newest = resumed
            checkpoint = _intact(folder, newest, world)
            finished = checkpoint.step >= config.train.steps and not config.train.evaluate
            if finished and not of_first_rank(lambda: lacks_export(config, checkpoint)):
                written = f", and {config.checkpoint.export} is written" if config.checkpoint.export else ""
                logger.info(
                    "%s has all of its %d steps%s: nothing is left to do.", folder.path, config.train.steps, written
                )
                if world.rank == 0:
                    say_finished()
                return folder
            config = with_saved_warmup(config, checkpoint.path)
            changes = changes_since(folder, checkpoint, config, world.size)
            if config.train.evaluate:  # nothing goes on
                changes = [each for each in changes if each.startswith("data.")]
            if world.rank == 0 and changes:
                logger.warning("Not as in the part before step %d: %s", checkpoint.step + 1, "; ".join(changes))
        else:  # also where checkpoint.resume found nothing to go on with
            config = replace(config, checkpoint=replace(config.checkpoint, resume=None))
        trainer = build_trainer(_with_costs(config, world), world, corpus.vocabulary)
        if resumed is None:
            folder = of_first_rank(lambda: _hold_new(config, held))
        elif world.rank == 0 and not config.train.evaluate:
            folder.write_resumed_config(config, checkpoint.step)
        held.enter_context(rank_log(folder, world.rank))
        record_start(folder, world.rank, world.size)
        logger.info("Run folder: %s", folder.path)
        trainer.cad.folder = folder.path
        run = evaluate if config.train.evaluate else export_only if finished else train
        run(trainer, corpus, folder, None if resumed is None else checkpoint)
        if finished and world.rank == 0:
            say_finished()
    return folder


def _with_costs(config: RunConfig, world: World) -> RunConfig:
    """Returns the settings with a folder of cost tables in place of "measure"."""
    if config.cad.cost_table != MEASURE:
        return config
    from distca.train.run.measured_costs import kernel_of, tables_for

    tables = tables_for(config, kernel_of(config, world.device), world.device, world.rank)
    return replace(config, cad=replace(config.cad, cost_table=tables))


def _hold_new(config: RunConfig, held: ExitStack) -> RunFolder:
    folder = create_run_folder(config)
    held.enter_context(hold(folder))
    return folder


def _hold_resumed(config: RunConfig, held: ExitStack) -> tuple[RunFolder, Checkpoint] | None:
    found = resume_run_folder(config)
    if found is None:
        return None
    folder, checkpoint = found
    held.enter_context(hold(folder, trains=not config.train.evaluate))
    if newest_intact(folder) != checkpoint:
        raise ConfigError(f"{folder.path} got another checkpoint while this run started; start again.")
    return folder, checkpoint


def _intact(folder: RunFolder, checkpoint: Checkpoint, world: World) -> Checkpoint:
    """The newest checkpoint up to this one whose checksums are right; every rank calls it and reads a part."""
    from distca.cluster.agreement import of_first_rank
    from distca.train.checkpoint.checkpoints import check_contents_together

    while said := check_contents_together(checkpoint, world):
        if world.rank == 0:
            warn_of_damage(said)
        older = of_first_rank(lambda: newest_intact(folder, before=checkpoint.step))  # noqa: B023
        if older is None:
            raise DamagedCheckpointError(f"All checkpoints of {folder.path} are damaged, as the lines above say.")
        checkpoint = older
    return checkpoint
