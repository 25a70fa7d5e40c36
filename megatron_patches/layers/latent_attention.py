"""Megatron's multi-head latent attention, with whole down-projections on every tensor-parallel rank.

A down-projection makes a token's narrow *latent row*, from which up-projections make the keys and values of all heads.
The down-projection also makes the part of the keys that RoPE rotates. All heads share this part.

Megatron's local spec splits down-projections over tensor-parallel ranks. A rank's gradient of the rotated part then
lacks what the other ranks' heads add. With whole down-projections each rank projects its own rows, and gathers the
rotated part of the other ranks' rows. The gather's backward adds up the gradients of all ranks' heads.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention


class ReplicatedLinear(torch.nn.Module):
    """A linear layer without bias, of which every tensor-parallel rank has the whole weight.

    With sequence parallelism each rank multiplies its own tokens. Megatron then adds up the weight's gradients over
    tensor-parallel ranks, because the weight has the attribute ``sequence_parallel``.
    """

    def __init__(self, inputs: int, outputs: int, config: Any) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype, device=device))
        if config.perform_initialization:
            config.init_method(self.weight)  # all tensor-parallel ranks draw the same numbers here
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.gradient_accumulation_fusion = config.gradient_accumulation_fusion

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Returns [..., outputs] for ``rows`` [..., inputs], and None in place of a bias."""
        if not self.weight.requires_grad:
            return torch.nn.functional.linear(rows, self.weight), None
        linear, adds_up = linear_with_grad_accumulation_and_async_allreduce, self.gradient_accumulation_fusion
        return linear(rows, self.weight, None, adds_up, allreduce_dgrad=False, sequence_parallel=False), None


class WholeRows(IdentityOp):
    """Stands where other models have the norm of latent rows. It only makes the rows contiguous.

    Latent rows of keys and values are a slice of a wider tensor, and NCCL gathers only contiguous tensors.
    """

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return x.contiguous()


class LatentAttention(MLASelfAttention):
    """Megatron's latent attention with another constructor.

    Megatron's constructor refuses :class:`ReplicatedLinear`. Without Transformer Engine it also refuses
    ``qk_layernorm`` if queries have no latent rows. ``norm_epsilon`` is the epsilon of all norms of latent rows.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        norm_epsilon: float,
        **named: Any,
    ) -> None:
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        super(MLASelfAttention, self).__init__(
            config=config,
            submodules=submodules,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            pg_collection=groups,
            **named,
        )
        hidden, rank = config.hidden_size, config.q_lora_rank
        if rank is None:
            self.linear_q_proj = self._of_heads(submodules.linear_q_proj, hidden, self.q_head_dim)
        else:
            self.linear_q_down_proj = submodules.linear_q_down_proj(hidden, rank, config)
            self.q_layernorm = submodules.q_layernorm(config=config, hidden_size=rank, eps=norm_epsilon)
            self.linear_q_up_proj = self._of_heads(submodules.linear_q_up_proj, rank, self.q_head_dim)
        rank, both = config.kv_lora_rank, config.qk_head_dim + config.v_head_dim
        self.linear_kv_down_proj = submodules.linear_kv_down_proj(hidden, rank + config.qk_pos_emb_head_dim, config)
        self.kv_layernorm = submodules.kv_layernorm(config=config, hidden_size=rank, eps=norm_epsilon)
        self.linear_kv_up_proj = self._of_heads(submodules.linear_kv_up_proj, rank, both)

    def _of_heads(self, linear: Any, inputs: int, head_dim: int) -> Any:
        config: Any = self.config
        return linear(
            inputs,
            config.num_attention_heads * head_dim,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
        )
