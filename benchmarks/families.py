"""Trains a tiny model of every served family in transformers and here: all gradients, and five steps of AdamW.

    python -m benchmarks.families --output benchmarks/results/family_gradients.json

Transformers computes one document at a time. Here the documents, which go beyond windows and the original context, are
packed over two ranks of disaggregated core attention, and over two tensor-parallel ranks. Float32, on CPUs; the command
fails where something differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import family_models
from distca.models.description import describe_folder
from distca.models.stored import plain_name
from distca.models.weight_map import ExpertMap, WeightMap
from distca.testing.ranks import run_ranks
from distca.testing.reference_attention import relative_error
from distca.train.config.schema import OptimizerConfig
from distca.versions import command_line, header, write_report

TOLERANCE = 1e-5
"""The largest distance of each gradient, each weight and each loss in float32, relative to its norm."""
RANKS, STEPS = 2, 5
_ADAM = OptimizerConfig(lr=1e-3, schedule="constant", epsilon=1e-5, distributed=False)
"""Its epsilon is above what rounding leaves of gradients that are zero, such as those of biases of keys where nothing
is rotated: a smaller one makes steps of the whole learning rate by their signs."""
_MICRO_BATCHES = 2
PARTS = {"families": 1, "tensor_parallel": RANKS}
"""The parts of the report, and the tensor-parallel ranks of each."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Trained:
    """The results of training.

    Attributes:
        gradients: of the first step, by the tensor's name in a folder of text alone, before they are clipped.
        losses: mean of the token losses of each step.
        weights: after the last step.
    """

    gradients: Tensors
    losses: list[float]
    weights: Tensors


@dataclass(frozen=True)
class Errors:
    """The largest relative errors.

    Attributes:
        gradients: of a tensor's gradient.
        worst: the tensor that has it.
        losses: of a step's loss.
        weights: of a tensor after the last step.
        tensors: how many were compared.
    """

    gradients: float
    worst: str
    losses: float
    weights: float
    tensors: int

    @property
    def equal(self) -> bool:
        """Whether all are within the tolerance; an error that is no number is not."""
        return all(error <= TOLERANCE for error in (self.gradients, self.losses, self.weights))


def compare(names: Sequence[str], tp: int = 1, steps: int = STEPS) -> dict[str, Errors]:
    """The errors of some of :data:`benchmarks.family_models.CASES`, by name.

    Args:
        names: of the cases.
        tp: tensor-parallel ranks of the two ranks.
        steps: of AdamW.
    """
    with tempfile.TemporaryDirectory(prefix="distca-families-") as root:
        folders = {name: Path(root) / str(number) for number, name in enumerate(names)}
        models = {name: family_models.write_folder(name, folder) for name, folder in folders.items()}
        theirs = {name: _theirs(model, describe_folder(folders[name]).weights, steps) for name, model in models.items()}
        ours, *_ = run_ranks(RANKS, _all_ours, list(folders.values()), tp, steps, timeout=600.0)
    return {name: _errors(own, theirs[name]) for name, own in zip(names, ours, strict=True)}


def _errors(ours: Trained, theirs: Trained) -> Errors:
    gradients, weights = (_by_tensor(getattr(ours, part), getattr(theirs, part)) for part in ("gradients", "weights"))
    losses = [abs(own / their - 1) for own, their in zip(ours.losses, theirs.losses, strict=True)]
    worst = max(gradients, key=lambda name: _rank(gradients[name]))
    return Errors(gradients[worst], worst, max(losses, key=_rank), max(weights.values(), key=_rank), len(gradients))


def _by_tensor(ours: Tensors, theirs: Tensors) -> dict[str, float]:
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return {name: float(relative_error(ours[name], theirs[name])) for name in theirs}


def _rank(error: float) -> tuple[bool, float]:
    """The order of errors, in which one that is no number is worst of all."""
    return error != error, error


def _documents(steps: int) -> Iterator[list[list[list[int]]]]:
    """The documents of every step, by micro-batch; in each the shortest first."""
    for step in range(steps):
        yield [family_models.documents(step * _MICRO_BATCHES + number) for number in range(_MICRO_BATCHES)]


def _theirs(model: Any, names: WeightMap, steps: int) -> Trained:
    """The results of transformers and torch for a model, one document at a time; tensors have a folder's names."""
    model = model.eval()  # without dropout
    weights = {plain_name(name): weight for name, weight in model.named_parameters()}
    adam, gradients, losses = None, Tensors(), []
    for micro_batches in _documents(steps):
        model.zero_grad()
        documents = [document for micro_batch in micro_batches for document in micro_batch]
        tokens, total = sum(len(document) - 1 for document in documents), 0.0
        for document in documents:
            logits = model(torch.tensor([document])).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(document[1:]), reduction="sum") / tokens
            loss.backward()
            total += loss.item()
        losses.append(total)
        if adam is None:  # parts for images have no gradients
            weights = {name: weight for name, weight in weights.items() if weight.grad is not None}
            gradients = {name: weight.grad.clone() for name, weight in weights.items()}
            adam = _torch_adam(weights)
        torch.nn.utils.clip_grad_norm_(weights.values(), _ADAM.clip_grad)
        adam.step()
    trained = {name: weight.detach() for name, weight in weights.items()}
    return Trained(_apart(gradients, names.experts), losses, _apart(trained, names.experts))


