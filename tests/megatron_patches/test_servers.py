"""Servers without a model beside homes, on gloo ranks, against the same homes alone: float64."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from distca.attention import AttentionSpec, Kernel, select
from distca.attention.reference import ReferenceKernel
from distca.attention.self_check import Verdict
from distca.cluster import members, pool_store, pool_watch
from distca.cluster.pool_store import PoolStore
from distca.cluster.process import Process, machine_name
from distca.errors import KernelError, LaunchError, PlanError, RefusedServerError, SupportError
from distca.plan import PlanOptions, area_cost
from distca.plan.cost.table_file import TABLES, find_table
from distca.runtime import attention_server
from distca.runtime.pool_messages import Comer, KernelAnswer, KernelTerms, check_device
from distca.testing.ranks import run_ranks
from distca.transport.breakable import BreakableTransport
from megatron_patches.api import CAD
from megatron_patches.arguments import CadArguments
from megatron_patches.ranks import server_members
from megatron_patches.ranks.late_servers import LateServers
from megatron_patches.ranks.remote_servers import RemoteServers, check_planned
from megatron_patches.support.servers import check_gpus, check_with_servers
from megatron_patches.versions import has_gated_delta_net
from tests.attention.rounded_kernel import RoundedKernel
from tests.megatron_patches.small_cases import on_cpu

SERVERS, CPU = 2, torch.device("cpu")
MICRO_BATCHES = ((13, 7, 1, 29, 3), (50, 2))
KINDS = {"window_size": (15, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable"}
BIASED, BALANCED = "sigmoid, bias, groups, scaling", "auxiliary loss, shared expert"
"""Routers of ``distca.parity.experts``."""
CASES: dict[str, dict[str, Any]] = {
    "kinds": {"speeds": (1.0, 0.5, 1.0, 1.0, 2.0, 1.0), "ranks_per_node": 2, "recompute": "all", "config": KINDS},
    "shared": {"tp": 2, "backward": "resend", "ping_pong": False, "recompute": "mlp"},
    "stages": {"pp": 2, "config": KINDS},
    "idle": {"micro_batches": ((1,), (2, 1))},
    "balanced": {"router": BALANCED, "ep": 4, "backward": "resend", "recompute": "all"},
    "biased": {"router": BIASED, "ep": 2},
    "recurrent stages": {"stack": ("hybrid_stage_cases", 3), "tp": 1},
    "recurrent pools": {"stack": ("hybrid_stage_cases", 3)},
    "recurrent experts": {"stack": ("hybrid_model_cases", 4)},
    "latent": {"latent": 1},
}
SHIPPED = TABLES / "cpu_reference_4x2x32.json"
IDLE = "idle"
"""The case that has too little attention for servers to get any."""
SHARED = "shared"
"""The case whose servers, of one tensor-parallel rank each, say that they share a GPU. Its embedding and first layer
are frozen; servers run backward of that layer too."""
REPEATED = ("biased", "recurrent experts")
"""The cases whose step is thrown away once, as if server 1 had been lost in it, and repeated without the server."""
OF_FOUR = ("kinds", "shared", "stages")
"""Cases of four homes: nodes, pools of tensor-parallel ranks, and stages with several homes."""
OF_TWO = ("idle", "biased", *(("recurrent stages", "recurrent experts", "latent") if has_gated_delta_net() else ()))
"""Those that two homes show too; the last ones need Megatron-Core 0.19."""
FURTHER = ("balanced", *OF_TWO, *(("recurrent pools",) if has_gated_delta_net() else ()))
"""Those of the matrix, of four homes."""


_POLL_S = 0.02
"""Seconds between two looks at the store: each reads a file, and servers wait for most of the test."""


def _in_two_worlds(folder: str, homes: int, names: tuple[str, ...]) -> list[Any]:
    """Of every named case: on homes, how far loss, gradients, loads and biases of experts are from theirs alone, and
    tasks of servers in the plans of all phases; on servers, how many steps they served."""
    on_cpu()
    rank = dist.get_rank()
    dist.barrier()  # all are connected
    dist.destroy_process_group()
    if rank % 2:  # homes and servers have unlike kernels
        select.why_not, select._make = _why_not, _make
    select.check = lambda *_: Verdict()  # checks take longer than cases, whose figures show whether kernels are right
    for module in (members, pool_store, server_members):
        module.POLL_S = _POLL_S
    if rank >= homes:
        store = dist.FileStore(f"{folder}/homes")
        return [_served(store, rank - homes, pool, name == SHARED) for pool, name in enumerate(names)]
    dist.init_process_group("gloo", init_method=f"file://{folder}/homes", rank=rank, world_size=homes)
    from distca.parity.unmodified import unmodified_model
    from tests.parity.float32_casts import float32_casts_lifted

    cases, found = [_case(**CASES[name]) for name in names], []
    models = [unmodified_model(case, torch.float32) for case in cases]  # first, as each needs groups of one rank
    with float32_casts_lifted():
        for name, case, model in zip(names, cases, models, strict=True):
            weights = {each: parameter.detach() for each, parameter in model.named_parameters()}
            found.append(_compared(case, weights, name in REPEATED))
            gc.collect()  # servers go when their CAD does
    return found


def _served(store: dist.Store, number: int, pool: int, shares: bool) -> int:
    with patch.object(attention_server, "gpu_id", lambda _: "one" if shares else str(number)):
        return attention_server.serve(store, number, pool=pool)


def _why_not(name: str, _: Any) -> str | None:
    return None if name in ("torch", "reference") else "it is not there"


def _make(name: str, _: Any) -> Kernel:
    kernel = RoundedKernel() if name == "torch" else ReferenceKernel()
    kernel.name = name
    return kernel


def _case(router: str = "", stack: tuple[str, int] | None = None, latent: int | None = None, **settings: Any) -> Any:
    from distca.parity import latent_cases
    from distca.parity.cases import ParityCase, ParityShape
    from distca.parity.experts import expert_case
    from tests.parity import hybrid_cases

    if stack is not None:
        case = getattr(hybrid_cases, stack[0])()[stack[1]]
        return replace(case, scheduler="real", micro_batches=case.micro_batches[::2], **settings)
    if latent is not None:
        return latent_cases.latent_cases(tp=latent + 1)[latent]
    usual: dict[str, Any] = {"micro_batches": MICRO_BATCHES, "shape": ParityShape(layers=2)}
    return expert_case(router, **usual | settings) if router else ParityCase(**usual | settings)


def _compared(case: Any, weights: dict[str, torch.Tensor], repeated: bool) -> tuple[dict[str, float], int]:
    from distca.parity import outcome
    from distca.parity.experts import worst

    expected, biases, loads, _ = _ran(replace(case, speeds=()), weights)
    found, *of_experts, away = _ran(replace(case, servers=SERVERS), weights, repeated)
    off = outcome.difference(found, expected)
    assert loads.keys() == of_experts[1].keys() and bool(loads) == bool(case.config.get("num_moe_experts"))
    bias, load = worst(of_experts[0], biases), worst(of_experts[1], loads)
    return {"loss": off.loss, "gradient": off.gradient, "bias": bias, "load": load}, away


def _ran(
    case: Any, weights: dict[str, torch.Tensor], repeated: bool = False
) -> tuple[Any, dict[int, Any], dict[int, Any], int]:
    """The outcome of a step, biases of experts and rows that each got, and tasks of servers without a model."""
    from distca.parity import disaggregated, experts
    from distca.parity.cases import case_documents
    from distca.parity.disaggregated import TOLERANCE
    from megatron_patches.training.training_step import summed_loss_step, wrap_for_data_parallel

    kernel: Any = "auto" if case.servers else "reference"
    cad, model = disaggregated.attached(case, torch.float64, CPU, kernel, weights, reduced=False, tolerance=TOLERANCE)
    if case.servers:
        assert [cad.pool.kernel.name, *(each.kernel for each in cad._remote.sorts)] == [
            ("reference", "torch")[dist.get_rank() % 2], "reference", "torch",
        ]  # fmt: skip
        assert cad._remote.sharing == ([2] if case == _case(**CASES[SHARED], servers=SERVERS) else [1] * (2 // case.tp))
        if 2 in cad._remote.sharing:
            rows, servers = np.array([512] * 3), np.arange(3)
            seconds = cad.options.cost.on_servers("both", rows, rows, servers)
            np.testing.assert_allclose(seconds, seconds[:, :1] * [1, 1, 2])
    experts.set_biases(model)
    bottom = ("embedding", "decoder.layers.0.") if replace(case, servers=0) == _case(**CASES[SHARED]) else ()
    frozen = [weight.requires_grad_(False) for name, weight in model.named_parameters() if name.startswith(bottom)]
    ddp = wrap_for_data_parallel(model, distributed_optimizer=False, gradients=torch.float64)
    # The second step is planned before the first one runs, and both are of the same documents.
    first, second = (cad.plan_step(case_documents(case)) for _ in range(2))
    if case.servers:
        cad.pool.timeline.start_recording()
        cad.forward_backward(first, summed_loss_step, ddp, forward_only=True)
    calls = len(cad.pool.timeline.take_serves()["forward"])
    if repeated:
        cad._remote.is_served = partial(_lose_server, cad, cad._remote.is_served)
    reports = cad.forward_backward(second, summed_loss_step, ddp)
    if case.servers:  # which a step that was repeated counts once, and a timeline as often as it ran
        assert [len(each) for each in cad.pool.timeline.take_serves().values()] == [calls] * 2
        names = [span["name"] for span in cad.server_timelines().get(0, ())]
        forward = sum(name.startswith("serve") and "forward" in name for name in names)
        assert dist.get_rank() or forward == calls * (2 + repeated)
    if case.servers:
        assert cad.as_run(cad.as_run(second)) is cad.as_run(second)
        for ask in (cad.as_run, cad.served):
            with pytest.raises(SupportError, match="not the one that the last forward_backward ran"):
                ask(first)
    away = [
        np.count_nonzero(plan.tasks.server >= cad.options.homes)
        for _, phase in cad.as_run(second).plan.phases
        for plans in phase.by_combination
        for plan in plans
    ]
    for weight in frozen:
        weight.main_grad = torch.zeros_like(weight)  # which the outcome reads
    loads = {number: load.rows_E for number, load in cad.expert_loads(ddp).items()}
    outcome = disaggregated.outcome_of(case, cad, model, reports, weights)
    return outcome, experts.biases_of(model), loads, sum(away)


def _lose_server(cad: Any, is_served: Callable[[], bool]) -> bool:
    """Throws the step that just ran away, and lets server 1 go. It is called once."""
    cad._remote.is_served = is_served
    assert is_served()
    cad.let_server_go(1)
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    "homes, names",
    [(4, OF_FOUR), (2, OF_TWO), pytest.param(4, FURTHER, marks=pytest.mark.matrix)],
    ids=["four", "two", "four, further"],
)
def test_losses_gradients_loads_and_biases_are_those_of_homes_alone(
    homes: int, names: tuple[str, ...], tmp_path: Path
) -> None:
    *of_homes, first, second = run_ranks(homes + SERVERS, _in_two_worlds, str(tmp_path), homes, names)
    assert second == [2] * len(names)
    assert first == [2 + (name in REPEATED) for name in names]
    for answers in of_homes:
        for name, (off, away) in zip(names, answers, strict=True):
            assert max(off.values()) <= 1e-12, (name, off)
            assert (away > 0) == (name != IDLE)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"servers": -1}, "`servers` is -1; it must be at least 0"),
        ({"servers": 1.5}, "`servers` is 1.5; it must be a whole number"),
    ],
)
def test_a_number_of_servers_that_means_nothing_is_a_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SupportError, match=words):
        CadArguments(tokens_per_rank=1, **options).check()


def test_what_does_not_go_together_is_a_sentence() -> None:
    with pytest.raises(SupportError, match="servers is 2, but disaggregate is False"):
        CadArguments(tokens_per_rank=1, servers=2, disaggregate=False).how(1)
    with pytest.raises(
        SupportError, match=r"`servers` is 3, no multiple of the 2 tensor-parallel ranks, .* set it to a multiple"
    ):
        RemoteServers(3, 2, "auto", CPU)
    with pytest.raises(SupportError, match="`transport` is 'nvshmem'"):
        RemoteServers(2, 2, "nvshmem", CPU)
    with pytest.raises(SupportError, match="Server 1 has device cpu, and the homes compute on cuda"):
        check_device("cuda", "cpu", 1)
    sharing: Any = [SimpleNamespace(number=number, gpu_id=gpu) for number, gpu in enumerate("aabb")]
    check_gpus(sharing, 2)
    cad: Any = CAD.__new__(CAD)
    cad._remote = RemoteServers.__new__(RemoteServers)
    cad._remote._servers = sharing
    with patch.object(dist, "get_world_size", lambda: 3):
        assert cad.device_count == 5  # each GPU counts once
    with pytest.raises(SupportError, match=r"Servers 0 and 1 of the pool share a GPU .*: start each on its own"):
        check_gpus(sharing, 1)
    with pytest.raises(SupportError, match=r"Servers 0 and 1 of the pool share a GPU .*: start each on its own"):
        check_gpus([sharing[0], sharing[2], sharing[1]], 2)
    with pytest.raises(SupportError, match="Server 2 of the pool is on the GPU of a rank with a model"):
        check_gpus(sharing, 2, ["b"])
    with pytest.raises(SupportError, match="server_gb_s is 25, but servers is 0"):
        CadArguments(tokens_per_rank=1, server_gb_s=25).how(1)
    with pytest.raises(SupportError, match="speeds are given, but disaggregate is False"):
        CadArguments(tokens_per_rank=1, speeds=(1.0,), disaggregate=False).how(1)
    served, delayed = (SimpleNamespace(fp8="hybrid", fp8_recipe=each) for each in ("tensorwise", "delayed"))
    check_with_servers(served, False)
    for config, offload in ((served, True), (delayed, False)):
        with pytest.raises(SupportError, match=r"have not been shown to be right with .*: leave `servers` at 0"):
            check_with_servers(config, offload)


def _refused() -> tuple[str, ...]:
    """What a late server says that has no GPU; and what homes and a first server say, whose named kernel needs one."""
    from distca import serve

    late, store = dist.HashStore(), c10d._get_default_store()
    spec: Any = SimpleNamespace(device=torch.device("cuda"))
    PoolStore(late).put("kernel", KernelTerms((), spec, "auto"))
    with pytest.raises(RefusedServerError) as refused:
        serve(late, 3)
    with ThreadPoolExecutor(1) as thread:
        server = thread.submit(serve, store, 0)
        remote = RemoteServers(1, 1, "auto", CPU)
        remote.ask_for_kernels(AttentionSpec(2, 1, 8, torch.float32, CPU), "flash4", None)
        with pytest.raises(KernelError) as at_home:
            remote.hear_kernels()
        with pytest.raises(KernelError) as on_server:
            server.result()
    return str(refused.value), str(at_home.value), str(on_server.value)


def test_a_late_server_is_refused_alone_and_a_first_one_everywhere() -> None:
    ((alone, at_home, on_server),) = run_ranks(1, _refused)
    assert "Server 3 has device cpu, and the homes compute on cuda" in alone
    assert on_server.startswith("`kernel` flash4 cannot run here: it needs a GPU, and this rank computes")
    assert at_home == f"On server 0 of the pool: {on_server}"


def _called_again() -> list[str]:
    """What a server raises in three calls of one process: it waits in vain for a generation, and is refused twice. The
    last call begins before the first ones have all their answers."""
    from distca import serve

    store, me = dist.HashStore(), Comer(3, machine_name(), "cpu", "cpu", Process.here())
    homes, said = PoolStore(store), []
    homes.put("kernel", KernelTerms((me,), AttentionSpec(2, 1, 8, torch.float32, CPU), "auto"))
    remote: Any = object.__new__(RemoteServers)
    remote._leads, remote._store, remote.generation = True, homes, 1
    late, earlier = LateServers(homes, 1, "cpu", [], remote), me
    terms: Any = SimpleNamespace(spec=None, options=None, layers=())
    for call in range(3):
        with (
            patch.object(attention_server, "choose_kernel", lambda *_: RoundedKernel()),
            ThreadPoolExecutor(1) as thread,
        ):
            server = thread.submit(partial(serve, store, 3 + (call > 1), patience=timedelta(seconds=1)))
            if call:
                homes.put("generation/0", None)
                while not server.done() and not homes.has(f"comer/{call - 1}"):
                    time.sleep(0.01)
                if call == 2:
                    remote._servers = [earlier]
                    remote._put_generation(terms, [earlier])
                    wait([server], timeout=0.05)
                earlier = homes.take(f"comer/{call - 1}")
                late.waiting = [earlier]
                late._refuse([earlier], f"refusal {call}")
            said.append(repr(server.exception()))
    return said


def test_a_process_that_serves_again_waits_for_a_new_answer() -> None:
    ((first, second, third),) = run_ranks(1, _called_again)
    assert "Nothing came under generation/0" in first
    assert "refusal 1" in second and "refusal 2" in third


def _measured(folder: str) -> list[list[str]]:
    """The names of the tables that a server measures, in two starts of the same run."""
    from distca import serve

    def measure(kernel: Kernel, spec: AttentionSpec) -> dict[str, Any]:
        measured.append(f"{kernel.name} {spec.head_dim}")
        return json.loads(SHIPPED.read_text()) | {"heads": spec.heads, "head_dim": spec.head_dim}

    found = []
    for pool in range(2):
        measured: list[str] = []
        with ThreadPoolExecutor(1) as thread:
            soon = timedelta(seconds=2)  # no generation follows
            store, how = c10d._get_default_store(), {"patience": soon, "measure": measure}
            served = thread.submit(partial(serve, store, 0, pool=pool, **how))
            remote = RemoteServers(1, 1, "auto", CPU)
            remote.ask_for_kernels(AttentionSpec(4, 2, 8, torch.float32, CPU), "auto", Path(folder))
            remote.hear_kernels()
            assert isinstance(served.exception(), LaunchError)
        found.append(measured)
    return found


def test_a_server_measures_a_table_that_nobody_has_and_it_is_kept(tmp_path: Path) -> None:
    assert run_ranks(1, _measured, str(tmp_path)) == [[["reference 8"], []]]
    assert find_table("cpu", "reference", 4, 2, 8, folder=tmp_path) is not None


def _joining(tp: int, servers: str, comers: str) -> tuple[list[int], dict[int, str]]:
    """The numbers of late servers that may join, and why others may not; a letter is the GPU of a server. Server 0 has
    gone, and a home has GPU h."""
    process: Any = str
    some = [
        Comer(at, "", "cpu", "", process(at), gpu_id=gpu, arrival=at - len(servers))
        for at, gpu in enumerate(servers + comers)
    ]
    store, watch = PoolStore(dist.HashStore()), SimpleNamespace(is_gone=lambda process: process == "0")
    late = LateServers(store, tp, "cpu", ["h"], watch)  # type: ignore[arg-type]
    for each in some[len(servers) :]:
        store.put(f"comer/{each.arrival}", each)
    store.count("comers", len(comers))
    late.hear(some[: len(servers)])
    refused = [each for each in some[len(servers) :] if each not in late.waiting]
    return [each.number for each in late.waiting], {
        each.number: store.take(f"welcome/{each.arrival}") for each in refused
    }


def test_late_servers_on_taken_gpus_are_refused_alone() -> None:
    joining, refused = _joining(1, "ab", "abcchd")
    assert joining == [2, 4, 7]
    assert "Servers 1 and 3 of the pool share a GPU" in refused[3] and refused[3].endswith("start each on its own.")
    assert "Servers 4 and 5 of the pool share a GPU" in refused[5]
    assert "Server 6 of the pool is on the GPU of a rank with a model: start it on another GPU" in refused[6]
    joining, refused = _joining(2, "aabb", "bcaacdee")  # the first two have gone
    assert joining == [6, 7, 8, 9, 10, 11] and refused.keys() == {4, 5}
    assert all("Servers 2 and 4 of the pool share a GPU" in each for each in refused.values())


def test_the_number_of_a_late_server_that_ended_or_was_refused_is_free() -> None:
    process: Any = str
    usual = Comer(3, "", "cpu", "", process("first"))
    store, gone = PoolStore(dist.HashStore()), set[Any]()
    late = LateServers(store, 2, "cpu", [], SimpleNamespace(is_gone=gone.__contains__))  # type: ignore[arg-type]

    def hear(*comers: Comer) -> list[Any]:
        for each in comers:
            arrival = store.count("comers", 1) - 1
            store.put(f"comer/{arrival}", replace(each, arrival=arrival))
        late.hear([])
        return [each.process for each in late.waiting]

    assert hear(usual, replace(usual, process=process("same number"))) == ["first"]
    gone.add("first")
    assert hear(replace(usual, process=process("again"))) == ["again"]
    fifth = replace(usual, number=5, process=process("fifth"))
    assert hear(replace(fifth, device="cuda", process=process("gpu")), fifth) == ["again", "fifth"]
    assert store.take("welcome/3").startswith("Server 5 has device cuda, and the homes")
    assert store.take("welcome/1").startswith("The homes have a server 3 already")


def test_a_process_that_comes_again_counts_once() -> None:
    process: Any = str
    first = Comer(3, "", "cpu", "", process("first"), gpu_id="a")
    store = PoolStore(dist.HashStore())
    late = LateServers(store, 1, "cpu", [], SimpleNamespace(is_gone=lambda _: False))  # type: ignore[arg-type]
    for comers in ([first, first], [replace(first, number=4)], [first]):
        for each in comers:
            store.put(f"comer/{store.count('comers', 1) - 1}", each)
        late.hear([first])  # it was in the pool already
        assert late.joining() == comers[-1:] and not store.has("welcome/-1")
    assert not late.stays(first) and late.take() == [first] and late.stays(first)


def test_a_late_server_that_ended_before_it_said_who_it_is_holds_nobody_up() -> None:
    process: Any = str
    some = [Comer(number, "", "cpu", "", process(number)) for number in range(3)]
    store = PoolStore(dist.HashStore())
    late = LateServers(store, 1, "cpu", [], SimpleNamespace(is_gone=lambda _: False))  # type: ignore[arg-type]
    began, places = time.monotonic(), [store.count("comers", 1) - 1 for _ in some]
    store.put(f"comer/{places[1]}", some[1])
    late.hear([])
    assert late.waiting == [some[1]]
    store.put(f"comer/{places[2]}", some[2])  # and the first one was only slow
    store.put(f"comer/{places[0]}", some[0])
    late.hear([])
    assert late.joining() == some and time.monotonic() - began < 5


def _ended_early() -> list[str]:
    """What homes say of servers that end before they have chosen a kernel: one on the homes' machine, and one
    elsewhere, of which nobody here sees whether it runs. Then of one that has chosen."""
    store, said = c10d._get_default_store(), []
    here, elsewhere = replace(Process.here(), started=1), replace(Process.here(), space="another machine")
    with patch.object(server_members, "_COMING", timedelta(seconds=20)), patch.object(pool_watch, "STARTING_S", 0.5):
        for pool, ended in enumerate((here, elsewhere, elsewhere)):
            PoolStore(store, pool).put("server/0", Comer(0, "", "cpu", "", ended))
            remote, began = RemoteServers(1, 1, "auto", CPU), time.monotonic()
            if pool == 2:
                remote._store.put(f"kernel/{ended}", KernelAnswer("torch"))
                remote.ask_for_kernels(AttentionSpec(2, 1, 8, torch.float32, CPU), "auto", None)
                remote.hear_kernels()
                time.sleep(2)
            with pytest.raises(LaunchError) as refused:
                remote.begin(None) if pool == 2 else remote.hear_kernels()
            assert time.monotonic() - began < 15, "homes waited as long as for a server that may still come"
            said.append(str(refused.value))
    return said


def test_homes_do_not_wait_for_a_server_that_ended_before_the_pool_was_formed() -> None:
    (here, elsewhere, chosen), other_home = run_ranks(2, _ended_early)
    assert here == elsewhere and other_home == [here, elsewhere, chosen]
    assert here.startswith("Server 0 of the pool came, but has not chosen a kernel of core attention: it has ended, or")
    assert chosen.startswith("Server 0 of the pool ended before the pool was formed: look at the server's output")


def _too_few() -> tuple[str, bool]:
    """What homes say if server 0 comes late and server 1 does not come, and whether they waited for both together."""
    store, began = PoolStore(c10d._get_default_store()), time.monotonic()
    with patch.object(server_members, "_COMING", timedelta(seconds=2)), ThreadPoolExecutor(1) as thread:
        comer = Comer(0, "", "cpu", "", Process.here())
        thread.submit(lambda: (time.sleep(1), store.put("server/0", comer)))
        with pytest.raises(LaunchError) as refused:
            RemoteServers(2, 1, "auto", CPU)
    return str(refused.value), 1.9 < time.monotonic() - began < 2.9


def test_a_server_that_does_not_come_is_named_on_all_homes() -> None:
    said = "Server 1 of the 2 that `servers` asks for has not come: start it with distca.serve()"
    for words, together in run_ranks(2, _too_few):
        assert words.startswith(said) and together


def test_servers_choose_kernels_and_measure_in_one_time_together() -> None:
    members, left = object.__new__(server_members.ServerMembers), []

    class Store:
        def has(self, key: str) -> bool:
            return False

        def take(self, key: str, patience: timedelta, why: str) -> None:
            left.append(time.monotonic() - began)

    members._servers = [Comer(number, "", "cpu", "", Process.here()) for number in range(3)]
    members._store, members._may_change, began = Store(), False, time.monotonic()  # type: ignore[assignment]
    with patch.object(server_members, "_COMING", timedelta(seconds=0.2)):
        members._kernels()
    assert len(left) == 3 and 0.2 <= left[0] <= left[2] < 0.6


def _failed_choice() -> list[Any]:
    """What homes say of a server whose choice of a kernel fails for no reason that is known, and whether they saw signs
    of life of it before it chose."""
    remotes: list[RemoteServers] = []

    def choose(*_: Any) -> Kernel:
        until = time.monotonic() + 60
        while not signs() and time.monotonic() < until:
            time.sleep(0.02)
        raise OSError("no compiler")

    def signs() -> bool:
        return any(number > 0 for number, _ in remotes[0]._watch._seen.values())

    with (
        patch.object(attention_server, "choose_kernel", choose),
        patch.object(pool_watch, "_PERIOD_S", 0.02),
        ThreadPoolExecutor(1) as thread,
    ):
        thread.submit(attention_server.serve, c10d._get_default_store(), 0)
        remotes.append(RemoteServers(1, 1, "auto", CPU))
        remotes[0].ask_for_kernels(AttentionSpec(2, 1, 8, torch.float32, CPU), "auto", None)
        with pytest.raises(KernelError) as refused:
            remotes[0].hear_kernels()
        return [signs(), str(refused.value)]


def test_a_server_gives_signs_of_life_before_it_chooses_and_says_that_it_failed() -> None:
    said = "On server 0 of the pool: the choice of a kernel failed: OSError('no compiler')."
    assert run_ranks(1, _failed_choice) == [[True, said]]


def _changed(fails: int, present: int = 1) -> tuple[tuple[int, ...], int]:
    """The servers of a pool, and its generation, after number 1 has come, with which the pool fails to form ``fails``
    times. With ``present`` 2 the process of number 1 was in the pool already, and comes again."""
    remote: Any = object.__new__(RemoteServers)
    remote._tp, remote._leads, remote._may_change, remote._asking, remote.generation = 1, True, True, CPU, 0
    remote._store, remote._lost, remote._released = PoolStore(dist.HashStore()), set(), set()
    old, new = (Comer(number, "", "cpu", "", Process(number, "", 0)) for number in range(2))
    remote._watch = SimpleNamespace(begin=lambda *_: None, end=lambda: None, is_gone=lambda _: False)
    remote._servers, remote._late = [old, new][:present], LateServers(remote._store, 1, "cpu", [], remote._watch)
    remote._late.waiting = [new]
    remote.transport = BreakableTransport(goes_on=True)

    def group(_: timedelta) -> Any:
        if new in remote._servers and remote.generation <= fails:
            raise RuntimeError("no connection")
        return dist.group.WORLD

    remote._is_here, remote._group = lambda _: True, group
    with patch.object(BreakableTransport, "give_up", lambda self: setattr(self, "broken", True)):
        remote.change(lambda: None)
    return remote.numbers, remote.generation


def test_a_late_server_that_cannot_be_reached_is_left_out() -> None:
    assert run_ranks(1, _changed, 0) == [((0, 1), 1)] == run_ranks(1, _changed, 0, 2)
    assert run_ranks(1, _changed, 1) == [((0, 1), 2)]
    assert run_ranks(1, _changed, 9) == [((0,), 3)]


def test_servers_that_do_not_come_or_plan_otherwise_are_sentences() -> None:
    store = PoolStore(dist.HashStore())
    with pytest.raises(LaunchError, match=r"Nothing came under server/0 of the pool's store in 0 s"):
        store.take("server/0", timedelta(0))
    check_planned(7, 0, 7)
    with pytest.raises(PlanError, match="Server 0 of the pool planned a step differently"):
        check_planned(8, 0, 7)
    with pytest.raises(PlanError, match="Server 0 of the pool could not plan a step: no memory"):
        check_planned("no memory", 0, 7)


def test_messages_are_heard_in_order() -> None:
    store = dist.HashStore()
    homes, server = PoolStore(store), PoolStore(store)
    for number in range(300):
        homes.tell("plan", number)
        assert server.hear(timedelta(seconds=40)) == ("plan", number)


def test_a_long_run_leaves_few_of_a_servers_answers_in_the_store() -> None:
    store, me = dist.HashStore(), Comer(0, "here", "cpu", "cpu", Process.here())
    server: Any = attention_server._Server(PoolStore(store), me, ReferenceKernel(), CPU, None)  # type: ignore[arg-type]
    server._place, server._terms = 1, SimpleNamespace(options=PlanOptions(1, area_cost(), servers=1))
    for step in range(1, 21):
        server._plan(step, ([[4]], None, None))
        assert PoolStore(store).has(f"planned/{step}/0")
        server._tell_served(step, step)
    assert store.num_keys() < 20


def test_a_step_that_runs_twice_gets_two_reports() -> None:
    store, me = dist.HashStore(), Comer(0, "here", "cpu", "cpu", Process.here())
    server: Any = attention_server._Server(PoolStore(store), me, ReferenceKernel(), CPU, None)  # type: ignore[arg-type]
    server._join = lambda _: setattr(server._transport, "broken", False)
    server._plan, server._has_served = lambda *_: (None, None), lambda *_: not time.sleep(0.05)
    remote: Any = object.__new__(RemoteServers)
    remote._leads, remote._store, remote._servers = True, PoolStore(store), [me]
    remote._may_change, remote._runs, remote._watch = True, 0, SimpleNamespace(is_gone=lambda _: False)
    seconds, found = [{"forward": [float(number)]} for number in range(2)], []
    with (
        ThreadPoolExecutor(1) as thread,
        patch.object(attention_server.Timeline, "take_serves", lambda _: seconds.pop(0)),
    ):
        thread.submit(server.run, SimpleNamespace(terms=SimpleNamespace(layers=())))
        for _ in range(2):
            remote.run(1, SimpleNamespace(lengths=[[4]], homes=None), False, None)
            found += remote.served()
        remote._store.tell("end")
    assert [each.seconds for each in found] == [{"forward": [0.0]}, {"forward": [1.0]}]
