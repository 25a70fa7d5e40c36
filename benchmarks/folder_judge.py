"""Holds what is made of a config.json against transformers: the same logits, or a refusal.

    python -c "from benchmarks.folder_judge import judge; print(judge({'mine': {'model_type': 'llama', ...}}))"

Weights are those that transformers draws for the configuration, so that only their shapes depend on it. Transformers
runs in this process and DistCA in another one, in which Megatron-Core's CUDA is replaced by the CPU.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.dense_gpt_oss import without_experts
from distca.errors import ModelError
from distca.testing.ranks import run_ranks
from distca.testing.reference_attention import relative_error

TOLERANCE = 1e-5
"""The largest distance of logits in float32, relative to their norm."""
LENGTHS = (3, 40)
"""Tokens of the documents, each of which is computed alone."""
_IDS = 60
_AT_ONCE = 100
"""Folders that lie on disk together."""

Kind = Literal["equal", "refused", "different", "only ours", "traceback"]


@dataclass(frozen=True)
class Verdict:
    """The verdict on a config.json.

    Attributes:
        kind: equal = served with transformers' logits; refused = with a sentence; different = served with others; only
            ours = served, where transformers fails; traceback = anything but a sentence.
        said: the sentence, or what transformers or a traceback says.
        error: largest relative error of a document's logits.
        warnings: what was said to be left out.
    """

    kind: Kind
    said: str = ""
    error: float | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Ours:
    logits: list[torch.Tensor] | None = None
    refused: str = ""
    traceback: str = ""
    warnings: tuple[str, ...] = ()


def judge(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Verdict]:
    """Compare both ways to read a folder, by name of its configuration.

    Args:
        configs: by name, the content of a config.json of a small model, with ids below 60.
    """
    refused = {name: said for name, config in configs.items() if (said := _refused(config))}
    # Transformers draws no weights for what is refused: some of its defaults fill the memory.
    verdicts = {name: Verdict("refused", said) for name, said in refused.items()}
    names = [name for name in configs if name not in refused]
    for first in range(0, len(names), _AT_ONCE):
        some = names[first : first + _AT_ONCE]
        with tempfile.TemporaryDirectory(prefix="distca-judge-") as root:
            folders = {name: Path(root) / str(number) for number, name in enumerate(some)}
            theirs = {name: _theirs(configs[name], folders[name]) for name in some}
            (ours,) = run_ranks(1, _all_ours, list(folders.values()), timeout=600.0)
        verdicts |= {name: _verdict(*theirs[name], own) for name, own in zip(some, ours, strict=True)}
    return verdicts


def _refused(config: Mapping[str, Any]) -> str:
    """The sentence with which a config.json is refused; empty where it is described, or ends in a traceback."""
    from distca.models.description import describe

    try:
        describe(config, "config.json")
    except ModelError as error:
        return str(error)
    except Exception:  # which comes again, as the verdict
        return ""
    return ""


def documents() -> list[list[int]]:
    """Seeded tokens of documents of all lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(_IDS, (length,), generator=generator).tolist() for length in LENGTHS]


def _verdict(theirs: list[torch.Tensor] | None, failed: str, ours: _Ours) -> Verdict:
    if ours.refused or ours.traceback:
        return Verdict("refused" if ours.refused else "traceback", ours.refused or ours.traceback)
    if theirs is None or ours.logits is None:
        return Verdict("only ours", failed, warnings=ours.warnings)
    errors = [float(relative_error(own, their)) for own, their in zip(ours.logits, theirs, strict=True)]
    worst = max(errors, key=lambda error: (error != error, error))  # no number is worst of all
    return Verdict("equal" if worst <= TOLERANCE else "different", error=worst, warnings=ours.warnings)


def _all_ours(folders: list[Path]) -> list[_Ours]:
    warnings.filterwarnings("ignore")
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    return [_ours(folder) for folder in folders]


def _ours(folder: Path) -> _Ours:
    from distca.models.description import describe_folder
    from distca.parity.folder_logits import folder_logits

    try:
        if not any(folder.glob("*.safetensors")):  # transformers could not make any
            return _Ours(warnings=tuple(_without(folder, each) for each in describe_folder(folder).warnings))
        said = tuple(_without(folder, each) for each in describe_folder(folder).warnings)
        return _Ours(folder_logits(folder, documents()), warnings=said)
    except ModelError as error:
        return _Ours(refused=_without(folder, str(error)))
    except Exception as error:
        return _Ours(traceback=f"{type(error).__name__}: {error}")


def _without(folder: Path, said: str) -> str:
    """A sentence that names no folder of this machine."""
    return said.replace(f"{folder}/", "").replace(str(folder), "The folder")


def _theirs(config: Mapping[str, Any], folder: Path) -> tuple[list[torch.Tensor] | None, str]:
    """The logits of transformers from a folder with weights that it drew itself; or None, and why there are none."""
    folder.mkdir()
    file, content = folder / "config.json", json.dumps(config)
    file.write_text(content, encoding="utf-8")
    with _quiet():
        try:
            kind = _class_of(config)
            _draw(kind, folder)
            file.write_text(content, encoding="utf-8")
            model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
            with torch.no_grad():
                return [model(torch.tensor([tokens])).logits[0].float() for tokens in documents()], ""
        except Exception as error:  # whatever its classes raise
            file.write_text(content, encoding="utf-8")
            return None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _class_of(config: Mapping[str, Any]) -> Any:
    import transformers

    several = "text_config" in config
    return transformers.AutoModelForImageTextToText if several else transformers.AutoModelForCausalLM


def _draw(kind: Any, folder: Path) -> None:
    """Write the weights of a new model of the folder's config.json beside it."""
    import transformers

    torch.manual_seed(1)
    model = kind.from_config(transformers.AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("_bias"):  # norms start at one and biases at zero
                parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the words and bars of transformers, which builds gpt-oss without experts meanwhile."""
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), without_experts():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(before)
        transformers.logging.enable_progress_bar()
