"""``distca checkpoint``: from a Hugging Face folder to a checkpoint of Megatron-Core, and from a run to a folder."""

from __future__ import annotations

import logging
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from distca.errors import DamagedCheckpointError, ModelError, OptionError, system_words
from distca.json_file import read_object
from distca.models.description import ModelDescription, describe_folder
from distca.models.folder import (
    PARTIAL,
    VALUE_BYTES,
    ShardWriter,
    begin,
    check_empty,
    count_shards,
    finish,
    put_in_place,
)
from distca.models.layout import expected_shapes
from distca.models.tensors import TensorFiles
from distca.train.checkpoint.export import exported
from distca.train.checkpoint.integrity import COMPLETE, check_contents, check_undamaged, damaged, files_of
from distca.train.config.cli import parse_run_config, to_yaml
from distca.train.config.schema import RunConfig
from distca.train.run.run_folder import RunFolder

logger = logging.getLogger(__name__)

__all__ = ["export_weights", "import_weights"]

_CONFIG, _METADATA, _FITS = "config.yaml", ".metadata", "fits.json"


def import_weights(folder: str, *, output: str) -> None:
    """Write a Hugging Face folder's weights as a checkpoint of Megatron-Core.

    dist_checkpointing.load reads it in a script of your own, on any number of ranks; the model's settings are in its
    config.yaml. One process does it and holds the model in host memory. pretrain_llama.sh needs none of this: it takes
    the folder itself (INIT_FROM).

    Args:
        folder: with config.json and safetensors.
        output: an empty folder to write into.
    """
    source, target = Path(folder), Path(output)
    described = describe_folder(source)
    for warning in described.warnings:
        logger.warning("%s", warning)
    files = TensorFiles(source)
    files.check(described)
    stored = files.dtype(described.weights.embedding)
    config = parse_run_config(["--checkpoint.init_from", folder])
    config = replace(
        config,
        train=replace(config.train, precision="bf16" if stored == "bfloat16" else "fp32"),
        # Nothing is trained on longer documents, so an export has the folder's longest context.
        data=replace(config.data, context_length=min(config.data.context_length, described.positions)),
    )
    check_empty(target, "--output")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core's, of what is not installed
        import torch

        from megatron_patches.hugging_face.import_folder import import_folder
        from megatron_patches.versions import drop_log_lines

        drop_log_lines()
        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        with _writing(target) as partial, _progress(f"reading {folder}", described, stored) as advance:
            import_folder(files, described, config.model, dtype, partial, advance)
            (partial / _CONFIG).write_text(to_yaml(config), encoding="utf-8")
            names = {file.name for file in partial.iterdir()} - {_METADATA}
            put_in_place(target, [*sorted(names), _METADATA])


