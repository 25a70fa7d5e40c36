"""One gloo device for all process groups of a rank, as a model's many groups would make one each."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import ProcessGroupGloo, Store

_made_alone = ProcessGroupGloo.__init__


def share_gloo_device() -> None:
    """Let all gloo groups that this process makes from now on listen on one device.

    By itself every group makes a device, whose thread wakes up a hundred times a second, also where nothing is sent.
    A rank has some thirty groups, so ranks on a few cores would spend a tenth of their time on this.
    """
    ProcessGroupGloo.__init__ = _made  # type: ignore[method-assign,assignment]


def _made(group: ProcessGroupGloo, store: Store, rank: int, size: int, timeout: timedelta) -> None:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._timeout = [_device(os.environ.get("GLOO_SOCKET_IFNAME"))], timeout
    _made_alone(group, store, rank, size, options)


@cache
def _device(interface: str | None) -> Any:
    """The device of an interface, which gloo takes from the environment."""
    return ProcessGroupGloo.create_default_device()