def _apart(tensors: Tensors, experts: ExpertMap) -> Tensors:
    """Tensors by a folder's names: one for each expert, where transformers holds those of a layer in one."""
    found = Tensors()
    for name, tensor in tensors.items():
        if ".mlp.experts." not in name:
            found[name.replace(".mlp.gate.", f".{experts.router}.")] = tensor
            continue
        layer, part = name.split("mlp.experts.")
        names = experts.gate_up if part.startswith("gate_up_proj") else (experts.down,)
        kind = "bias" if part.endswith("_bias") else "weight"
        for number, own in enumerate(tensor):
            parts = zip(names, own.chunk(len(names)), strict=True)
            found |= {layer + experts.of(number, name, kind): each for name, each in parts}
    return found


def _decays(name: str, weight: torch.Tensor) -> bool:
    """Whether a weight decays, which biases do not, not those of all experts in one tensor either."""
    return weight.dim() > 1 and not name.endswith("bias")


def _torch_adam(weights: Tensors) -> torch.optim.AdamW:
    """The same optimizer in torch; norms and biases do not decay."""
    groups = [
        {
            "params": [weight for name, weight in weights.items() if _decays(name, weight) == decays],
            "weight_decay": decay,
        }
        for decays, decay in ((True, _ADAM.weight_decay), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=_ADAM.lr, betas=(_ADAM.beta1, _ADAM.beta2), eps=_ADAM.epsilon)


def _all_ours(folders: Sequence[Path], tp: int, steps: int) -> list[Trained]:
    warnings.filterwarnings("ignore")
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    return [_ours(folder, tp, steps) for folder in folders]


def _ours(folder: Path, tp: int, steps: int) -> Trained:
    """The results of CAD for a folder, packed over all ranks."""
    from distca.models.tensors import TensorFiles
    from distca.train.config.initial import model_config
    from megatron_patches.api import CAD
    from megatron_patches.hugging_face.weights import group_of, load_weights, slots
    from megatron_patches.model.gpt import build_model, transformer_config
    from megatron_patches.model.model_variant import cad_keywords
    from megatron_patches.ranks.groups import initialize_model_parallel
    from megatron_patches.steps.step_documents import StepDocuments
    from megatron_patches.training.optimizer import build_optimizer
    from megatron_patches.training.training_step import sum_over_ranks, summed_loss_step

    described = describe_folder(folder)
    initialize_model_parallel(tp, 1, 1, RANKS // tp if described.experts.count else 1)
    shape = model_config(described)
    config = transformer_config(shape, torch.float32, sequence_parallel=True, cpu_initialization=True)
    cad = CAD(
        config,
        tokens_per_rank=-(-sum(family_models.LENGTHS) * tp // RANKS),
        tolerance=0.0,
        kernel="reference",
        **cad_keywords(shape),
    )
    model = cad.attach(build_model(shape, described.vocabulary, cad))
    load_weights(model, described, TensorFiles(folder))
    ddp = cad.data_parallel(model, distributed_optimizer=False)
    optimizer = build_optimizer(ddp, _ADAM, steps, 0, torch.float32)

    def stored(values: Callable[[Any], torch.Tensor]) -> Tensors:
        found = Tensors()
        for parameter, slot in slots(model, described):
            own, group = values(parameter).contiguous(), group_of(slot)
            shares = [torch.empty_like(own) for _ in range(group.size())]
            torch.distributed.all_gather(shares, own, group=group)
            found |= zip(slot.names, (tensor.clone() for tensor in slot.tensors(shares)), strict=True)
        return found

    gradients, losses = Tensors(), []
    for documents in _documents(steps):
        step = cad.plan_step(StepDocuments(documents))
        total, tokens = sum_over_ranks(cad.forward_backward(step, summed_loss_step, ddp), cad.device)
        losses.append(float(total / tokens))
        gradients = gradients or stored(lambda parameter: parameter.main_grad)
        optimizer.step()
    return Trained(gradients, losses, stored(torch.Tensor.detach))


def main() -> None:
    """Write the report; exit code 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--only", nargs="+", default=(), help="cases that are trained; others stay as in the file")
    asked = parser.parse_args()
    kept = json.loads(asked.output.read_text(encoding="utf-8")) if asked.only else {}
    found = {}
    for part, tp in PARTS.items():
        trained = compare(asked.only or list(family_models.CASES), tp)
        found[part] = {
            name: trained[name] if name in trained else Errors(**kept[part][name]) for name in family_models.CASES
        }
    different = [f"{name}, {part}" for part in found for name, errors in found[part].items() if not errors.equal]
    report = {
        **header(command_line("python -m benchmarks.families"), RANKS),
        "tolerance": TOLERANCE,
        "different": different,
        **{part: {name: asdict(errors) for name, errors in found[part].items()} for part in found},
    }
    write_report(asked.output, report)
    sys.stdout.write(json.dumps({part: report[part] for part in PARTS}, indent=1) + "\n")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