def export_weights(run: str, *, output: str, step: int | None = None) -> None:
    """Write a run's weights as a Hugging Face folder.

    Tokenizer, chat template and generation settings come along from the folder that the run began with. No more than a
    file of the new folder is in host memory, and a layer's experts where they lie in one tensor.

    Args:
        run: a run's folder, or what "distca checkpoint import" wrote.
        output: an empty folder to write into.
        step: the checkpoint after that many steps; by default the newest.
    """
    root, target = Path(run), Path(output)
    path, settings = _checkpoint_of(root, step)
    if not settings.is_file():
        raise OptionError(
            f"{root} has no {settings.name}, without which the model is unknown; give the folder of a run."
        )
    config = parse_run_config(["--config", str(settings), "--checkpoint.resume", run])
    check_empty(target, "--output")
    _check(path)
    model = exported(config, _vocabulary(path, config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

        from megatron_patches.checkpoint.unpickling import UnreadableError
        from megatron_patches.checkpoint.whole_weights import SavedWeights

        try:
            with _writing(target), _progress(f"writing {output}", model.model, model.dtype) as advance:
                weights = SavedWeights(path, model.model)
                files = count_shards(model, weights.names(), others=True)
                writer = ShardWriter(target, 1, files, model.stored, model.model.experts.count)
                for name, tensor in weights.tensors():
                    tensor = tensor.to(getattr(torch, model.dtype_of(name)))
                    writer.add(name, tensor)
                    advance(tensor.numel() * tensor.element_size())
                writer.add_others(model)
                writer.flush()
                finish(target, writer.file_of, model)
        except UnreadableError as error:
            raise _unusable(path, damaged(path, str(error))) from None


@contextmanager
def _writing(folder: Path) -> Iterator[Path]:
    """A folder to write into, inside of the new one. Where it cannot all be written, it is deleted with the folders
    around it that were missing, and nothing else is.

    Raises:
        OptionError: it cannot.
    """
    from safetensors import SafetensorError
    from torch.distributed.checkpoint.api import CheckpointException

    # What is deleted is chosen here as text, before anything is read.
    partial = os.path.abspath(folder / PARTIAL)
    missing = [os.path.abspath(each) for each in (folder, *folder.parents) if not each.exists()]
    try:
        begin(folder)
        yield Path(partial)
    except (Exception, CheckpointException) as error:
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):
            for each in missing:
                os.rmdir(each)
        if not isinstance(error, OSError | SafetensorError | CheckpointException):
            raise
        cause: BaseException = error
        if isinstance(error, CheckpointException):  # no Exception, and hundreds of lines
            cause, _ = next(iter(error.failures.values()))
        said = system_words(cause) if isinstance(cause, OSError) else str(cause).splitlines()[0]
        raise OptionError(
            f"--output is {folder}, which could not be written ({said}); make room for it, or name another folder."
        ) from None


def _checkpoint_of(root: Path, step: int | None) -> tuple[Path, Path]:
    """Returns the checkpoint's folder, and the file with the settings it was saved with: a run that resumed has more
    than one, which may differ in the longest context."""
    folder = RunFolder(root)
    if step is None and (root / _METADATA).is_file():
        return root, folder.config
    checkpoints = {each.step: each.path for each in folder.checkpoints()}
    if not checkpoints:
        raise OptionError(f"{root} has no complete checkpoint; give the folder of a run that saved one.")
    if step is not None and step not in checkpoints:
        raise OptionError(f"--step is {step}, but {root} has checkpoints after {', '.join(map(str, checkpoints))}.")
    chosen = max(checkpoints) if step is None else step
    return checkpoints[chosen], folder.settings_of(chosen)


def _check(path: Path) -> None:
    """Refuse a run's checkpoint that is not what was saved; what "distca checkpoint import" wrote has no checksums."""
    from rich.progress import track

    from distca.log import console

    if not (path / COMPLETE).exists():
        return
    try:
        check_undamaged(path)
        parts = len(files_of(path))
        for part in track(range(parts), f"checking {path}", console=console(), transient=True):
            check_contents(path, part, parts)
    except DamagedCheckpointError as error:
        raise _unusable(path, error) from None


def _unusable(path: Path, error: DamagedCheckpointError) -> OptionError:
    of_a_run = (path / COMPLETE).exists()
    return OptionError(f"{error} Or name another checkpoint of the run with --step." if of_a_run else str(error))


def _vocabulary(path: Path, config: RunConfig) -> int:
    """Token ids of the model, where its run took those of the data."""
    if config.model.vocabulary:
        return config.model.vocabulary
    try:
        return int(read_object(path / _FITS)["model.vocabulary"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(f"{path / _FITS} does not say the model's vocabulary; it is damaged.") from None


@contextmanager
def _progress(said: str, model: ModelDescription, dtype: str) -> Iterator[Callable[[int], None]]:
    """A bar of bytes; advanced by what is yielded."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from distca.log import console

    total = sum(map(math.prod, expected_shapes(model).values())) * VALUE_BYTES[dtype]
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console()) as progress:
        task = progress.add_task(said, total=total)
        yield lambda size: progress.advance(task, size)
