"""A process with the double, which forks the ranks that need it: ``python -m ... FOLDER VERSION``.

It is a process of its own, because Megatron-Core asks once, when it is imported, whether Transformer Engine is there.
Ranks leave what they found in FOLDER.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import warnings
from pathlib import Path

import torch

from tests.megatron_patches.te import double

_ONCE = ("torch._dynamo", "megatron.core.models.mimo", "megatron_patches.api", "megatron_patches.te.linears")
_ONCE += ("megatron_patches.patches.stage_timers", "megatron_patches.checkpoint.save_load", "distca.parity.cases")
_ONCE += ("megatron_patches.hugging_face.export", "distca.train.run.loop", "distca.train.run.builder")
_ONCE += ("distca.train.run.main", "distca.train.run.consistency", "distca.train.run.record", "tests.train.small_runs")
_ONCE += ("docstring_parser", "safetensors.torch")
"""What ranks would import, each for itself; it takes longer than what they do."""


def main(folder: Path, version: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    double.install(version)
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    for module in _ONCE:
        importlib.import_module(module)
    from tests.megatron_patches.te import fp8_ranks, rank

    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=fp8_ranks.leave, args=(number, folder)) for number in range(2)]
    ranks.append(fork.Process(target=rank.leave, args=(folder,)))
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(any(each.exitcode for each in ranks))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
