"""The pipeline schedule of models whose core attention is computed by all stages together.

A tick is a forward phase of all stages, and then a backward phase of all stages. In a phase each stage runs one
micro-batch or none. All stages run their layer i at the same time, and share that layer's core attention. A stage
without a micro-batch only *serves*: it computes attention for other stages.

With p stages, stage s runs the forward of micro-batch m in tick m + s, and the backward in tick m + 2(p − 1) − s. M
micro-batches take M + p − 1 forward phases and as many backward phases. Stage s holds activations of at most 2(p − 1 −
s) + 1 micro-batches; Megatron's 1F1B holds those of p − s.

Activations travel to the next stage during the backward phase that follows. Gradients travel to the previous stage
during the next forward phase. All ranks start all exchanges in the same order, so that none waits for another forever.
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
from distca.runtime.idle_stage import (
    AnyEmptyLayer,
    EmptyLayer,
    EmptyRecurrentLayer,
    serve_backward,
    serve_forward,
)
from megatron_patches.layers.units import units_in
from megatron_patches.steps.plan_options import attention_shape
from megatron_patches.steps.step import Batch
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
    """Runs forward and backward of a global batch over all stages; every rank calls it.

    With backward, gradients are then reduced over ranks and divided by the number of target tokens (whose loss counts).

    Args:
        model: this stage's part of the model, from ``wrap_for_data_parallel``.
        batches: this rank's tokens, by micro-batch. All stages of a data-parallel rank have the same tokens.
        forward_step: runs the model on one micro-batch, with the arguments that Megatron's schedules give.
        plan: the plan of all ranks, with the micro-batch of each stage in each phase.
        routes: the rows of q, k, v and outputs that this rank sends and receives in each phase.
        pool: this rank's attention kernel, and the transport to the ranks that share core attention.
        forward_only: whether to leave out backward.

    Returns:
        The loss function's reports, by micro-batch; empty on stages other than the last.
    """
    model.set_is_first_microbatch()  # makes Transformer Engine's layers quantise the weights anew
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
    """One rank's state between phases: activations held for backward, and transfers under way."""

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
        # The next forward phase takes the activations, the next backward phase the gradients.
        self._activations, self._gradients = StageTransfer(None, None, []), StageTransfer(None, None, [])
        device = batches[0].tokens.device
        group = parallel_state.get_pipeline_model_parallel_group()
        self._neighbours = Neighbours(group, self._config.pipeline_dtype, device)
        self.tokens = torch.zeros((), dtype=torch.int32, device=device)
        self.reports: list[Any] = []
        units = units_in(self._gpt.decoder.layers)  # each has one mixer: attention or a recurrence
        self._layers = len(units)
        self._empties = [_empty_layer(unit.mixer, self._config, device) for unit in units]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Lets the model's TransformerBlock run until the context closes. At other times the module refuses to run."""
        block = self._gpt.decoder
        block.in_phases = True
        try:
            with self._recorded():
                yield
        finally:
            block.in_phases = False

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """Records when the output layer and the loss run, under the name "head", if the run records a timeline."""
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
        """Computes in forward phase ``number``, or only serves; then starts the activations' transfer."""
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
        """Computes in backward phase ``number``, or only serves; then starts the gradients' transfer."""
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
        """Runs forward of a micro-batch; returns the stage's activations, or the loss on the last stage."""
        batch = self._batches[micro_batch]
        if received is not None:
            received.requires_grad_()
        self._gpt.set_input_tensor(received)
        self._pool.timeline.open("embed", 0, 0, "forward")
        with torch.set_grad_enabled(not forward_only):
            output, loss_function = self._forward_step(iter((batch,)), self._model)
        self._gpt.set_input_tensor(None)  # frees the input and its gradient before the next micro-batch
        if self._number == self._last:
            output, tokens, report = loss_function(output)
            self.tokens += tokens
            self.reports.append(report)
        self._pool.timeline.close()
        if not forward_only:
            self._inputs[micro_batch], self._outputs[micro_batch] = received, output
        return output

    def _backward(self, micro_batch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Runs backward of a micro-batch; returns the gradient of the stage's input, None on the first stage."""
        # The start of a transfer ends other entries of the timeline, but the entry "head" goes on after it.
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
        """Returns the shape of a micro-batch's activations on this tensor-parallel rank."""
        assert micro_batch is not None
        rows = self._batches[micro_batch].tokens.shape[1]
        shares = self._config.tensor_model_parallel_size if self._config.sequence_parallel else 1
        return rows // shares, 1, self._config.hidden_size


def _empty_layer(mixer: Any, config: TransformerConfig, device: torch.device) -> AnyEmptyLayer:
    """Returns a stand-in without tokens for a layer, used in phases in which the stage only serves."""
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
        dtype: dtype of activations and gradients.
        device: device of activations and gradients.
    """

    group: dist.ProcessGroup
    dtype: torch.dtype
    device: torch.device

    def start(self, step: int, sent: torch.Tensor | None, received_shape: tuple[int, ...] | None) -> StageTransfer:
        """Starts to send a tensor to stage + ``step``, and to receive a tensor from stage - ``step``.

        Args:
            step: 1 for activations, -1 for gradients.
            sent: the contiguous tensor to send; None sends nothing. Its memory is held until
                :meth:`StageTransfer.wait`.
            received_shape: shape of the tensor to receive; None receives nothing.
        """
        me = dist.get_rank(self.group)
        operations, received = [], None
        if sent is not None:
            sent = sent.detach()  # this view keeps the memory when Megatron empties the original tensor
            operations.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=me + step))
        if received_shape is not None:
            received = torch.empty(received_shape, dtype=self.dtype, device=self.device)
            operations.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=me - step))
        # Both start together, so that stages cannot wait for each other in a circle.
        return StageTransfer(sent, received, dist.batch_isend_irecv(operations) if operations else [])


@dataclass
class StageTransfer:
    """A transfer under way, with the sent tensor until it is done."""

    sent: torch.Tensor | None
    received: torch.Tensor | None
    works: list[Any]

    def wait(self) -> torch.Tensor | None:
        """Waits for the transfer and returns the received tensor. On a GPU the current stream waits, not the host."""
        for work in self.works:
            work.wait()
        self.sent, self.works = None, []
        return self.received
