"""Experts that are chosen by the sigmoid of their logits plus a bias: what GLM-4.5 and DeepSeek-V3 have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from distca.errors import ModelError
from distca.models.experts import Experts
from distca.models.families.mixtures import BALANCE
from distca.models.fields import Field, Only, Read

_GROUP_SCORES: Final = 2
"""Scores of a group whose sum says whether it is chosen."""
FURTHER: Final = ("num_nextn_predict_layers", "num_mtp_layers")
"""Fields with the number of layers that predict further tokens, the one that version 5 writes first."""

SIGMOID: Final[dict[str, Field]] = BALANCE | {
    "num_experts_per_tok": Read("count", 8),
    "num_local_experts": Only((None,), "the field of this class has another name, n_routed_experts; rename it"),
    "n_shared_experts": Read("count", 1),
    "norm_topk_prob": Only((True,), "scores of a row's experts are normalised here"),
    "num_nextn_predict_layers": Read("index", None, optional=True),
    "num_mtp_layers": Read("index", 1),
}
"""The fields that both have with the same defaults."""


def sigmoid_experts(said: Mapping[str, Any]) -> Experts:
    """Experts by the values of these fields. Their bias stays as it is, unless a run sets model.experts.bias_rate."""
    topk, groups, chosen = said["num_experts_per_tok"], said["n_group"], said["topk_group"]
    if groups > 1 and topk != _GROUP_SCORES * chosen:
        raise ModelError(
            f"num_experts_per_tok is {topk} and topk_group is {chosen}, but groups are chosen by as many scores as "
            f"each gives experts here, and by {_GROUP_SCORES} in transformers."
        )
    if topk == 1:
        raise ModelError("num_experts_per_tok is 1, but the score of one expert alone is not normalised here.")
    return Experts(
        count=said["n_routed_experts"],
        topk=topk,
        ffn=said["moe_intermediate_size"],
        dense_layers=said["first_k_dense_replace"],
        shared_ffn=said["n_shared_experts"] * said["moe_intermediate_size"],
        score="sigmoid",
        bias=True,
        bias_rate=0.0,
        groups=groups if groups > 1 else 0,
        chosen_groups=chosen if groups > 1 else 0,
        scale=said["routed_scaling_factor"],
    )
