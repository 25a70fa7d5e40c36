"""All ranks must plan alike, each on its own: otherwise one waits for rows that nobody sends."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from distca.plan import PlanError


def check_agreement(fingerprint: int, step: int) -> None:
    """Refuse a step that this rank or another planned differently; every rank calls it, before anything is sent.

    Args:
        fingerprint: of what this rank planned, as :func:`distca.plan.plan.fingerprint` gives it.
        step: number of the step, for the sentence.

    Raises:
        PlanError: on every rank, naming those that differ from rank 0.
    """
    everyone = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, torch.tensor(fingerprint, dtype=torch.int64))
    others = np.flatnonzero([int(each) != int(everyone[0]) for each in everyone])
    if len(others):
        some = ", ".join(map(str, others[:8])) + (", …" if len(others) > 8 else "")
        raise PlanError(
            f"{len(others)} of {len(everyone)} ranks ({some}) planned step {step} differently from rank 0, so nothing "
            "was sent. They were started with other settings, have other versions of distca or numpy, or another kind "
            "of processor: compare config.yaml and `distca doctor` on their machines."
        )
