"""Runs the layers of baselines on simulated streams. Array legend: R data-parallel ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from distca.baselines import Mode
from distca.baselines.mode import BY_HEADS
from distca.simulate.baseline_attention import DealtAttention
from distca.simulate.baseline_recurrent import DealtCore, deal_core
from distca.simulate.experts import ExpertLayers
from distca.simulate.fabric import Exchange
from distca.simulate.job import Job
from distca.simulate.streams import Arrival, Streams

_CORE = -1
"""The number that stands for a recurrent layer, where kinds of attention are numbered from 0."""


class BaselineLayers:
    """Runs the layers of a pipeline stage on simulated streams.

    Args:
        job: the model, the cluster and the parallelism.
        mode: a baseline.
        streams: the streams of the stage's data-parallel ranks.
        hidden: True makes gathers and exchanges run beside the rest of a layer; ranks wait for them at its end.
        stage: number of the stage.

    Attributes:
        attention: [R] seconds of core attention so far.
    """

    def __init__(self, job: Job, mode: Mode, streams: Streams, hidden: bool = False, stage: int = 0) -> None:
        self._job, self._mode, self._streams, self._hidden = job, mode, streams, hidden
        self._late: list[Arrival] = []
        kinds = iter(job.layer_kinds[stage])
        self._kinds = [_CORE if recurrent else next(kinds) for recurrent in job.recurrent]
        self._experts = ExpertLayers(
            replace(job, hide_experts=False), streams, np.full(job.data_parallel, stage), hidden
        )
        self.attention = np.zeros(job.data_parallel)

    def forward(self, dealt: tuple[DealtAttention, ...], rows: np.ndarray) -> None:
        """Runs all layers forward; ``rows`` [R] are the rows of linear layers, which may count padding."""
        mixers = self._mixers(dealt)
        for layer, kind in enumerate(self._kinds):
            each = self._job.rows[layer]
            self._compute(rows * each.pre_forward, "pre", layer, "forward")
            self._mix_forward(mixers[kind], layer)
            rotation = 0.0 if kind == _CORE else self._job.rotation / 3
            self._compute(rows * (each.post_forward + rotation), "post", layer, "forward")
            self._run_experts(rows, layer, "forward")
            self._catch_up(layer)

    def backward(self, dealt: tuple[DealtAttention, ...], rows: np.ndarray) -> None:
        """Runs all layers backward; arguments as in :meth:`forward`."""
        mixers = self._mixers(dealt)
        for layer, kind in reversed(list(enumerate(self._kinds))):
            each, mixer = self._job.rows[layer], mixers[kind]
            if self._job.recompute == "all":
                # Megatron recomputes a layer as a whole, with core attention and its exchanges.
                self._mix_forward(mixer, layer)
            self._run_experts(rows, layer, "backward")
            rotation = 0.0 if kind == _CORE else self._job.rotation * 2 / 3
            self._compute(rows * (each.post_backward + rotation), "post", layer, "backward")
            if isinstance(mixer, DealtAttention):
                self._attend_backward(mixer, layer)
            else:
                self._recur(mixer.back, mixer.backward, mixer.there, layer, "backward")
            self._compute(rows * each.pre_backward, "pre", layer, "backward")
            self._catch_up(layer)

    def _mixers(self, dealt: tuple[DealtAttention, ...]) -> dict[int, DealtAttention | DealtCore]:
        mixers: dict[int, DealtAttention | DealtCore] = dict(enumerate(dealt))
        if _CORE in self._kinds:
            mixers[_CORE] = deal_core(self._job, self._mode.degree, dealt[0].rows)
        return mixers

    def _mix_forward(self, mixer: DealtAttention | DealtCore, layer: int) -> None:
        if isinstance(mixer, DealtAttention):
            self._attend_forward(mixer, layer)
        else:
            self._recur(mixer.there, mixer.forward, mixer.back, layer, "forward")

    def _recur(self, first: Exchange, seconds: np.ndarray, second: Exchange, layer: int, direction: str) -> None:
        self._exchange(first, "heads there", layer, direction)
        self._compute(seconds, "core", layer, direction)
        self._exchange(second, "heads back", layer, direction)

    def _run_experts(self, rows: np.ndarray, layer: int, direction: str) -> None:
        def nothing(nano: int) -> None:
            pass

        if layer in self._experts:
            self._late += self._experts.run([rows], [0], layer, direction, nothing, nothing)

    def _attend_forward(self, dealt: DealtAttention, layer: int) -> None:
        self._gather(dealt, layer, "forward")
        self._exchange(dealt.before, "q,k,v", layer, "forward")
        for number, block in enumerate(dealt.blocks):
            last = number + 1 == len(dealt.blocks)
            hop = None if last else self._streams.launch(dealt.hop, "hop", layer, 0, "forward")
            copies = dealt.copies / len(dealt.blocks)
            self._compute(copies + block.forward, "attention", layer, "forward")
            self.attention += block.forward
            if hop is not None:
                self._streams.join(hop, layer, 0, "forward")
        if self._mode.method in BY_HEADS:
            self._exchange(dealt.behind, "o", layer, "forward")

    def _attend_backward(self, dealt: DealtAttention, layer: int) -> None:
        if self._mode.method == "cp":
            self._gather(dealt, layer, "backward")
        if self._mode.method in BY_HEADS:
            self._exchange(dealt.behind, "dO", layer, "backward")
        for number, block in enumerate(dealt.blocks):
            last = number + 1 == len(dealt.blocks)
            # In a step keys and values travel on, and the gradients of the keys and values of earlier steps. The latter
            # are float32 and count as two hops. In the last step only gradients travel, to the rows' home.
            count = (2 if last else 3) if dealt.hop.travels else 0
            hops = [self._streams.launch(dealt.hop, "hop", layer, 0, "backward") for _ in range(count)]
            copies = 2 * dealt.copies / len(dealt.blocks)
            self._compute(copies + block.backward, "attention", layer, "backward")
            self.attention += block.backward
            for hop in hops:
                self._streams.join(hop, layer, 0, "backward")
        if self._mode.method in ("cp", "cp-keep", "cp-halo"):
            self._exchange(dealt.behind, "dk,dv", layer, "backward")
        self._exchange(dealt.before, "dq,dk,dv", layer, "backward")

    def _gather(self, dealt: DealtAttention, layer: int, direction: str) -> None:
        self._exchange(dealt.halo, "k,v", layer, direction)
        if not dealt.gather.any():
            return
        arrival = self._streams.collective(dealt.gather, dealt.gathered, self._mode.degree, "gather k,v", layer)
        if self._hidden:
            self._late.append(arrival)
        else:
            self._streams.join(arrival, layer)

    def _exchange(self, exchange: Exchange, what: str, layer: int, direction: str) -> None:
        if not exchange.travels:
            return
        arrival = self._streams.launch(exchange, what, layer, 0, direction)
        if self._hidden:
            self._late.append(arrival)
        else:
            self._streams.join(arrival, layer, 0, direction)

    def _catch_up(self, layer: int) -> None:
        late, self._late = self._late, []
        for arrival in late:
            self._streams.join(arrival, layer)

    def _compute(self, seconds: np.ndarray, name: str, layer: int, direction: str) -> None:
        self._streams.compute(seconds, name, layer, 0, direction)
