"""Seconds of a layer's row on one GPU: what comes before and behind core attention or a recurrent core, and the
recurrent core itself."""

from __future__ import annotations

from dataclasses import dataclass

from distca.models.layer_bytes import Recompute
from distca.models.shape import LayerKind, ModelShape
from distca.plan.cost.linear import LayerWork, LinearRate, NonAttention, between_attentions
from distca.plan.cost.recurrent import NO_CORE, core_weights
from distca.plan.recurrence import Recurrence
from distca.simulate.rates import Rates

_FORWARD, _BACKWARD = 0.4, 0.6
"""Shares of elementwise kernels' time: backward takes about half as long again as forward."""
_KEPT = 0.21
"""The share of elementwise kernels' time that backward is spared where outputs of norms and SwiGLU are kept: 13.4 ms
of 65,536 rows in four layers of the 8B shape (other kernels in benchmarks/results/dense_beside_d1a4203.json)."""


@dataclass(frozen=True)
class RowSeconds:
    """Seconds of one row on one GPU in one layer.

    Attributes:
        pre_forward: what comes before core attention, or before a recurrent core.
        post_forward: what comes behind it.
        pre_backward, post_backward: their backwards, with what they compute again.
        experts_forward, experts_backward: of experts, in layers that have some; what comes behind core attention has
            the mean over layers of all that is beside them.
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
        forward: of the core; a summary takes as long, and so does the gradient of a state alone.
        backward: of the core.
        convolution: of the convolution, which is computed in forward and twice more in backward.
        convolution_backward: of its gradients.
    """

    forward: float
    backward: float
    convolution: float
    convolution_backward: float

    @property
    def whole_forward(self) -> float:
        """The forward of a document that is one piece."""
        return self.convolution + self.forward

    @property
    def whole_backward(self) -> float:
        """The backward of a document that is one piece."""
        return 2 * self.convolution + self.backward + self.convolution_backward


@dataclass(frozen=True)
class LayerSeconds:
    """The seconds of the layers of a stage.

    Attributes:
        model: its shape.
        layers: of a stage, each with its MLP.
        tp: tensor-parallel ranks.
        recompute: what is computed again in backward.
        keep_outputs: whether outputs of norms and SwiGLU are kept for backward.
        linear: rate of the layers' matrix products.
        output: rate of products in bfloat16.
        rates: of the GPU.
        gathered: seconds of one all-gather of a row of the residual stream.
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
        """Seconds by layer of a stage. Layers of a hybrid stack are each of their kind. Of other models what comes
        behind core attention has the mean over all layers."""
        model = self.model
        if model.hybrid.pattern:
            by_kind = {kind: self._of_hybrid(kind) for kind in dict.fromkeys(self._kinds)}
            return tuple(by_kind[kind] for kind in self._kinds)
        routed, mlp = model.layer_kinds[-1].mlp.routed(model.hidden), model.mlp_weights - model.routed_weights
        ffn = sum(kind.mlp.ffn for kind in model.layer_kinds) // model.units
        return (self._row_seconds(*model.attention_weights, mlp, routed, ffn),) * self.layers

    def _of_hybrid(self, kind: LayerKind) -> RowSeconds:
        model, hybrid = self.model, self.model.hybrid
        first, second = model.attention_weights
        gated = model.heads * model.resolved_head_dim if hybrid.output_gate else 0
        if kind.recurrent:
            second, gated = hybrid.values * model.hidden, hybrid.values
            first = model.mixer_weights(kind) - second
        routed = kind.mlp.routed(model.hidden)
        return self._row_seconds(first, second, kind.mlp.weights(model.hidden) - routed, routed, kind.mlp.ffn + gated)

    def _row_seconds(self, first: int, second: int, mlp: int, routed: int, width: int) -> RowSeconds:
        """``first``, ``second``: weights before and behind the core; ``width``: elements of a row inside, beside the
        residual stream's."""
        model, rates, linear = self.model, self.rates, self.linear
        forward, backward = (rate * rates.linear_factor / self.tp for rate in (linear.forward, linear.backward))
        # What is computed again gathers and scatters its rows again.
        gathered = self.gathered
        again_pre = forward * first + gathered if self.recompute == "all" else 0.0
        again_post = forward * {"none": 0, "mlp": mlp, "all": second + mlp}[self.recompute]
        again_post += gathered * {"none": 0, "mlp": 2, "all": 3}[self.recompute]
        small = rates.elementwise_s * (2 * model.hidden + width) / self.tp
        # Choosing experts, sorting rows and scores, and sums take about as long as a pass over the experts' inputs
        # (traces of benchmarks/results/experts_a3b_cut_2_gpus.json).
        wide = model.hidden + 0.7 * model.experts.ffn
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
        """Seconds of a core with one GPU's heads."""
        weights, rates = core_weights(what), self.rates
        # The convolution reads its channels, and writes heads of q and k repeated for each head of v.
        width = what.channels + what.heads * (2 * what.key_dim + what.value_dim)
        return CoreSeconds(
            rates.linear_factor * weights.forward * self.output.forward,
            rates.linear_factor * weights.backward * self.output.backward,
            _FORWARD * rates.elementwise_s * width,
            _BACKWARD * rates.elementwise_s * width,
        )

    def non_attention(self) -> NonAttention:
        """The seconds that plans of phases level together with attention."""
        return between_attentions(self.linear, [self._work(kind) for kind in self._kinds], self.tp)

    def _work(self, kind: LayerKind) -> LayerWork:
        """The work of a layer of a hybrid stack; other models have the mean over their layers in each."""
        model, hybrid = self.model, self.model.hybrid
        mlp, weights = model.mlp_weights, model.layer_weights
        if hybrid.pattern:
            mlp = kind.mlp.weights(model.hidden)
            weights = model.mixer_weights(kind) + mlp
        recomputed = {"none": 0, "mlp": mlp, "all": weights}[self.recompute]
        core = core_weights(hybrid.recurrence(kind.recurrent)) if kind.recurrent else NO_CORE
        return LayerWork(not kind.recurrent, weights, recomputed, core)
