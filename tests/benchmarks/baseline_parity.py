"""Baselines held against unmodified Megatron-Core on one rank: same weights, same tokens, same loss and gradients; and
their core attention alone against direct attention in float64."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.baselines.groups import CpGroup, CpGroups
from benchmarks.baselines.prepare import Baseline
from distca import CAD
from distca.attention import Kernel
from distca.baselines.mode import Mode
from distca.cad_options import KernelName
from distca.data.batch import rank_batch
from distca.device.host_to_device import uploading
from distca.parity.cases import ParityCase, case_documents
from distca.parity.disaggregated import attached
from distca.parity.outcome import Difference, Outcome, difference
from distca.parity.unmodified import run_unmodified
from distca.plan import AttentionKind, AttentionShape
from distca.plan.sorting import expand
from distca.testing.reference_attention import packed_attention, relative_error
from megatron_patches.model.whole_parameters import gather_shares
from megatron_patches.ranks.groups import initialize_model_parallel
from megatron_patches.steps.device_batch import Batch, packed_batches
from megatron_patches.training.training_step import run_schedule, sum_over_ranks, summed_loss_step


@dataclass(frozen=True)
class BaselineCase:
    """A mode, the documents of its micro-batches and the group of each document."""

    mode: Mode
    case: ParityCase
    group_of: tuple[tuple[int, ...], ...]


def differences(
    cases: list[BaselineCase], dtype: torch.dtype, device: torch.device, kernel: KernelName
) -> list[Difference]:
    """How far each baseline is from unmodified Megatron-Core. Every rank calls it together."""
    # References first, so that megatron's groups change their sizes only once.
    references = [run_unmodified(each.case, dtype, device) for each in cases]
    found = []
    tp = 0
    for each, (reference, weights) in zip(cases, references, strict=True):
        initialize_model_parallel(each.case.tp, 1, each.case.seed)
        if each.case.tp != tp:
            tp, groups = each.case.tp, CpGroups(parallel_state.get_data_parallel_group())
        found.append(difference(_run(each, groups, dtype, device, kernel, weights), reference))
    return found


def _run(
    each: BaselineCase,
    groups: CpGroups,
    dtype: torch.dtype,
    device: torch.device,
    kernel: KernelName,
    weights: dict[str, torch.Tensor],
) -> Outcome:
    cad, gpt = attached(each.case, dtype, device, kernel, weights, disaggregate=False)
    model = cad.data_parallel(gpt, distributed_optimizer=False)
    model.zero_grad_buffer()
    total, tokens = sum_over_ranks(run_schedule(model, _batches(each, cad, groups), summed_loss_step), device)
    gradients = {name: gather_shares(name, p.main_grad, weights[name].shape) for name, p in gpt.named_parameters()}
    return Outcome((total / tokens).item(), gradients)


def _batches(each: BaselineCase, cad: CAD, groups: CpGroups) -> tuple[Batch, ...]:
    options, mode = cad.options, each.mode
    halos = {3} if each.case.pattern else ()  # Megatron's convolutions read four rows
    here = Baseline(mode, options.ranks, cad.rank, _group(mode, groups), options.cost.shape, halos=halos)
    rows, attention = [], []
    with uploading(cad.device) as upload:
        for documents, group_of in zip(case_documents(each.case), each.group_of, strict=True):
            lengths = np.array([len(document) for document in documents])
            made = here.prepare(lengths, np.array(group_of), upload)
            rows.append(rank_batch(documents, (made.layout,), cad.rank, align=options.align, chunks=options.shares))
            attention.append(made.attention)
        return packed_batches(rows, attention, options, upload)


def _group(mode: Mode, groups: CpGroups) -> CpGroup | None:
    return groups.of(mode.degree) if mode.degree > 1 else None


def attention_errors(
    modes: list[Mode],
    lengths: list[int],
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    kernel: Kernel,
    kind: AttentionKind | None = None,
) -> dict[str, dict[str, float]]:
    """Distances from direct attention in float64, by mode and as relative norms, for one group of all ranks.

    They are those of o, dq, dk, dv and, where ``kind`` has sinks, of their gradient. Every rank calls it together and
    gets the same."""
    generator = torch.Generator().manual_seed(3)
    tokens = sum(lengths)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    # Rounded first, so that every precision starts from the same numbers.
    q, k, v, do = (torch.randn(tokens, count, shape.head_dim, generator=generator).to(device, dtype) for count in heads)
    exact = [x.to(torch.float64, copy=True).requires_grad_() for x in (q, k, v)]
    kind = kind or AttentionKind(shape.head_dim**-0.5)
    sink = torch.randn(shape.heads, generator=generator).to(device, dtype) if kind.sink else None
    if sink is not None:
        exact.append(sink.to(torch.float64, copy=True).requires_grad_())
    expected = packed_attention(exact[0], exact[1], exact[2], lengths, kind, *exact[3:])
    expected.backward(do.double())
    wanted = [expected.detach(), *(x.grad for x in exact)]
    ranks, rank = dist.get_world_size(), dist.get_rank()
    world = dist.group.WORLD
    assert world is not None
    groups, length = CpGroups(world), np.array(lengths)
    first = np.cumsum(length) - length
    errors = {}
    for mode in modes:
        here = Baseline(mode, ranks, rank, _group(mode, groups), shape, (kind.window,))
        made = here.prepare(length, np.zeros_like(length), device)
        mine = made.layout.q.on_rank(rank)
        number = torch.from_numpy(expand(first[mine.document] + mine.start, mine.stop - mine.start)).to(device)
        own = [x[number].requires_grad_() for x in (q, k, v)]
        own_sink = None if sink is None else sink.clone().requires_grad_()
        o = made.attention.attend(kernel, own[0], own[1], own[2], kind, lambda _: nullcontext(), own_sink)
        o.backward(do[number])
        found = []
        for part, like in zip((o, *(x.grad for x in own)), wanted, strict=False):
            assert like is not None
            whole = torch.zeros_like(like)
            if part is not None:  # a rank without rows has no gradients
                whole[number] = part.detach().double()
            dist.all_reduce(whole)
            found.append(relative_error(whole, like))
        if own_sink is not None:
            total = torch.zeros_like(own_sink) if own_sink.grad is None else own_sink.grad.clone()
            dist.all_reduce(total)
            like = wanted[-1]
            assert like is not None
            found.append(relative_error(total, like))
        errors[mode.name] = dict(zip(("o", "dq", "dk", "dv", "dsink"), found, strict=False))
    return errors
