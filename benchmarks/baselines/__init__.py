"""Other ways to train on packed long documents, on the same model, data, kernels and ranks as DistCA.

Each is a layout (which tokens of which document a rank holds) and a micro-batch that computes core attention under
megatron-core's unmodified layers. Context-parallel ranks are data-parallel ranks to megatron-core: their weights are
the same and their gradients are added, so only attention has to know of them.
"""

from benchmarks.baselines.groups import CpGroup, CpGroups
from benchmarks.baselines.prepare import Baseline, Prepared
from distca.baselines.dealing import Work, groups_of
from distca.baselines.mode import Mode, every_mode, parse_mode
from distca.errors import BaselineError

__all__ = [
    "Baseline",
    "BaselineError",
    "CpGroup",
    "CpGroups",
    "Mode",
    "Prepared",
    "Work",
    "every_mode",
    "groups_of",
    "parse_mode",
]
