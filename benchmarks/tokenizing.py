"""How fast texts become tokens: a conversion with one process and with two, against the tokenizer alone.

    python benchmarks/tokenizing.py --output tokenizing.json

The texts are Python's standard library as JSON Lines, as many times as --megabytes needs. The tokenizer is a byte-level
BPE that is trained on a part of it. Alone is one thread of the package tokenizers on texts that are in memory already,
until their ids are numbers of Python. All three are measured in turn, several times; CPU seconds count what other work
on the machine does not change, wall seconds what a user waits. Each counts with its median round: clocks come and go.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# In this process, as in those that a conversion starts: read when the tokenizer is first used.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from distca.data.convert import convert
from distca.data.recipe import Recipe
from distca.data.sources.text import open_stdlib
from distca.data.texts import open_texts
from distca.data.tokenizer import find_tokenizer, load_json
from distca.versions import command_line, header, versions, write_report

_TRAINED_ON = 8 << 20  # bytes
_AT_A_TIME = 64  # documents of the tokenizer alone


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="distca-tokenizing-") as name:
        report = _measure(asked, Path(name))
    write_report(asked.output, report)


def _measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    documents = _documents(asked.megabytes << 20)
    lines, tokenizer = folder / "texts.jsonl", folder / "tokenizer.json"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    _train_tokenizer(documents, asked.vocabulary, tokenizer)
    texts, recipe = open_texts("jsonl", str(lines)), Recipe(find_tokenizer(str(tokenizer)))

    def converted(processes: int) -> int:
        target = folder / f"tokens-{time.monotonic_ns()}"
        return convert(texts, recipe, str(target), processes=processes).tokens

    ways: dict[str, Callable[[], int]] = {
        "alone": lambda: _alone(tokenizer, documents),
        "one process": lambda: converted(1),
        "two processes": lambda: converted(2),
    }
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for number in range(asked.rounds):
        turn = list(ways.items())
        for way, run in turn if number % 2 == 0 else reversed(turn):  # clocks and other work drift
            rounds[way].append(_timed(run))
            logging.info("Round %d, %s: %s", number + 1, way, rounds[way][-1])
    size = sum(len(text.encode()) for text in documents)
    tokens = {way: {each.pop("tokens") for each in found} for way, found in rounds.items()}
    assert len(set.union(*tokens.values())) == 1, f"not the same tokens: {tokens}"
    alone, one, two = (
        {key: statistics.median(each[key] for each in found) for key in found[0]} for found in rounds.values()
    )
    return {
        **header(command_line("python benchmarks/tokenizing.py"), 1),
        "versions": versions() | {"tokenizers": _version()},
        "text_bytes": size,
        "documents": len(documents),
        "tokens": int(tokens["alone"].pop()),
        "load_of_the_last_minutes": [round(each, 2) for each in os.getloadavg()],
        "rounds": rounds,
        "megabytes_per_s_alone": round(size / alone["wall_s"] / 1e6, 2),
        "one_process_of_alone": {key: round(alone[key] / one[key], 3) for key in alone},
        "two_processes_over_one": {key: round(one[key] / two[key], 3) for key in one},
    }


def _documents(size: int) -> list[str]:
    """Files of the standard library, until they have so many bytes; the same file again has another first line."""
    files = [Path(file).read_text(encoding="utf-8", errors="replace") for file in open_stdlib().files]
    documents, held, turn = list[str](), 0, 0
    while held < size:
        for text in files:
            documents.append(f"# {turn}\n{text}" if turn else text)
            held += len(documents[-1].encode())
            if held >= size:
                break
        turn += 1
    return documents


def _train_tokenizer(documents: list[str], vocabulary: int, file: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    part, held = list[str](), 0
    for text in documents:
        part.append(text)
        held += len(text)
        if held >= _TRAINED_ON:
            break
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(part, trainer)
    tokenizer.save(str(file))


def _alone(tokenizer: Path, documents: list[str]) -> int:
    loaded, tokens = load_json(tokenizer), 0
    for first in range(0, len(documents), _AT_A_TIME):
        encodings = loaded.encode_batch_fast(documents[first : first + _AT_A_TIME], add_special_tokens=False)
        tokens += sum(len(encoding.ids) for encoding in encodings)
    return tokens


def _timed(run: Callable[[], int]) -> dict[str, float]:
    """In a process of its own: one that has encoded much before gets slower."""
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    process = context.Process(target=_time_here, args=(run, found))
    process.start()
    process.join()
    assert process.exitcode == 0
    result: dict[str, float] = found.get()
    return result


def _time_here(run: Callable[[], int], found: Any) -> None:
    wall, cpu = time.perf_counter(), _cpu_s()
    tokens = run()
    found.put({"wall_s": time.perf_counter() - wall, "cpu_s": _cpu_s() - cpu, "tokens": tokens})


def _cpu_s() -> float:
    """CPU seconds of this process and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _version() -> str:
    import tokenizers

    return str(tokenizers.__version__)


if __name__ == "__main__":
    main()
