"""The fields of Megatron's TransformerConfig for models with gated delta nets or Mamba-2."""

from __future__ import annotations

from typing import Any

from distca.errors import SupportError
from distca.models.hybrid import DELTA_NET, MAMBA
from distca.models.shape import ModelShape
from megatron_patches.versions import has_gated_delta_net, installed_version


def hybrid_fields(shape: ModelShape) -> dict[str, Any]:
    """Returns the fields' values by name; empty if ``shape.hybrid.pattern``, a string of layer symbols, is empty.

    Raises:
        SupportError: there is a pattern, and the installed Megatron-Core is older than 0.19.
    """
    hybrid = shape.hybrid
    if not hybrid.pattern:
        return {}
    if not has_gated_delta_net():
        raise SupportError(
            f"model.hybrid.pattern is {hybrid.pattern!r}, which needs megatron-core 0.19, but {installed_version()} is "
            "installed: install 0.19 on Python 3.12, or leave the pattern out."
        )
    fields: dict[str, Any] = {"attention_output_gate": hybrid.output_gate}
    if DELTA_NET in hybrid.pattern:
        fields |= {
            "linear_num_key_heads": hybrid.key_heads,
            "linear_num_value_heads": hybrid.value_heads,
            "linear_key_head_dim": hybrid.key_dim,
            "linear_value_head_dim": hybrid.value_dim,
        }
    if MAMBA in hybrid.pattern:
        # ``hybrid`` calls Mamba-2's heads value heads, and the groups of these heads key heads.
        fields |= {
            "mamba_num_groups": hybrid.key_heads,
            "mamba_num_heads": hybrid.value_heads,
            "mamba_state_dim": hybrid.key_dim,
            "mamba_head_dim": hybrid.value_dim,
        }
    return fields
