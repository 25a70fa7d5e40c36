"""Training from a Hugging Face folder against transformers and torch's own AdamW: the same loss at every step."""

from pathlib import Path

import pytest
import torch

from distca.testing.ranks import run_ranks
from tests.models import folders
from tests.train.small_runs import arguments, steps_of, train_all, write_texts

STEPS, LR, DECAY, CLIP = 5, 0.003, 0.1, 1.0
VOCABULARY = 259
"""All bytes and a few more, odd, so that two tensor-parallel ranks need padding."""
RUNS: dict[str, dict[str, object]] = {
    "llama3": {"parallel__tp": 2},
    "dynamic": {"parallel__pp": 2},
    "yarn, two magnitudes": {"parallel__pp": 2, "cad__enabled": False},
    "qwen2, tied": {"parallel__tp": 2, "parallel__pp": 2},
    "qwen3": {"parallel__tp": 2, "train__micro_batches": 2},
}
"""By case of tests.models.folders, on four ranks."""


def _line(root: Path, name: str) -> list[str]:
    shape = {f"model__{size}": None for size in ("layers", "hidden", "ffn", "heads", "kv_heads")}
    settings = {
        "name": name,
        "output": root / "runs",
        "checkpoint__init_from": root / name,
        "checkpoint__save_at_end": False,
        "data__path": root / "texts",
        "data__tokenizer": "bytes",
        "data__validation_fraction": 0,
        "optimizer__lr": LR,
        "optimizer__min_lr": LR,
        "optimizer__warmup_steps": 0,
        "optimizer__weight_decay": DECAY,
        "optimizer__clip_grad": CLIP,
        "train__steps": STEPS,
    }
    return arguments(**shape | settings | RUNS[name])


def _documents(line: list[str]) -> list[list[torch.Tensor]]:
    """By step, the tokens of its documents."""
    from distca.train.config.cli import parse_run_config
    from distca.train.data.corpus import dealt, open_corpus, open_sampler

    config = parse_run_config(line)
    corpus = open_corpus(config)
    sampler = open_sampler(config, corpus.train, config.parallel.data_parallel(4))
    return [
        [torch.tensor(document[:]) for micro_batch in step.micro_batches for document in micro_batch]
        for step in dealt(corpus.train, sampler, STEPS)
    ]


def _reference(folder: Path, steps: list[list[torch.Tensor]]) -> dict[int, float]:
    """Losses by transformers: every document alone, each target of a step with the same weight."""
    model = folders.loaded(folder)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    losses = {}
    for number, documents in enumerate(steps, 1):
        targets = sum(len(document) - 1 for document in documents)
        total = 0.0
        for document in sorted(documents, key=len):  # dynamic scaling remembers the longest so far
            rotary = model.model.rotary_emb
            rotary.inv_freq, rotary.max_seq_len_cached = rotary.original_inv_freq, rotary.original_max_seq_len
            logits = model(document[None]).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, document[1:], reduction="sum") / targets
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        adam.step()
        adam.zero_grad()
        losses[number] = total
    return losses


@pytest.mark.slow
def test_losses_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts(tmp_path / "texts")
    monkeypatch.setitem(folders._SIZES, "vocab_size", VOCABULARY)
    for name in RUNS:
        folders.write_folder(name, tmp_path / name)
    lines = {name: _line(tmp_path, name) for name in RUNS}
    run_ranks(4, train_all, list(lines.values()), timeout=250)
    for name, line in lines.items():
        expected = _reference(tmp_path / name, _documents(line))
        ours = steps_of(tmp_path / "runs" / name)
        assert ours == pytest.approx(expected, rel=1e-5), name
        assert ours[STEPS] < ours[1] - 0.1, "it learns"
