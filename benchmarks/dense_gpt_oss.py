"""gpt-oss without experts: transformers' own attention and layers, with a dense MLP where a configuration has none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


class DenseMlp(torch.nn.Module):
    """A gated MLP by LLaMA's names, in the place of gpt-oss's experts.

    Args:
        config: of transformers.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inside = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = (torch.nn.Linear(hidden, inside, bias=False) for _ in range(2))
        self.down_proj = torch.nn.Linear(inside, hidden, bias=False)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Returns the output of the MLP, and no scores of a router."""
        activated = torch.nn.functional.silu(self.gate_proj(rows)) * self.up_proj(rows)
        return self.down_proj(activated), None


@contextlib.contextmanager
def without_experts() -> Iterator[None]:
    """Meanwhile transformers builds gpt-oss with a dense MLP where num_local_experts is 0."""
    from transformers.models.gpt_oss import modeling_gpt_oss

    module: Any = modeling_gpt_oss
    experts = module.GptOssMLP
    module.GptOssMLP = lambda config: (experts if config.num_local_experts else DenseMlp)(config)
    try:
        yield
    finally:
        module.GptOssMLP = experts
