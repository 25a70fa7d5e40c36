"""The public class :class:`CAD`: core attention disaggregation in a Megatron-Core training script.

*Core attention* is attention without its projections. It takes time in proportion to the square of a document's length,
so ranks with equally many tokens take unequal times. CAD plans every step so that ranks compute parts of each other's
core attention: q, k and v of some tokens travel to other ranks, and outputs come back.

    distca.join_world()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    cad = distca.CAD(config, tokens_per_rank=131072)
    model = GPTModel(config, cad.block_spec(), vocabulary, length, position_embedding_type="rope")
    model = cad.data_parallel(cad.attach(model).to(cad.device))
    for step in cad.plan_ahead(steps):
        reports = cad.forward_backward(step, forward_step, model)
        optimizer.step()

``examples/own_training_loop.py`` is a whole script, and docs/own_script.md explains it.

Servers without a model are optional further processes, which compute core attention for the ranks with the model.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils import unwrap_model

from distca.cluster.agreement import on_all_ranks
from distca.data.batch import Document
from distca.errors import SupportError
from distca.plan import PlanOptions
from distca.runtime.pool_messages import PoolTerms, Served
from megatron_patches.arguments import CadArguments, check_keep_outputs, with_keywords_of
from megatron_patches.attach import change_model, check_attachable
from megatron_patches.experts.balance import LayerLoad
from megatron_patches.experts.layer import note_trained_experts
from megatron_patches.experts.lost_step import remember
from megatron_patches.experts.spec import has_experts
from megatron_patches.layers.block import block_spec, refuse_other_schedule
from megatron_patches.layers.self_check import check_layers
from megatron_patches.model.layer_kinds import LayerKinds
from megatron_patches.patches.fused_ops import accumulate_weight_gradients_in_products, fuse_rotation
from megatron_patches.patches.gpt_forward import check_attached, check_unwrapped
from megatron_patches.pool import attention_spec, join_pool
from megatron_patches.ranks.remote_servers import RemoteServers
from megatron_patches.steps.per_document import gather_documents
from megatron_patches.steps.plan_options import plan_options
from megatron_patches.steps.step import Step, Taker, make_step
from megatron_patches.steps.step_documents import StepDocuments, check_room, listed
from megatron_patches.steps.steps_ahead import AgreedSteps
from megatron_patches.support.config_fields import check_config, check_megatrons_recomputation, check_types
from megatron_patches.support.hybrid import check_hybrid, warn_of_recurrent_layers
from megatron_patches.support.latent import check_latent
from megatron_patches.support.layer_spec import check_layer_spec, has_te_linears
from megatron_patches.support.model_options import check_model_options
from megatron_patches.support.ranks import check_groups, check_same_frozen, check_same_on_ranks
from megatron_patches.support.servers import check_with_servers
from megatron_patches.support.trained_weights import (
    check_fp8_weights,
    check_gradients,
    check_trained_biases,
    check_weights_before,
)
from megatron_patches.te.choice import refuse_te_spec, use_te
from megatron_patches.training.pipeline_schedule import run_ticks
from megatron_patches.training.readiness import check_ready, known_ids, made_ready, note_trained
from megatron_patches.training.training_step import (
    ForwardStep,
    log_probabilities_step,
    run_schedule,
    wrap_for_data_parallel,
)
from megatron_patches.versions import check_version, drop_log_lines

Model = TypeVar("Model", bound=LanguageModule)


class CAD:
    """Core attention disaggregation on this rank, for one or more models with the same configuration.

    All ranks create the object together, after ``distca.join_world()`` and
    ``parallel_state.initialize_model_parallel``, and before a model is built.

    Args:
        config: the models' configuration. CAD may change its ``gradient_accumulation_fusion``, ``no_sync_func``,
            ``deallocate_pipeline_outputs``, ``disable_parameter_transpose_cache``, ``fused_single_qkv_rope`` and
            ``finalize_model_grads_func``.
        keywords: the fields of :class:`megatron_patches.arguments.CadArguments`.

    Attributes:
        options: the options of the planner.
        pool: this rank's attention kernel, transport between ranks, and record of times.
        folder: the folder for the file that is written if the planner fails; by default the working directory.

    Raises:
        SupportError: a field of the configuration or an argument is not supported; or Transformer Engine's linear
            layers give wrong products on this machine.
        KernelError, TransportError: the attention kernel or the transport between ranks cannot run here, or gives wrong
            results.
        PlanError: ``cost_table``, ``speeds``, ``ranks_per_node`` or ``level`` is not usable here.
        LaunchError: a server without a model did not come, or has ended.
        VersionError: the installed Megatron-Core is not supported.
    """

    @with_keywords_of(CadArguments)
    def __init__(self, config: TransformerConfig, given: CadArguments) -> None:
        on_all_ranks(partial(_check, config, given))
        drop_log_lines()
        check_same_on_ranks(config, given.alike)
        self.config, self._given = config, given
        self._stages = parallel_state.get_pipeline_model_parallel_world_size()
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._rank = parallel_state.get_data_parallel_rank()
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        warn_of_recurrent_layers(config, given.hybrid_layer_pattern, self.device)
        how = given.how(self._stages)
        self._te = use_te(given.linears, config, self.device)
        self._kinds = LayerKinds.of(config, given.model_options.score_softcap, given.hybrid_layer_pattern)
        check_layers(config, self.device, self._te)
        self._remote = None
        if given.servers:
            check_with_servers(config, given.offload)
            tp = config.tensor_model_parallel_size
            self._remote = RemoteServers(given.servers, tp, given.transport, self.device)
        self._how = how
        self.pool = join_pool(config, self._kinds, self.device, given, how, self._remote)
        self.options = self._options_with(given)
        if self._remote is not None:
            self._servers_at_first = self._remote.numbers
            self._remote.begin(self._terms())
        self._last: tuple[Step, Step] | None = None  # the last step: as forward_backward got it, and as it ran
        self.folder = Path()
        self._ahead: AgreedSteps | None = None
        self._single_steps = 0
        self._steps_begun: set[bool] = set()  # values of forward_only with which steps began since the last attach
        self._lengths = False
        self._vocabulary: int | None = None
        accumulate_weight_gradients_in_products()
        config.gradient_accumulation_fusion = True
        config.deallocate_pipeline_outputs = self._stages > 1
        if given.recompute == "all":
            # Else Transformer Engine keeps FP8 copies of all weights until backward.
            config.disable_parameter_transpose_cache = True
        if not given.own_layers(config):
            fuse_rotation(config)

    def _options_with(self, given: CadArguments) -> PlanOptions:
        return plan_options(self.config, self._kinds, self.pool.kernel, self.device, given, self._how, self._remote)

    def _terms(self) -> PoolTerms:
        spec = attention_spec(self.config, self._kinds, self.device, self._given)
        # layers: the numbers, from 0, of a stage's layers with attention, which are the same in every stage; empty if
        # no layer of the model is recurrent.
        of_stage = self._kinds.recurrences[: len(self._kinds.recurrences) // self._stages]
        layers = tuple(number for number, recurrence in enumerate(of_stage) if recurrence is None)
        return PoolTerms(self.options, spec, self._how, layers)

    def _terms_of_change(self) -> PoolTerms:
        """Sets the planner's options for the servers without a model that are present now; returns :meth:`_terms`."""
        assert self._remote is not None
        tp = self.config.tensor_model_parallel_size
        present = self._given.with_servers(self._remote.numbers, self._servers_at_first, self.options.homes, tp)
        self.options = self._options_with(present)
        return self._terms()

    @property
    def te_linears(self) -> bool:
        """Whether the model gets Transformer Engine's linear layers instead of Megatron's own."""
        return self._te

    @property
    def stage(self) -> int:
        """This rank's pipeline stage."""
        return self._stage

    @property
    def rank(self) -> int:
        """This rank's data-parallel rank."""
        return self._rank

    @property
    def pool_rank(self) -> int:
        """This rank's number among the data-parallel ranks of all pipeline stages."""
        return self.options.pool_rank(self._stage, self._rank)

    def hybrid_stack_spec(self) -> ModuleSpec:
        """Returns the spec with which to build a HybridModel.

        Raises:
            SupportError: CAD was made without ``hybrid_layer_pattern``.
        """
        if not self._given.hybrid_layer_pattern:
            raise SupportError(
                "CAD was made without hybrid_layer_pattern, for a GPTModel: give CAD the pattern of the HybridModel."
            )
        from megatron_patches.layers.hybrid_stack import hybrid_stack_spec

        return hybrid_stack_spec(self.config, options=self._given.model_options, te=self._te)

    def block_spec(self, layer: ModuleSpec | None = None) -> TransformerBlockSubmodules:
        """Returns the spec with which to build a GPTModel.

        Args:
            layer: Megatron's spec of a layer without experts, "local" or Transformer Engine's; None takes the local
                spec. The configuration's experts take the place of its MLP. If CAD chose Transformer Engine's linear
                layers, these replace the linear layers of a local spec.

        Raises:
            SupportError: the spec is for layers that are not supported; the spec has Transformer Engine's linear
                layers, but CAD chose Megatron's own; or CAD was made with ``hybrid_layer_pattern``.
        """
        if self._given.hybrid_layer_pattern:
            raise SupportError(
                "CAD was made with hybrid_layer_pattern, for a HybridModel: build one with its hybrid_stack_spec."
            )
        if layer is not None:
            check_layer_spec(layer)
            if has_te_linears(layer) and not self._te:
                refuse_te_spec(self.config, self.device)
        options = self._given.model_options
        return block_spec(self.config, layer, options=options, disaggregate=self._given.disaggregate, te=self._te)

    def attach(self, model: Model) -> Model:
        """Changes a model in place so that it runs steps of this CAD, and returns it; all ranks call this together.

        Args:
            model: a GPTModel built with :meth:`block_spec`, or a HybridModel built with :meth:`hybrid_stack_spec`.
                Subclasses are allowed.

        Raises:
            SupportError: the model is of another class, attached already or not built with this CAD's configuration; a
                part of the model is not supported; or another rank refuses its model.
        """
        on_all_ranks(partial(check_attachable, model, self.config, self._given, self._kinds))
        self._steps_begun.clear()
        change_model(model, self.config, self._given, self.pool)
        # Any attached model may run a step. So steps carry documents' lengths if any model's RoPE depends on them, and
        # token ids must be below the smallest vocabulary.
        self._lengths |= model.rotary_pos_emb.needs_lengths
        self._vocabulary = min(self._vocabulary or known_ids(model), known_ids(model))
        return model

    def data_parallel(
        self, model: GPTModel, *, distributed_optimizer: bool = True, gradients: torch.dtype = torch.float32
    ) -> DistributedDataParallel:
        """Returns Megatron's DistributedDataParallel around an attached model that is on this rank's device.

        All ranks call this method together. Weights become bfloat16 if the configuration says so. Then ranks that hold
        the same weights all get the values of the first of these ranks. Ranks reduce gradients during backward; in the
        first step, and with pipeline stages, after backward.

        Args:
            model: from :meth:`attach`.
            distributed_optimizer: whether the optimizer's state is sharded over data-parallel ranks.
            gradients: the dtype in which gradients are added up and reduced: torch.float32, or for bfloat16 weights
                also torch.bfloat16, which takes half the memory and rounds after every addition.

        Raises:
            SupportError: the model was not attached, is on another device or wrapped already; a dtype is not supported;
                ``distributed_optimizer`` is False, and weights are in FP8 only (the configuration's ``fp8_param``);
                ranks froze different weights; or the bias of a frozen weight is trained, where Megatron computes no
                gradient of the bias.
        """

        def check() -> None:
            check_attached(model)
            check_unwrapped(model)
            check_weights_before(model, self.config.params_dtype, self.device)
            check_gradients(gradients, self.config.params_dtype)
            check_fp8_weights(self.config, distributed_optimizer)

        on_all_ranks(check)
        check_same_frozen(model)
        on_all_ranks(partial(check_trained_biases, model))
        note_trained_experts(model)
        wrapped = wrap_for_data_parallel(model, distributed_optimizer, gradients)
        if self._stages > 1 and self._given.disaggregate:
            wrapped.config.no_sync_func = refuse_other_schedule
        return wrapped

    def plan_step(self, documents: StepDocuments | Sequence[Sequence[Document]]) -> Step:
        """Plans one step and copies this rank's tokens to the device; all ranks call this method together.

        Args:
            documents: for each micro-batch the list of documents of all data-parallel ranks, equal on all ranks. A
                document is anything with a length and slices of token ids. A rank reads the ids of its own tokens. It
                also reads up to 16 ids of up to 8 documents, to check that ranks have equal documents.

        Raises:
            PlanError: documents, homes or weights are not as ``StepDocuments`` says; documents have more tokens than
                ``tokens_per_rank`` allows, or none; a document is cut although ``disaggregate`` is False; ranks have
                different documents or plans; or another rank could not make the step.
            DataError: a token id is no whole number, or not one of the model's.
        """
        self._single_steps += 1
        with closing(self.plan_ahead([documents], self._single_steps)) as ahead:
            return next(ahead)

    def plan_ahead(
        self, steps: Iterable[StepDocuments | Sequence[Sequence[Document]]], first: int = 1
    ) -> Generator[Step, None, None]:
        """Yields steps, each planned in a background thread while the caller runs the previous step.

        All ranks call this method together, and leave a loop over steps together. Loops may be nested, for example
        validation inside training. The thread also reads ``steps``. After a loop that ended early, it may have read the
        next item. If reading ``steps`` communicates between ranks, this needs a process group that the caller does not
        use. In a shared group, the calls of both threads would mix, and ranks would wait forever.

        Args:
            steps: the documents of every step, in the form that :meth:`plan_step` takes.
            first: number of the first step, for messages; the same on every rank.

        Raises:
            PlanError, DataError: for the reasons that :meth:`plan_step` lists.
            FailedPlanError: the planner failed with an unexpected error. The message names the file, if it could be
                written, from which the command ``distca plan`` plans the step again.
        """
        if self._ahead is None:
            self._ahead = AgreedSteps(self.device)
        return self._ahead.ahead((self._make_step(*each) for each in enumerate(steps, first)), first)

    def _make_step(
        self, number: int, documents: StepDocuments | Sequence[Sequence[Document]], dealt: bool = False
    ) -> Step:
        """Plans step ``number``. With ``dealt``, no document moves to another micro-batch."""
        documents, given = listed(documents), self._given
        check_room(documents, self.options.ranks, given.tokens_per_rank)
        return make_step(
            documents,
            self.options,
            Taker(self._stage, self._rank, self.device, self._lengths, self._vocabulary, self._kinds.recurrences),
            room=self.options.ranks * given.tokens_per_rank if given.deal and given.disaggregate and not dealt else 0,
            number=number,
            folder=self.folder,
            remote=self._remote,
        )

    def forward_backward(
        self, step: Step, forward_step: ForwardStep, model: DistributedDataParallel, *, forward_only: bool = False
    ) -> list[Any]:
        """Runs forward and backward of a step.

        Backward begins with zero gradients. At the end, the gradients that this rank's optimizer reads are sums over
        all ranks, divided by the number of the global batch's target tokens.

        Args:
            step: from :meth:`plan_ahead` or :meth:`plan_step`.
            forward_step: function with two arguments, an iterator over this rank's batches and the model. It returns
                the model's output and a loss function. From the output the loss function computes three values: the
                summed loss, the number of target tokens as an int tensor, and a report of any type.
            model: from :meth:`data_parallel`; with ``forward_only`` also from :meth:`attach`.
            forward_only: whether to leave out backward.

        Raises:
            SupportError: the model was not attached to this CAD, or has changed since; the model was wrapped for a
                distributed optimizer, but trained with an optimizer that is not distributed; torch.autocast is on, or
                in training torch.inference_mode or torch's anomaly detection with its check for nan; a CAD with other
                options planned the step; or ``forward_step`` or the loss function returned values of another form.
            TransportError: rows do not fit NVSHMEM's memory, and ``transport`` allows no other way.
            PlanError: after a server without a model left or came, the step could not be planned again.
            LaunchError: after a server without a model left or came, the pool could not form again.

        Returns:
            The loss function's reports, by micro-batch; empty on stages without the loss.
        """
        given = step
        # If a server without a model is lost during the step, the step runs again without this server.
        while True:
            step = self._with_present_servers(step)
            check = partial(check_ready, model, step, self.pool, self.options, forward_only=forward_only)
            # In the first step all ranks raise an error if one rank refuses. Later steps do without this, because
            # ranks would wait for each other's answers.
            check() if forward_only in self._steps_begun else on_all_ranks(check)
            self._steps_begun.add(forward_only)
            counted = made_ready(model, step, forward_step, forward_only=forward_only)
            put_back = None if self._remote is None else remember(unwrap_model(model))
            reports = self._run(step, counted, model, forward_only)
            if self._remote is None or put_back is None or self._remote.is_served():
                break
            put_back()
            self.pool.timeline.take_serves()  # the step is repeated, and its seconds count once
        if self._remote is not None:
            self._last = given, step
        if not forward_only:
            note_trained(model)
        step.queued()
        return reports

    def _with_present_servers(self, step: Step) -> Step:
        if self._remote is None:
            return step
        if self._remote.wants_change():
            self._remote.change(self._terms_of_change)
        if not isinstance(step, Step) or step.generation == self._remote.generation:
            return step  # the check of the model and the step refuses what is no Step
        again = on_all_ranks(partial(self._make_step, 0, step.documents, dealt=True))
        return replace(again, waited_ms=step.waited_ms, queued=step.queued)

    def _run(self, step: Step, counted: ForwardStep, model: DistributedDataParallel, forward_only: bool) -> list[Any]:
        if self._remote is not None:
            timeline = self.pool.timeline
            self._remote.run(step.announced, step.plan, forward_only, timeline.zero if timeline.recording else None)
        if self._stages > 1 and step.routes is not None:
            return run_ticks(model, step.batches, counted, step.plan, step.routes, self.pool, forward_only=forward_only)
        return run_schedule(model, step.batches, counted, forward_only=forward_only)

    @property
    def servers(self) -> tuple[int, ...]:
        """The numbers of the servers without a model that are present now."""
        return () if self._remote is None else self._remote.numbers

    @property
    def device_count(self) -> int:
        """The number of GPUs of all ranks and present servers. A process on a CPU counts as one."""
        return dist.get_world_size() + (0 if self._remote is None else self._remote.device_count)

    def as_run(self, step: Step) -> Step:
        """Returns the step that the last :meth:`forward_backward` ran; ``step`` must be what that call got.

        If servers without a model left or joined after ``step`` was planned, the result is a new plan of the same
        documents.

        Raises:
            SupportError: there are servers without a model, and the last :meth:`forward_backward` had another step.
        """
        if self._remote is None:
            return step
        if self._last is None or all(step is not each for each in self._last):
            raise SupportError(
                "The step is not the one that the last forward_backward ran. How a step ran is known only until the "
                "next step runs: ask before that."
            )
        return self._last[1]

    def log_probabilities(self, step: Step, model: DistributedDataParallel) -> list[list[torch.Tensor]]:
        """Returns the log-probabilities of all documents' tokens, on all ranks of the stage with the loss.

        All ranks call this method together.

        Returns:
            For each micro-batch of ``step.documents`` a list with one tensor [n - 1] for each document of n tokens.
            Element i is the log-probability of token i + 1, given tokens 0 to i; in float64 for a float64 model, else
            in float32. Stages without the loss return an empty list.
        """
        values = self.forward_backward(step, log_probabilities_step, model, forward_only=True)
        return [[each[:-1] for each in documents] for documents in gather_documents(self.as_run(step), values)]

    def let_server_go(self, number: int) -> None:
        """Makes all later steps run without server ``number`` of :attr:`servers`; all ranks call this method together.

        With tensor parallelism, servers leave together, one for each tensor-parallel rank.

        Raises:
            SupportError: there is no such server, or servers cannot leave on this type of device.
        """
        if self._remote is None or number not in self.servers:
            raise SupportError(f"There is no server {number}; the numbers of the present servers are {self.servers}.")
        self._remote.let_go(number)

    def served(self, step: Step) -> list[Served | None] | None:
        """Waits for reports of the servers without a model on ``step``: their seconds of attention, and their memory.

        Returns:
            On rank 0 a list with the report of each server, or None for a server that has left. None on other ranks,
            and without such servers.

        Raises:
            SupportError: the last :meth:`forward_backward` had another step.
        """
        self.as_run(step)
        return None if self._remote is None else self._remote.served()

    def server_timelines(self) -> dict[int, list[dict[str, Any]]]:
        """Ends the recording of times on servers without a model; returns the recorded spans by server number.

        Servers record while ``pool.timeline`` of rank 0 does. Ranks other than 0 return an empty dict.
        """
        return {} if self._remote is None else self._remote.timelines()

    def expert_loads(self, model: DistributedDataParallel) -> dict[int, LayerLoad]:
        """Returns how tokens were spread over experts in all training since the last call of this method.

        The keys are the numbers of this stage's layers with experts. Layers are numbered from 1 in the whole model. All
        ranks of the stage get equal results. Megatron's own figures, such as those of ``track_moe_metrics``, are
        missing or 0, and a warning says so.
        """
        loads: dict[int, LayerLoad] = unwrap_model(model).expert_load.take()
        return loads


def _check(config: TransformerConfig, given: CadArguments) -> None:
    """Checks a configuration and the arguments of :class:`CAD` on this rank alone."""
    check_version()
    given.check()
    check_groups(config)
    check_config(config)
    check_types(config)
    if not given.own_layers(config):
        check_megatrons_recomputation(config)
    if not given.hybrid_layer_pattern:
        has_experts(config)
    if given.keep_outputs:
        check_keep_outputs(given.recompute, config)
    check_hybrid(config, given.hybrid_layer_pattern, given.model_options, given.disaggregate, given.offload)
    check_model_options(given.model_options, config)
    check_latent(config, given)
