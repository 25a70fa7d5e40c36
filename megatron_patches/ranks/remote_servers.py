"""Servers without a model, as homes see them: who they are, the pool's group with them, and what they are told.

The homes' first rank alone talks to them, through the store behind the homes' world (``distca.cluster.pool_store``).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch.distributed import distributed_c10d as c10d

from distca.cluster.pool_store import PoolStore
from distca.errors import PlanError, SupportError
from distca.plan.step import StepPlan
from distca.plan.step_file import StepInputs
from distca.runtime.attention_server import PoolTerms, Served, check_device

_pools = count()
"""Numbers of the pools that this process makes; the same on all homes, which make them together."""


def check_with_servers(config: TransformerConfig, recurrent: bool, offload: bool) -> None:
    """Refuse what nobody has shown to be right beside servers without a model.

    Args:
        config: Megatron's.
        recurrent: whether layers are recurrent.
        offload: of :class:`megatron_patches.api.CAD`.

    Raises:
        SupportError: the model has it.
    """
    found = {"mixtures of experts": bool(config.num_moe_experts), "recurrent layers": recurrent, "offload": offload}
    for what, there in found.items():
        if there:
            raise SupportError(f"Servers without a model have not been shown beside {what}: leave `servers` at 0.")


class RemoteServers:
    """Servers without a model; every home makes one together.

    Args:
        servers: how many, of all tensor-parallel ranks together.
        tp: tensor-parallel ranks, each of which is served by equally many.
        transport: that was asked for.
        device: of this rank.

    Attributes:
        machines: of those that serve this rank's pool, in order.
        group: this rank's pool: homes, then servers.

    Raises:
        SupportError: what does not go together with them.
        LaunchError: they do not come.
    """

    def __init__(self, servers: int, tp: int, transport: str, device: torch.device) -> None:
        if servers % tp:
            raise SupportError(
                f"`servers` is {servers}, which {tp} tensor-parallel ranks do not divide: each has servers of its own."
            )
        by = "nccl" if device.type == "cuda" else "gloo"
        if transport not in ("auto", by):
            raise SupportError(
                f"`transport` is {transport!r}, and rows reach servers without a model by {by}: set it to 'auto'."
            )
        self._servers, self._leads = servers, dist.get_rank() == 0
        self._store, self._numbers = PoolStore(c10d._get_default_store(), next(_pools)), count(1)
        homes = dist.get_world_size() // tp
        found: list[Any] = [None]
        if self._leads:
            self._store.put("sizes", (tp, homes, homes + servers // tp, device.type))
            found = [
                [self._store.take(f"server/{each}", why=_MISSING.format(each, servers)) for each in range(servers)]
            ]
        dist.broadcast_object_list(found)
        part = dist.get_rank() % tp
        for number, (_, theirs) in enumerate(found[0]):
            check_device(device.type, theirs, number)
        self.machines: list[str] = [machine for machine, _ in found[0][part::tp]]
        self.group = self._store.group(f"part/{part}", dist.get_rank() // tp, homes + servers // tp, device)
        if self._leads:
            # Servers end when this rank has no more use for them, or ends itself.
            weakref.finalize(self, self._store.tell, "end")

    def tell_terms(self, terms: PoolTerms) -> None:
        """Let servers know what they need of the model."""
        if self._leads:
            self._store.put("terms", terms)

    def announce(self, inputs: StepInputs) -> int:
        """Let servers plan a step too; returns the number by which they know it, 0 on other ranks than the first."""
        if not self._leads:
            return 0
        number = next(self._numbers)
        self._store.tell("plan", (number, _lengths(inputs)))
        return number

    def agree(self, number: int, plan: StepPlan) -> None:
        """Wait until servers have planned step ``number`` alike.

        Raises:
            PlanError: on the first rank, if one planned otherwise or could not.
        """
        if self._leads:
            check_planned(self._store, self._servers, number, plan.fingerprint)

    def served(self, number: int) -> list[Served] | None:
        """The seconds and memory that step ``number`` took on each server, which this waits for; None on other ranks
        than the first."""
        if not self._leads:
            return None
        said = "Server {} of the pool does not say that it has served a step."
        return [self._store.take(f"served/{number}/{each}", why=said.format(each)) for each in range(self._servers)]

    def run(self, number: int, plan: StepPlan, forward_only: bool) -> None:
        """Let servers serve a step that they were announced as ``number``."""
        if self._leads:
            # As it was dealt: planned again it would not be dealt anew.
            self._store.tell("run", (number, (plan.lengths, plan.homes, None), forward_only))


def check_planned(store: PoolStore, servers: int, number: int, fingerprint: int) -> None:
    """Wait until all ``servers`` have planned step ``number``, as a plan with this ``fingerprint``.

    Raises:
        PlanError: one planned otherwise or could not.
    """
    for each in range(servers):
        found = store.take(f"planned/{number}/{each}", why=f"Server {each} of the pool does not plan.")
        if isinstance(found, str):
            raise PlanError(f"Server {each} of the pool could not plan a step: {found}")
        if found != fingerprint:
            raise PlanError(
                f"Server {each} of the pool planned a step differently from the homes, so nothing of it was sent: "
                "compare versions of distca and numpy by `distca doctor` on both nodes."
            )


_MISSING = "Server {} of the {} that `servers` asks for has not come: start it with distca.serve()."


def _lengths(inputs: StepInputs) -> tuple[Sequence[Any], Any, Any]:
    return inputs.lengths, inputs.homes, inputs.room
