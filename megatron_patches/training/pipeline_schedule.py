"""The pipeline schedule of models whose core attention is computed by the ranks of all stages together.

In a *phase* all stages run forward, or all run backward; each stage runs one micro-batch or none. All stages run their
layer i at the same time, and share the core attention of these layers. A stage without a micro-batch only *serves*: it
computes core attention for other stages.

A *tick* is a forward phase, then a backward phase. With p stages, the first p − 1 ticks have no backward phase, and the
last p − 1 have no forward phase. Stage s runs the forward of micro-batch m in tick m + s, and its backward in tick
m + 2(p − 1) − s; stages, micro-batches and ticks are counted from 0. Stage s holds activations of at most
2(p − 1 − s) + 1 micro-batches.

All ranks must start all transfers in the same order, so that no rank waits for another forever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.schedules import backward_step, deallocate_output_tensor
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import unwrap_model

from distca.plan import StepPlan
from distca.recurrent import CoreParameters
from distca.runtime import AttentionPool
from distca.runtime.device_routes import StepRoutes
from distca.runtime.empty_layers import (
    AnyEmptyLayer,
    EmptyLayer,
    EmptyRecurrentLayer,
    serve_backward,
    serve_forward,
)
from megatron_patches.layers.units import units_in
from megatron_patches.steps.cost_models import attention_shape
from megatron_patches.steps.device_batch import Batch
from megatron_patches.training.training_step import ForwardStep

# Earlier versions of Megatron need the model's type as an argument.
_MODEL_TYPE = (ModelType.encoder_or_decoder,) if "model_type" in signature(backward_step).parameters else ()


def run_ticks(
    model: DistributedDataParallel,
    batches: Sequence[Batch],
    forward_step: ForwardStep,
    plan: StepPlan,
    routes: StepRoutes,
    pool: AttentionPool,
    *,
    forward_only: bool = False,
) -> list[Any]:
    """Runs forward and backward of a global batch over all stages; every rank with a model must call this function.

    After backward, gradients are reduced over ranks and divided by the number of tokens whose loss counts.

    Args:
        model: this stage's part of the model, from ``wrap_for_data_parallel``, or unwrapped with ``forward_only``.
        batches: this data-parallel rank's micro-batches; the same on all stages.
        forward_step: Megatron's forward_step_func(data iterator, model), which runs one micro-batch.
        plan: the plan of all ranks, with the micro-batch of each stage in each phase.
        routes: the rows of q, k, v and outputs that this rank sends and receives in each phase.
        pool: this rank's attention kernel, and the transport to the ranks that share core attention.
        forward_only: True leaves out backward.

    Returns:
        The loss function's reports, by micro-batch; empty on stages other than the last.
    """
    model.set_is_first_microbatch()  # Transformer Engine must quantise the new weights
    stage = _Stage(model, batches, forward_step, routes, pool)
    with stage.running():
        for direction, number in plan.order():
            if direction == "forward":
                stage.forward_phase(number, plan, forward_only)
            elif not forward_only:
                stage.backward_phase(number, plan)
    if not forward_only:
        config = unwrap_model(model).config
        config.finalize_model_grads_func([model], stage.tokens)
    return stage.reports


class _Stage:
    """The activations and transfers of one rank between phases."""

    def __init__(
        self,
        model: DistributedDataParallel,
        batches: Sequence[Batch],
        forward_step: ForwardStep,
        routes: StepRoutes,
        pool: AttentionPool,
    ) -> None:
        self._model, self._batches, self._routes, self._pool = model, batches, routes, pool
        self._forward_step = forward_step
        self._gpt = unwrap_model(model)
        self._config = self._gpt.config
        self._number = parallel_state.get_pipeline_model_parallel_rank()
        self._last = parallel_state.get_pipeline_model_parallel_world_size() - 1
        self._inputs: dict[int, torch.Tensor | None] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._activations, self._gradients = StageTransfer(None, None, []), StageTransfer(None, None, [])
        device = batches[0].tokens.device
        group = parallel_state.get_pipeline_model_parallel_group()
        self._neighbours = Neighbours(group, self._config.pipeline_dtype, device)
        self.tokens = torch.zeros((), dtype=torch.int32, device=device)
        self.reports: list[Any] = []
        units = units_in(self._gpt.decoder.layers)
        self._layers = len(units)
        self._empties = [_empty_layer(unit.mixer, self._config, device) for unit in units]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Lets the model's ``decoder`` run, which refuses to run outside of this context."""
        block = self._gpt.decoder
        block.in_phases = True
        try:
            with self._recorded():
                yield
        finally:
            block.in_phases = False

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Records what follows the layers in forward, as "head". On the last stage this is output layer and loss."""
        timeline, top = self._pool.timeline, self._layers - 1
        if not timeline.recording:
            yield
            return
        hook = self._gpt.decoder.register_forward_hook(lambda *_: timeline.open("head", top, 0, "forward"))
        try:
            yield
        finally:
            hook.remove()

    def forward_phase(self, number: int, plan: StepPlan, forward_only: bool) -> None:
        running = plan.forward[number].micro_batches
        received, output = self._activations.wait(), None
        micro_batch = running[self._number]
        if micro_batch is not None:
            output = self._forward(micro_batch, received, forward_only)
        served = self._routes.served_forward[number]
        if served is not None:
            serve_forward(self._pool, served, self._empties)
        incoming = self._number > 0 and running[self._number - 1] is not None
        sent = output if self._number < self._last else None
        self._activations = self._neighbours.start(
            1, sent, self._shape(running[self._number - 1]) if incoming else None
        )
        if output is not None and not forward_only:
            deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs and sent is not None)

    def backward_phase(self, number: int, plan: StepPlan) -> None:
        running = plan.backward[number].micro_batches
        micro_batch = running[self._number]
        received, sent = self._gradients.wait(), None
        served = self._routes.served_backward[number]
        if served is not None:
            serve_backward(self._pool, served, self._empties)
        if micro_batch is not None:
            gradient = self._backward(micro_batch, received)
            sent = gradient if self._number else None
        incoming = self._number < self._last and running[self._number + 1] is not None
        self._gradients = self._neighbours.start(-1, sent, self._shape(running[self._number + 1]) if incoming else None)

    def _forward(self, micro_batch: int, received: torch.Tensor | None, forward_only: bool) -> torch.Tensor:
        """Returns the stage's activations, or the loss on the last stage."""
        batch = self._batches[micro_batch]
        if received is not None:
            received.requires_grad_()
        self._gpt.set_input_tensor(received)
        self._pool.timeline.open("embed", 0, 0, "forward")
        with torch.set_grad_enabled(not forward_only):
            output, loss_function = self._forward_step(iter((batch,)), self._model)
            self._gpt.set_input_tensor(None)  # the model would hold the input until its next micro-batch
            if self._number == self._last:
                output, tokens, report = loss_function(output)
                self.tokens += tokens
                self.reports.append(report)
        self._pool.timeline.close()
        if not forward_only:
            self._inputs[micro_batch], self._outputs[micro_batch] = received, output
        return output

    def _backward(self, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the gradient of the stage's input; None on the first stage."""
        self._pool.timeline.open("head", self._layers - 1, 0, "backward", past_launches=True)
        gradient = backward_step(
            self._inputs.pop(micro_batch),
            self._outputs.pop(micro_batch),
            gradient,
            *_MODEL_TYPE,
            self._config,
        )
        self._pool.timeline.close()
        return gradient

    def _shape(self, micro_batch: int | None) -> tuple[int, int, int]:
        assert micro_batch is not None
        rows = self._batches[micro_batch].tokens.shape[1]
        shares = self._config.tensor_model_parallel_size if self._config.sequence_parallel else 1
        return rows // shares, 1, self._config.hidden_size


def _empty_layer(mixer: Any, config: TransformerConfig, device: torch.device) -> AnyEmptyLayer:
    """Returns a stand-in for a layer, for phases in which the stage only serves."""
    if hasattr(mixer, "recurrence"):
        given = mixer.core_parameters
        bias, skip = (each if each is None else each.detach() for each in (given.bias, given.skip))
        parameters = CoreParameters(given.kernel.detach(), bias, skip)
        return EmptyRecurrentLayer(mixer.recurrence, mixer.core_kernel, parameters, config.params_dtype, device)
    shape = attention_shape(config)
    return EmptyLayer(shape.heads, shape.kv_heads, shape.head_dim, config.params_dtype, device, shape.value_dim)


@dataclass(frozen=True)
class Neighbours:
    """Starts transfers of activations and gradients between this stage and its two neighbours.

    Attributes:
        group: Megatron's pipeline group: one rank of each stage, in the order of stages.
    """

    group: dist.ProcessGroup
    dtype: torch.dtype
    device: torch.device

    def start(self, step: int, sent: torch.Tensor | None, received_shape: tuple[int, ...] | None) -> StageTransfer:
        """Starts to send a tensor ``step`` stages forward, and to receive one from the stage ``step`` stages back.

        Args:
            step: 1 for activations, -1 for gradients.
            sent: a contiguous tensor; None sends nothing.
            received_shape: shape of the tensor to receive; None receives nothing.
        """
        me = dist.get_rank(self.group)
        operations, received = [], None
        if sent is not None:
            sent = sent.detach()  # this view keeps the memory after deallocate_output_tensor
            operations.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=me + step))
        if received_shape is not None:
            received = torch.empty(received_shape, dtype=self.dtype, device=self.device)
            operations.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=me - step))
        # Send and receive start together. If stages first waited for their sends, one transfer would follow another.
        return StageTransfer(sent, received, dist.batch_isend_irecv(operations) if operations else [])


@dataclass
class StageTransfer:
    """A transfer under way. It holds the sent tensor's memory until :meth:`wait`."""

    sent: torch.Tensor | None
    received: torch.Tensor | None
    works: list[Any]

    def wait(self) -> torch.Tensor | None:
        """Waits for the transfer and returns the received tensor. On a GPU the current stream waits, not the host."""
        for work in self.works:
            work.wait()
        self.sent, self.works = None, []
        return self.received
