"""A decoder written out in plain torch, one document at a time: the reference of what Megatron-Core does not have."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import cross_entropy

from distca.models.frequencies import frequencies_by_length, inverse_frequencies
from distca.models.shape import ModelShape
from distca.testing.reference_attention import packed_attention
from megatron_patches.model.layer_kinds import kind_of_layer
from megatron_patches.model.model_options import ModelOptions, Rotary


class PlainModel:
    """A whole model, differentiable with regard to its weights.

    Args:
        weights: by their names in a GPTModel without tensor parallelism.
        config: Megatron's configuration.
        options: the model's options.
        shape: the rotary positions of layers for which ``options`` has none.
        rotary_percent: theirs.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        config: TransformerConfig,
        options: ModelOptions,
        shape: ModelShape,
        rotary_percent: float,
    ) -> None:
        self._weights, self._config, self._options = weights, config, options
        self._own = Rotary(base=shape.rope_base, scaling=shape.rope_scaling, percent=rotary_percent)

    def losses(self, tokens_N: torch.Tensor) -> torch.Tensor:
        """[N - 1] losses of a document's tokens, each after those before it."""
        embedding = self._weights["embedding.word_embeddings.weight"]
        hidden = embedding[tokens_N]
        hidden = self.block(hidden * torch.tensor(self._options.embedding_scale, dtype=hidden.dtype))
        logits = hidden @ self._weights.get("output_layer.weight", embedding).T * self._options.logit_multiplier
        if cap := self._options.final_softcap:
            logits = cap * torch.tanh(logits / cap)
        return cross_entropy(logits[:-1], tokens_N[1:], reduction="none")

    def block(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """The layers and the final norm, of one document's rows."""
        for layer in range(self._config.num_layers):
            hidden_NH = self._layer(layer, hidden_NH)
        return self._norm("decoder.final_layernorm", hidden_NH)

    def _layer(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        place, options = f"decoder.layers.{layer}.", self._options

        def norm(name: str, y: torch.Tensor, there: bool) -> torch.Tensor:
            return self._norm(place + name, y) if there else y

        first, second = options.norms != "post", options.norms != "pre"
        into = norm("input_layernorm", x, first)
        attended = norm("post_attention_layernorm", self._attention(layer, into), second)
        after = x + attended * options.residual_multiplier
        if not options.parallel_mlp:
            into = norm("pre_mlp_layernorm", after, first)
        return after + norm("post_mlp_layernorm", self._mlp(place, into), second) * options.residual_multiplier

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        factor = self._weights[f"{name}.weight"] + float(self._config.layernorm_zero_centered_gamma)
        if self._config.normalization == "LayerNorm":
            x = x - x.mean(-1, keepdim=True)
        normed = x / (x.square().mean(-1, keepdim=True) + self._config.layernorm_epsilon).sqrt() * factor
        return normed + self._weights.get(f"{name}.bias", 0.0)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        product = x @ self._weights[f"{name}.weight"].T
        return product + self._weights.get(f"{name}.bias", 0.0)

    def _attention(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        name, config, options = f"decoder.layers.{layer}.self_attention.", self._config, self._options
        assert config.num_query_groups is not None and config.kv_channels is not None
        mixed = self._linear(f"{name}linear_qkv", x).view(len(x), config.num_query_groups, -1, config.kv_channels)
        q, k, v = mixed[:, :, :-2].flatten(1, 2), mixed[:, :, -2], mixed[:, :, -1]

        def normed(which: str, heads: torch.Tensor) -> torch.Tensor:
            if options.query_key_norm == "head":
                return self._norm(name + which, heads)
            return self._norm(name + which, heads.flatten(1)).view_as(heads)

        if config.qk_layernorm and not options.norm_after_rotation:
            q, k = normed("q_layernorm", q), normed("k_layernorm", k)
        q, k = self._rotated(layer, q), self._rotated(layer, k)
        if config.qk_layernorm and options.norm_after_rotation:
            q, k = normed("q_layernorm", q), normed("k_layernorm", k)
        if (scaling := options.query_scaling) is not None:
            turns = torch.arange(len(x)) // scaling.original_length
            q = q * (1 + scaling.beta * torch.log(1 + turns.float()))[:, None, None].to(q.dtype)
        kind = kind_of_layer(config, layer + 1, options.score_softcap)
        o = packed_attention(q, k, v, [len(x)], kind, self._weights.get(f"{name}core_attention.softmax_offset"))
        return self._linear(f"{name}linear_proj", o.flatten(1))

    def _rotated(self, layer: int, x_NHD: torch.Tensor) -> torch.Tensor:
        """Pairs turned as complex numbers."""
        config, options = self._config, self._options
        if config.no_rope_freq and config.no_rope_freq[layer]:
            return x_NHD
        rotary = (options.rotations[layer] if options.rotations else None) or self._own
        rows, dims = len(x_NHD), int(x_NHD.shape[-1] * rotary.percent)
        factor = 1.0 if rotary is self._own else rotary.scaling.resolved_attention_factor
        if rotary.scaling.by_length:
            frequencies = frequencies_by_length(dims, rotary.base, rotary.scaling, torch.tensor([rows]))[0]
        else:
            frequencies = inverse_frequencies(dims, rotary.base, rotary.scaling)
        angles = torch.arange(rows).float()[:, None] * frequencies
        turned, passed = x_NHD[..., :dims], x_NHD[..., dims:]
        pairs = turned.unflatten(-1, (-1, 2) if config.rotary_interleaved else (2, -1))
        at = -1 if config.rotary_interleaved else -2
        # Cosines and sines are rounded to float32, as those of all models.
        turn = torch.complex(angles.cos() * factor, angles.sin() * factor)[:, None]
        after = torch.complex(pairs.select(at, 0), pairs.select(at, 1)) * turn
        return torch.cat((torch.stack((after.real, after.imag), at).flatten(-2), passed), -1)

    def _mlp(self, place: str, x: torch.Tensor) -> torch.Tensor:
        inner = self._linear(f"{place}mlp.linear_fc1", x)
        if self._config.gated_linear_unit:
            gate, up = inner.chunk(2, dim=-1)
            return self._linear(f"{place}mlp.linear_fc2", self._config.activation_func(gate) * up)
        return self._linear(f"{place}mlp.linear_fc2", self._config.activation_func(inner))
