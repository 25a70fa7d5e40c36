"""Other ways to lay out packed long documents: which rank holds which tokens, in numpy. The benchmarks train in these
ways (``benchmarks/baselines``), ``distca simulate`` predicts them."""

from distca.baselines.dealing import VARIABLE_ROOM, Work, groups_of
from distca.baselines.layouts import pieces_of
from distca.baselines.mode import Mode, every_mode, parse_mode
from distca.errors import BaselineError

__all__ = ["VARIABLE_ROOM", "BaselineError", "Mode", "Work", "every_mode", "groups_of", "parse_mode", "pieces_of"]
