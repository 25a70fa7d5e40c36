"""A pretend machine for tests: a kernel that computes nothing and advances a clock by what its batch costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from distca.attention import TaskBatch
from distca.profile.grid import Grid

TINY = Grid((16, 64, 128, 256), (16, 64, 128, 256, 512), 16, 0.0, 8, 1.0, 0.0, 0.0, 1, 1024, 2048)
"""Measured in moments."""


@dataclass
class PretendMachine:
    """Its time, as a clock and as a kernel. A batch takes 1 ns per pair, 5 µs per started tile of 16 query rows and, in
    backward, 100 ns per key."""

    on_gpu: bool = False
    time: float = 0.0
    name: str = "pretend"

    def now(self) -> float:
        return self.time

    work = now

    @staticmethod
    def seconds(start: float, end: float) -> float:
        return end - start

    def forward(
        self, q_THD: torch.Tensor, k_SGD: torch.Tensor, v_SGD: torch.Tensor, batch: TaskBatch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert len(q_THD) == batch.borders_q[-1] and len(k_SGD) == len(v_SGD) == batch.borders_kv[-1]
        self.time += float(true_forward(np.diff(batch.borders_q), np.diff(batch.borders_kv)).sum())
        return q_THD, q_THD[..., 0]

    def backward(
        self,
        do_THD: torch.Tensor,
        q_THD: torch.Tensor,
        k_SGD: torch.Tensor,
        v_SGD: torch.Tensor,
        o_THD: torch.Tensor,
        lse_TH: torch.Tensor,
        batch: TaskBatch,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert len(do_THD) == len(o_THD) == len(lse_TH) == len(q_THD)
        self.time += float(true_backward(np.diff(batch.borders_q), np.diff(batch.borders_kv)).sum())
        return q_THD, k_SGD, v_SGD


def true_forward(q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
    return 1e-9 * q_rows * (kv_rows - (q_rows - 1) / 2) + 5e-6 * -(-q_rows // 16)


def true_backward(q_rows: np.ndarray, kv_rows: np.ndarray) -> np.ndarray:
    return 2.5 * true_forward(q_rows, kv_rows) + 1e-7 * kv_rows
