"""Training from a Hugging Face folder against transformers and torch's own AdamW: the same loss and gradient norm at
every step, on texts, on JSON Lines with the folder's tokenizer, and on conversations of which a part is learned."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import family_models
from distca.data.batch import targets_of
from distca.testing.ranks import run_ranks
from tests.models.tokenizer import write_tokenizer
from tests.train.small_runs import LONGEST, arguments, steps_of, train_all, write_texts

STEPS, LR, DECAY, CLIP = 3, 0.003, 0.1, 1.0
VOCABULARY = 259
"""All bytes and a few more, odd, so that two tensor-parallel ranks need padding."""
_TALKS: dict[str, object] = {
    "data__source": "jsonl",
    "data__path": "{root}/talks.jsonl",
    "data__tokenizer": None,
    "data__conversations": True,
    "data__longer": "split",
}
RUNS: dict[str, dict[str, object]] = {
    "llama3": {"parallel__tp": 2} | _TALKS | {"train__loss": "document"},
    "dynamic": {"parallel__pp": 2},
    "qwen2, tied": {"parallel__tp": 2, "parallel__pp": 2} | _TALKS | {"train__loss": "document"},
    "qwen3": {"train__micro_batches": 2, "data__context_length": 2 * LONGEST} | _TALKS,
    "mistral": {"data__source": "jsonl", "data__path": "{root}/texts.jsonl", "data__tokenizer": None},
}
"""By case of benchmarks.family_models, on four ranks; with one, two and four of them data parallel, and conversations
that are longer than a rank."""


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
        "cad__tolerance": 0.1,  # so few tokens can hardly be level, and trying takes long
    }
    chosen = {each: value.format(root=root) if isinstance(value, str) else value for each, value in RUNS[name].items()}
    return arguments(**shape | settings | chosen)


def _write_lines(root: Path) -> None:
    """Texts, and conversations of which some are longer than a rank, and some or pieces of them have nothing to
    learn."""
    random = np.random.default_rng(5)
    texts = [file.read_text() for file in sorted((root / "texts").iterdir())]
    talks = []
    for number in range(60):
        turns = random.integers(1, 6)
        words = iter(random.choice(texts, 2 * turns))
        talks.append([{"role": role, "content": next(words)[:8]} for role in ("user", "assistant") * turns])
        if number % 7 == 0:  # its first piece has nothing to learn
            talks[-1][0]["content"] = "x" * 2 * LONGEST
    talks[1] = talks[1][:1]
    for name, field, values in (("texts", "text", texts), ("talks", "messages", talks)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps({field: value}) + "\n" for value in values))


def _documents(line: list[str]) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """By step, the tokens of its documents, and what each target weighs in the step's loss."""
    from distca.train.config.cli import parse_run_config
    from distca.train.data.corpus import dealt, open_corpus, open_sampler

    config = parse_run_config(line)
    corpus = open_corpus(config)
    sampler = open_sampler(config, corpus.train, config.parallel.data_parallel(4))
    steps = []
    for step in dealt(corpus.train, sampler, STEPS):
        documents = [document for micro_batch in step.micro_batches for document in micro_batch]
        learned = [targets_of(document, slice(1, len(document))).astype(float) for document in documents]
        if config.train.loss == "document":
            learned = [each / max(each.sum(), 1) for each in learned]
        total = max(sum(each.sum() for each in learned), 1)
        tokens = [torch.tensor(document[:]) for document in documents]
        steps.append([(each, torch.tensor(mask / total).float()) for each, mask in zip(tokens, learned, strict=True)])
    return steps


def _reference(
    folder: Path, steps: list[list[tuple[torch.Tensor, torch.Tensor]]]
) -> tuple[dict[int, float], dict[int, float]]:
    """Losses and gradient norms by transformers: every document alone."""
    model = family_models.loaded(folder)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = {}, {}
    for number, documents in enumerate(steps, 1):
        total = 0.0
        for document, weights in sorted(
            documents, key=lambda each: len(each[0])
        ):  # dynamic scaling remembers the longest so far
            rotary = model.model.rotary_emb
            rotary.inv_freq, rotary.max_seq_len_cached = rotary.original_inv_freq, rotary.original_max_seq_len
            logits = model(document[None]).logits[0, :-1]
            loss = (torch.nn.functional.cross_entropy(logits, document[1:], reduction="none") * weights).sum()
            loss.backward()
            total += loss.item()
        norms[number] = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
        adam.step()
        adam.zero_grad()
        losses[number] = total
    return losses, norms


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ["dynamic", "qwen2, tied", "qwen3", "mistral"],
        pytest.param(["llama3"], marks=pytest.mark.matrix),  # its settings are those of Qwen2, without stages
    ],
    ids=", ".join,
)
def test_losses_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    write_texts(tmp_path / "texts")
    monkeypatch.setitem(family_models.SIZES, "vocab_size", VOCABULARY)
    for name in names:
        family_models.write_folder(name, tmp_path / name)
        write_tokenizer(tmp_path / name)
    _write_lines(tmp_path)
    lines = {name: _line(tmp_path, name) for name in names}
    run_ranks(4, train_all, list(lines.values()), timeout=250)
    for name, line in lines.items():
        expected, norms = _reference(tmp_path / name, _documents(line))
        ours = steps_of(tmp_path / "runs" / name)
        assert ours == pytest.approx(expected, rel=1e-5), name
        assert steps_of(tmp_path / "runs" / name, "grad_norm") == pytest.approx(norms, rel=1e-4), name
        assert min(ours.values()) < ours[1] - 0.1, "it learns"
