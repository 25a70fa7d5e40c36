"""run3d.sh and run4d.sh: the commands that they would start."""

import os
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN_3D = ROOT / "benchmarks" / "example-3d-parallel" / "run3d.sh"
RUN_4D = ROOT / "benchmarks" / "example-4d-parallel" / "run4d.sh"


def run(script, *arguments, **variables):
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment = kept | {"DRY_RUN": "1", "GPUS_PER_NODE": "0", "NAME": "test"} | variables
    return subprocess.run(
        ["bash", str(script), *arguments], env=environment, cwd=ROOT.parent, capture_output=True, text=True, timeout=60
    )


def command(script, *arguments, **variables):
    result = run(script, *arguments, **variables)
    assert result.returncode == 0, result.stderr
    return shlex.split(result.stdout)


def following(words, option):
    """The words after an option, up to the next one."""
    rest = words[words.index(option) + 1 :]
    return rest[: next((at for at, word in enumerate(rest) if word.startswith("--")), len(rest))]


def test_all_modes_of_both_mixes_on_four_cpu_ranks():
    words = command(RUN_3D)
    assert "--nproc-per-node=4" in words and "OMP_NUM_THREADS=1" in words
    assert following(words, "--modes") == ["all"]
    assert following(words, "--mixes") == ["pretrain", "prolong"]
    assert following(words, "--output") == ["benchmarks/example-3d-parallel/logs/test"]
    assert ("--config", "configs/tiny.yaml") in pairwise(words)
    assert not (RUN_3D.parent / "logs" / "test").exists()


@pytest.mark.parametrize(
    ("variables", "option", "words"),
    [
        ({"MODE": "distca cp ring2 cp-keep", "CP_SIZE": "2"}, "--modes", ["distca", "cp2", "ring2", "cp2-keep"]),
        ({"MODE": "ulysses", "TP_SIZE": "2"}, "--modes", ["ulysses2"]),
        ({"CP_SIZE": "2"}, "--degree", ["2"]),
        ({"MIX": "prolong"}, "--mixes", ["prolong"]),
        ({"CONTEXT_LENGTH": "256 512"}, "--contexts", ["256", "512"]),
        ({"BATCHES": "7"}, "--batches", ["7"]),
        ({"LINK_CHANNELS": "2"}, "--link-channels", ["2"]),
        ({"LAYERS": "3"}, "--model.layers", ["3"]),
        ({"TP_SIZE": "2"}, "--parallel.tp", ["2"]),
        ({"TOKENS_PER_RANK": "640"}, "--data.tokens_per_rank", ["640"]),
        ({"MICRO_BATCHES": "3"}, "--train.micro_batches", ["3"]),
        ({}, "--train.recompute", ["none"]),
        ({"RECOMPUTE": "mlp"}, "--train.recompute", ["mlp"]),
    ],
)
def test_variables(variables, option, words):
    assert following(command(RUN_3D, **variables), option) == words


def test_stages_belong_to_run4d():
    words = command(RUN_4D, "--cad.tolerance", "0.02")
    assert following(words, "--modes") == ["distca", "packed"]
    assert ("--parallel.pp", "2") in pairwise(words) and ("--train.micro_batches", "4") in pairwise(words)
    assert words[-2:] == ["--cad.tolerance", "0.02"]
    assert "run4d.sh" in run(RUN_3D, PP_SIZE="2").stderr


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"CP": "2"}, "did you mean CP_SIZE"),
        ({"SEQ_LEN": "2"}, "did you mean CONTEXT_LENGTH"),
        ({"DISTCA_MODE": "x"}, "There is no variable DISTCA_MODE"),
        ({"MODE": "fast"}, "MODE is 'fast'"),
        ({"MIX": "books"}, "MIX is 'books'"),
        ({"CP_SIZE": "3"}, "CP_SIZE is 3"),
        ({"RECOMPUTE": "1"}, "RECOMPUTE is '1'; it must be none, mlp or all."),
        ({"TP_SIZE": "3"}, "not divisible"),
        ({"BATCHES": "0"}, "BATCHES is '0'"),
    ],
)
def test_mistakes_are_sentences(variables, said):
    result = run(RUN_3D, **variables)
    assert result.returncode == 2
    assert said in result.stderr and "next step:" in result.stderr
