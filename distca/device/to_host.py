"""Numbers that a host needs from its device, without waiting for what the device has yet to do."""

from __future__ import annotations

import torch


class Question:
    """Numbers on their way to the host. The device goes on meanwhile.

    Args:
        values: on any device.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._answer, self._arrived = values, None
        if values.is_cuda:
            self._answer = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._answer.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> torch.Tensor:
        """The numbers on the host, which waits until the device has come to the question."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._answer
