"""A LLaMA by unmodified Megatron-Core: its GPTModel with Transformer Engine's layers, its DDP, its optimizer; of a
hybrid stack its HybridModel.

Options are those that NVIDIA's recipes for LLaMA set: fused cross-entropy, rotation, SwiGLU and weight gradients,
gradients reduced beside backward, weights gathered beside the next forward. Weights are drawn from the seed and in the
order of this project's models, so that both begin with the same ones. On CPUs, where Transformer Engine cannot run,
Megatron's local layers stand in.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module

from benchmarks.peers.experts import draw_experts, expert_fields
from benchmarks.peers.hybrid import build_hybrid, hybrid_fields
from benchmarks.peers.latent import latent_fields, latent_spec
from benchmarks.peers.served import check_served
from distca.baselines import BaselineError, Mode
from distca.train.config.schema import RunConfig

_FP8: dict[str, dict[str, Any]] = {
    "none": {},
    "current": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "delayed": {
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
    },
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "all": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


@dataclass(frozen=True)
class Peer:
    """The model that a mode trains: ``config`` is Megatron's own."""

    config: TransformerConfig
    model: DistributedDataParallel
    optimizer: Any
    schedule: OptimizerParamScheduler


def build_peer(run: RunConfig, mode: Mode, on_gpu: bool) -> Peer:
    """Make Megatron's groups, draw the weights and wrap them. Every rank calls it together.

    Args:
        run: a validated configuration.
        mode: a peer's.
        on_gpu: whether the ranks have GPUs.

    Raises:
        BaselineError: the configuration asks for something that is not built here.
    """
    check_served(run)
    if on_gpu and find_spec("transformer_engine") is None:
        raise BaselineError(f"{mode.name} needs Transformer Engine, which is not installed; choose other modes.")
    if not on_gpu and mode.degree > 1:
        raise BaselineError(f"{mode.name} needs GPUs: on CPUs nothing stands in for its context parallelism.")
    _groups(run, mode.degree)
    seed = run.train.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    config = transformer_config(run, mode, on_gpu)
    model = (build_hybrid if run.model.hybrid.pattern else _gpt)(run, config, on_gpu)
    if on_gpu:
        model.cuda()
        if run.model.experts.count:
            draw_experts(model, seed)
    wrapped = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=run.train.gradients == "float32",
            overlap_grad_reduce=on_gpu,
            overlap_param_gather=on_gpu and run.optimizer.distributed,
            use_distributed_optimizer=run.optimizer.distributed,
            check_for_nan_in_grad=False,
        ),
        module=Float16Module(config, model) if config.bf16 else model,
    )
    wrapped.broadcast_params()
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = wrapped.no_sync
    optimizer, schedule = _optimizer(run, wrapped)
    config.grad_scale_func = optimizer.scale_loss
    return Peer(config, wrapped, optimizer, schedule)


def transformer_config(run: RunConfig, mode: Mode, on_gpu: bool) -> TransformerConfig:
    """Megatron's configuration of the model and how it is computed."""
    shape, dtype = run.model, torch.bfloat16 if run.train.precision == "bf16" else torch.float32
    latent = latent_fields(shape, on_gpu)
    return (MLATransformerConfig if latent else TransformerConfig)(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.resolved_head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm or bool(latent),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        bias_activation_fusion=True,
        bias_dropout_fusion=on_gpu,
        masked_softmax_fusion=on_gpu,
        cross_entropy_loss_fusion=True,
        apply_rope_fusion=on_gpu,
        gradient_accumulation_fusion=on_gpu,
        tensor_model_parallel_size=run.parallel.tp,
        pipeline_model_parallel_size=run.parallel.pp,
        context_parallel_size=mode.degree,
        cp_comm_type=mode.method.rpartition("-")[2] if mode.degree > 1 else None,
        sequence_parallel=run.parallel.sequence_parallel and run.parallel.tp > 1,
        variable_seq_lengths=run.parallel.pp > 1,
        moe_token_dispatcher_type="alltoall",  # without experts it is nothing but what variable lengths ask for
        batch_p2p_sync=False,
        use_cpu_initialization=not on_gpu,
        **expert_fields(run, on_gpu),
        **hybrid_fields(run, on_gpu),
        **latent,
        **_recompute(run),
        **_FP8[run.train.fp8],
    )


def _recompute(run: RunConfig) -> dict[str, Any]:
    """The fields of what is computed again in backward."""
    fields = dict(_RECOMPUTE[run.train.recompute])
    if run.model.experts.count and "recompute_modules" in fields:
        fields["recompute_modules"] = ["mlp", "moe"]
    return fields


def _groups(run: RunConfig, degree: int) -> None:
    """Megatron's process groups. A start has one mode, and keeps them from one workload to the next."""
    if parallel_state.model_parallel_is_initialized():
        return
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=run.parallel.tp,
        pipeline_model_parallel_size=run.parallel.pp,
        context_parallel_size=degree,
        expert_model_parallel_size=run.parallel.ep,
        expert_tensor_parallel_size=1,
    )
    if run.parallel.pp > 1:
        # NCCL lets some ranks of a group talk to each other only after all of them did once.
        here = torch.zeros(1, device=torch.cuda.current_device())
        dist.all_reduce(here, group=parallel_state.get_pipeline_model_parallel_group())


def _gpt(run: RunConfig, config: TransformerConfig, on_gpu: bool) -> GPTModel:
    shape, tp = run.model, run.parallel.tp
    spec: Any
    if shape.latent.kv_rank:
        spec = latent_spec(config, on_gpu)
    elif shape.experts.count:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=on_gpu, normalization="RMSNorm")
    elif on_gpu:
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shape.qk_norm)
    else:
        spec = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=-(-shape.vocabulary // tp) * tp,
        max_sequence_length=run.data.context_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=shape.rope_base,  # type: ignore[arg-type]  # any number works
        share_embeddings_and_output_weights=shape.tie_embeddings,
        parallel_output=True,
    )


def _optimizer(run: RunConfig, model: DistributedDataParallel) -> tuple[Any, OptimizerParamScheduler]:
    settings, bf16 = run.optimizer, run.train.precision == "bf16"
    config = OptimizerConfig(
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.epsilon,
        clip_grad=settings.clip_grad,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=settings.distributed,
    )
    optimizer = get_megatron_optimizer(config, [model], get_standard_config_overrides(config))
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=0,
        lr_decay_steps=run.train.steps,
        lr_decay_style="constant",
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=run.train.steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return optimizer, schedule
