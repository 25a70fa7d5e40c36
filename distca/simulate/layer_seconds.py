"""Predicts the seconds per row of a layer on one GPU, without core attention.

The *core* of a layer is core attention or, in a recurrent layer, the recurrence with its convolution. Before the core
come a norm and the input projection, behind it the output projection and the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

from distca.models.layer_bytes import Recompute
from distca.models.shape import LayerKind, ModelShape
from distca.plan.cost.linear import LayerWork, LinearRate, NonAttention, between_attentions
from distca.plan.cost.recurrent import core_weights
from distca.plan.recurrence import Recurrence
from distca.simulate.rates import Rates

_FORWARD, _BACKWARD = 0.4, 0.6
"""Forward's and backward's parts of the time of elementwise kernels, such as norms and SwiGLU."""
_KEPT = 0.21
"""The part of elementwise kernels' time that backward does not need where outputs of norms and SwiGLU are kept. That
is 13.4 ms for 65,536 rows in four layers of the 8B shape (benchmarks/results/dense_beside_d1a4203.json)."""


@dataclass(frozen=True)
class RowSeconds:
    """Seconds of one row on one GPU in one layer.

    Attributes:
        pre_forward: the part before the core.
        post_forward: the part behind the core, without experts.
        pre_backward, post_backward: the backward of these parts, with recomputation.
        experts_forward, experts_backward: experts, in layers that have some.
    """

    pre_forward: float
    post_forward: float
    pre_backward: float
    post_backward: float
    experts_forward: float
    experts_backward: float


@dataclass(frozen=True)
class CoreSeconds:
    """Seconds of one row on one GPU in a recurrent core.

    Attributes:
        forward: the recurrence in forward. The summary of a piece takes as long, and so do gradients of states.
        backward: the recurrence in backward.
        convolution: the convolution; it is computed once in forward and twice in backward.
        convolution_backward: the gradients of the convolution.
    """

    forward: float
    backward: float
    convolution: float
    convolution_backward: float

    @property
    def whole_forward(self) -> float:
        """The forward of a row in a document that lies on one rank."""
        return self.convolution + self.forward

    @property
    def whole_backward(self) -> float:
        """The backward of a row in a document that lies on one rank."""
        return 2 * self.convolution + self.backward + self.convolution_backward


@dataclass(frozen=True)
class LayerSeconds:
    """The seconds of a pipeline stage's layers.

    Attributes:
        model: the model's shape.
        layers: number of the stage's layers, each with its MLP.
        tp: number of tensor-parallel ranks.
        recompute: the part that backward recomputes: "none", "mlp" or "all" but core attention.
        keep_outputs: whether outputs of norms and SwiGLU are kept for backward.
        linear: seconds of the layers' matrix products per row and weight, which may be in FP8.
        output: seconds of products in bfloat16 per row and weight.
        rates: further speeds of the GPU.
        gathered: seconds per row of one all-gather of the residual stream over tensor-parallel ranks.
    """

    model: ModelShape
    layers: int
    tp: int
    recompute: Recompute
    keep_outputs: bool
    linear: LinearRate
    output: LinearRate
    rates: Rates
    gathered: float

    @property
    def _kinds(self) -> tuple[LayerKind, ...]:
        return self.model.layer_kinds[: self.layers]

    def rows(self) -> tuple[RowSeconds, ...]:
        """Returns the seconds per row of each layer of the stage.

        In a model with recurrent layers every layer has its own seconds. In others all layers have the mean."""
        model = self.model
        if model.hybrid.pattern:
            by_kind = {kind: self._of_hybrid(kind) for kind in dict.fromkeys(self._kinds)}
            return tuple(by_kind[kind] for kind in self._kinds)
        routed, mlp = model.layer_kinds[-1].mlp.routed(model.hidden), model.mlp_weights - model.routed_weights
        ffn = sum(kind.mlp.ffn for kind in model.layer_kinds) // model.units
        return (self._row_seconds(*model.attention_weights, mlp, routed, ffn),) * self.layers

    def _of_hybrid(self, kind: LayerKind) -> RowSeconds:
        """Returns the seconds of a layer in a model with recurrent layers."""
        model, hybrid = self.model, self.model.hybrid
        first, second = model.attention_weights
        gated = model.heads * model.resolved_head_dim if hybrid.output_gate else 0
        if kind.recurrent:
            second, gated = hybrid.values * model.hidden, hybrid.values
            first = model.mixer_weights(kind) - second
        routed = kind.mlp.routed(model.hidden)
        return self._row_seconds(first, second, kind.mlp.weights(model.hidden) - routed, routed, kind.mlp.ffn + gated)

    def _row_seconds(self, first: int, second: int, mlp: int, routed: int, width: int) -> RowSeconds:
        """Returns the seconds of a layer from its sizes.

        Args:
            first: number of weights before the core.
            second: number of weights of the output projection.
            mlp: number of weights of the MLP or the shared expert.
            routed: number of weights of experts by which a row is multiplied.
            width: elements per row inside the layer, beside the residual stream.
        """
        model, rates, linear = self.model, self.rates, self.linear
        forward, backward = (rate * rates.linear_factor / self.tp for rate in (linear.forward, linear.backward))
        # With sequence parallelism recomputation repeats the all-gathers and reduce-scatters of rows too.
        gathered = self.gathered
        again_pre = forward * first + gathered if self.recompute == "all" else 0.0
        again_post = forward * {"none": 0, "mlp": mlp, "all": second + mlp}[self.recompute]
        again_post += gathered * {"none": 0, "mlp": 2, "all": 3}[self.recompute]
        small = rates.elementwise_s * (2 * model.hidden + width) / self.tp
        # Choosing experts, sorting rows and adding up outputs take about 0.3 of one pass over the experts' inputs
        # (traces in benchmarks/results/experts_a3b_cut_2_gpus.json and experts_a3b_cut_4_gpus.json).
        wide = 0.3 * model.hidden + 0.7 * model.experts.ffn
        of_experts = rates.elementwise_s * model.experts.topk * wide * (routed > 0) / self.tp
        around, inside = 0.3 * small, 0.7 * small
        elementwise_backward = _BACKWARD - _KEPT * self.keep_outputs
        of_forward = forward * routed + _FORWARD * of_experts
        return RowSeconds(
            pre_forward=forward * first + _FORWARD * around + gathered,
            post_forward=forward * (second + mlp) + _FORWARD * inside + 3 * gathered,
            pre_backward=backward * first + elementwise_backward * around + again_pre + gathered,
            post_backward=backward * (second + mlp) + elementwise_backward * inside + again_post + 3 * gathered,
            experts_forward=of_forward,
            experts_backward=backward * routed + _BACKWARD * of_experts + (self.recompute != "none") * of_forward,
        )

    def core(self, what: Recurrence) -> CoreSeconds:
        """Returns the seconds per row of a recurrent core with one GPU's heads."""
        weights, rates = core_weights(what), self.rates
        # The convolution reads its channels, and writes q and k once for each head of v.
        width = what.channels + what.heads * (2 * what.key_dim + what.value_dim)
        return CoreSeconds(
            rates.linear_factor * weights.forward * self.output.forward,
            rates.linear_factor * weights.backward * self.output.backward,
            _FORWARD * rates.elementwise_s * width,
            _BACKWARD * rates.elementwise_s * width,
        )

    def non_attention(self) -> NonAttention:
        """Returns the seconds beside core attention, as plans with ``level_time`` count them."""
        attending = [kind for kind in self._kinds if not kind.recurrent]
        return between_attentions(self.linear, [self._work(kind) for kind in attending], self.tp)

    def _work(self, kind: LayerKind) -> LayerWork:
        """Returns the work of a layer with attention; without recurrent layers it is the mean over all layers."""
        model, hybrid = self.model, self.model.hybrid
        mlp, weights = model.mlp_weights, model.layer_weights
        if hybrid.pattern:
            mlp = kind.mlp.weights(model.hidden)
            weights = model.mixer_weights(kind) + mlp
        recomputed = {"none": 0, "mlp": mlp, "all": weights}[self.recompute]
        return LayerWork(weights, recomputed)
