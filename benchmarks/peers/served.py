"""The models and settings that the peers' modes are built for; it needs neither torch nor Megatron-Core."""

from __future__ import annotations

from distca.errors import BaselineError
from distca.models.hybrid import EXPERTS, MAMBA
from distca.models.rope import RopeScaling
from distca.models.shape import ModelShape
from distca.models.variant import Variant
from distca.train.config.schema import RunConfig


def check_served(run: RunConfig) -> None:
    """Refuse what these modes would compute differently from the others.

    Raises:
        BaselineError: in a sentence, with the setting to change.
    """
    model, train = run.model, run.train
    unserved = {
        "model.rope_scaling": model.rope_scaling != RopeScaling(),
        "model.layer_types with windows": any(model.windows),
        "model.sinks": model.sinks,
        "model.variant": model.variant != _variant(model),
        "model.hybrid.plain_norm": model.hybrid.plain_norm,
        "model.hybrid.pattern with M or E": bool({MAMBA, EXPERTS} & {*model.hybrid.pattern}),
        "model.experts.biases": model.experts.biases,
        "model.experts.clamp": model.experts.clamp > 0,
        "model.experts.document_balance": model.experts.document_balance > 0,
        "model.latent.norm_epsilon": model.latent.norm_epsilon not in (0, model.norm_epsilon),
    }
    if asked := [name for name, differs in unserved.items() if differs]:
        raise BaselineError(
            "Modes of unmodified Megatron-Core with Transformer Engine train LLaMA's layers, latent attention and "
            f"gated delta nets, and this model has others ({', '.join(asked)}); choose other modes."
        )
    if (model.hybrid.pattern or model.latent.kv_rank) and run.parallel.pp > 1:
        raise BaselineError(
            f"parallel.pp is {run.parallel.pp}, with which modes of unmodified Megatron-Core are not built for hybrid "
            "stacks and latent attention; set it to 1, or choose other modes."
        )
    if model.vocabulary % run.parallel.tp:
        raise BaselineError(
            f"model.vocabulary is {model.vocabulary}, which the {run.parallel.tp} tensor-parallel ranks do not divide; "
            "modes of unmodified Megatron-Core would learn the rows that are added."
        )
    if train.recompute == "auto":
        raise BaselineError(
            "train.recompute is auto, which only this project's modes know; set it to none, mlp or all for modes of "
            "unmodified Megatron-Core."
        )
    if train.linears == "local":
        raise BaselineError(
            "train.linears is local, and modes of unmodified Megatron-Core have Transformer Engine's; set it to auto."
        )
    others = {"train.fp8_weights": (train.fp8_weights, False), "train.moments": (train.moments, "float32")}
    for name, (value, served) in others.items():
        if value != served:
            raise BaselineError(
                f"{name} is {value}, which modes of unmodified Megatron-Core are not built with; leave it out."
            )


def _variant(model: ModelShape) -> Variant:
    """The variant that is served: LLaMA's, or of hybrid stacks Qwen3.5's."""
    if not model.hybrid.pattern:
        return Variant()
    return Variant(zero_centered_norms=model.variant.zero_centered_norms, rotary_percent=model.variant.rotary_percent)
