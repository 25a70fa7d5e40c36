"""The reference: unmodified Megatron-Core on one rank.

Its local spec is untouched, and all documents are in one sequence under a dense mask that hides other documents; only
the rotary angles are set by position in the document. Where layers have windows, which Megatron takes in place of a
given mask, every document is a sequence of its own. What Megatron does not have, :mod:`plain_model` computes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from distca.data.batch import rank_batch
from distca.parity import hybrid
from distca.parity.cases import ParityCase, case_documents, config_of
from distca.parity.latent import latent_layer
from distca.parity.outcome import Outcome
from distca.parity.plain_model import PlainModel
from distca.plan import lay_out
from megatron_patches.experts.layer import add_biases
from megatron_patches.experts.spec import has_experts
from megatron_patches.layers.block import block_spec
from megatron_patches.model.gpt import build_gpt
from megatron_patches.model.recurrences import has_recurrent_layers
from megatron_patches.patches.position_rotary import use_position_rotary
from megatron_patches.ranks.groups import initialize_model_parallel

T = TypeVar("T")


def run_unmodified(
    case: ParityCase, dtype: torch.dtype, device: torch.device
) -> tuple[Outcome, dict[str, torch.Tensor]]:
    """The reference, computed by the first rank alone; also returns the full weights. Every rank calls it together."""
    model = unmodified_model(case, dtype).to(device=device, dtype=dtype)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    if case.beyond_megatron:
        return computed_once(lambda: _plain_outcome(case, model)), weights
    return computed_once(lambda: unmodified_outcome(case, model, device)), weights


def computed_once(compute: Callable[[], T]) -> T:
    """Returns on every rank what the first rank computes; the result must not hold tensors of a GPU."""
    packed = io.BytesIO()
    if dist.get_rank() == 0:
        torch.save(compute(), packed)  # all tensors at once, where pickling takes each by itself
    sent = [packed.getvalue()]
    dist.broadcast_object_list(sent, device=torch.device("cpu"))
    return cast(T, torch.load(io.BytesIO(sent[0]), weights_only=False))


def _plain_outcome(case: ParityCase, model: GPTModel) -> Outcome:
    """Returns the outcome of :class:`PlainModel` with a model's weights."""
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    plain = PlainModel(weights, model.config, case.options, case.shape, case.rotary_percent)
    losses = [plain.losses(torch.from_numpy(ids)) for documents in case_documents(case) for ids in documents]
    total, tokens = torch.stack([each.sum() for each in losses]).sum(), sum(map(len, losses))
    (total / tokens).backward()
    gradients = {name: weight.grad.double() for name, weight in weights.items() if weight.grad is not None}
    return Outcome(total.item() / tokens, gradients)


def unmodified_outcome(
    case: ParityCase, model: GPTModel, device: torch.device, micro_batches: Sequence[Any] = ()
) -> Outcome:
    """Returns the outcome of a model from :func:`unmodified_model`, which this rank computes alone, also inside of
    Megatron's DDP. It is of the case's documents, or of other micro-batches."""
    total, tokens = 0.0, 0
    for documents in filter(len, micro_batches or case_documents(case)):  # dealt anew, one may be empty
        lengths = np.array([len(document) for document in documents])
        rows = rank_batch(documents, lay_out(lengths, 1), 0)
        ids, labels, mask, positions = (
            torch.from_numpy(x).to(device) for x in (rows.tokens, rows.labels, rows.loss_mask, rows.positions)
        )
        each = [slice(stop - length, stop) for stop, length in zip(np.cumsum(lengths), lengths, strict=True)]
        for part in each if case.apart else [slice(len(ids))]:
            if not model.config.multi_latent_attention:  # which counts from 0 by itself, as documents are apart
                model.rotary_pos_emb.set_positions(positions[part])
            hidden = hidden_scores(lengths, rows.positions, part).to(device)
            found = model(ids[None, part], None, hidden, labels=labels[None, part]).flatten() * mask[part]
            found.sum().backward()
            total += found.detach().double().sum().item()
        tokens += int(mask.sum())
    held = {name: getattr(p, "main_grad", p.grad) for name, p in model.named_parameters()}
    gradients = {name: gradient.double().cpu() / tokens for name, gradient in held.items()}
    return Outcome(total / tokens, gradients)


def unmodified_model(case: ParityCase, dtype: torch.dtype) -> GPTModel:
    """Megatron-Core's own model of the case on the CPU, but for the positions of its rotary embedding; of a case that
    is beyond Megatron ours, which holds the reference's weights."""
    initialize_model_parallel(1, 1, case.seed)
    config = config_of(replace(case, recompute="none", ep=1), dtype)
    if case.pattern:
        model = hybrid.unmodified_hybrid_model(case, config)
        _draw_vectors(model)
        use_position_rotary(model)
        return model
    if case.beyond_megatron:
        spec = block_spec(config, options=case.options)
    else:
        layer = partial(get_gpt_layer_local_spec, normalization=config.normalization, qk_layernorm=config.qk_layernorm)
        if config.multi_latent_attention:
            layer = partial(latent_layer, config)
        experts = layer(num_experts=config.num_moe_experts, moe_grouped_gemm=False) if config.num_moe_experts else None
        layers = [experts if each else layer() for each in has_experts(config)]
        if has_recurrent_layers(config):
            layers, config = hybrid.unmodified_layers(layer(), config), hybrid.by_torch(config)
        # Megatron would take Transformer Engine's final norm where that is installed, which knows no float64.
        spec = TransformerBlockSubmodules(layers, WrappedTorchNorm)
    model = build_gpt(case.model, case.shape.vocabulary, config, spec, case.rotary_percent)
    if case.config or case.beyond_megatron:
        _draw_vectors(model)
    use_position_rotary(model)
    if model.config.num_moe_experts and model.config.add_bias_linear:  # which fails on one rank otherwise
        add_biases(model)
    return model


def _draw_vectors(model: GPTModel) -> None:
    """Norms start at one and biases at zero, at which what uses them in a wrong place may still be right. Decays start
    so strong that little of a state reaches the next piece."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
            if name.endswith("A_log"):
                parameter -= 4.0


def hidden_scores(lengths: np.ndarray, positions: np.ndarray, rows: slice = slice(None)) -> torch.Tensor:
    """[1, 1, tokens, tokens] bool: true where a packed token must not see another; of some rows."""
    owner, positions = np.repeat(np.arange(len(lengths)), lengths)[rows], positions[rows]
    return torch.from_numpy((owner[:, None] != owner[None]) | (positions[:, None] < positions[None]))[None, None]
