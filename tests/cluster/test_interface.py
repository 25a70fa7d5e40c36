"""Two ranks listen where each other is, and nowhere else."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import psutil
import pytest

from distca.cluster import interface
from distca.cluster.interface import LOOPBACK, bind_gloo, interface_to, on_one_node
from distca.testing.ranks import forked, run_ranks
from distca.train.launch.machines import free_port


def _routable() -> str:
    """An address of this machine that others may reach."""
    up = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family == socket.AF_INET and up[name].isup and not each.address.startswith("127."):
                return each.address
    pytest.skip("no interface but loopback")


def _listening() -> list[str]:
    return sorted({each.laddr.ip for each in psutil.Process().net_connections() if each.status == "LISTEN"})


def _join(folder: Path, rank: int, local: int, address: str, port: int) -> None:
    import torch.distributed as dist

    from megatron_patches.ranks.world import join_world, leave_world

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(local)}
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
    join_world()
    dist.barrier(dist.new_group(backend="gloo"))
    (folder / f"{rank}.json").write_text(json.dumps(_listening()))
    dist.barrier()
    leave_world()


@pytest.mark.parametrize("local", [2, 1])
def test_ranks_listen_on_loopback_or_where_rank_0_is(tmp_path: Path, local: int) -> None:
    address = _routable()
    place = LOOPBACK if local == 2 else address
    port = free_port(place)
    ranks = [forked(_join, tmp_path, rank, local, address, port) for rank in range(2)]
    for rank in ranks:
        rank.join(60)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found == [[place]] * 2


def test_ranks_of_one_machine_are_on_loopback() -> None:
    assert run_ranks(2, _listening) == [[LOOPBACK]] * 2


def test_the_interface_to_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    loopback = interface_to(LOOPBACK)
    assert loopback is not None and interface_to("localhost") == loopback
    assert interface_to(_routable()) not in (None, loopback)
    assert interface_to("no-such-node.invalid") is None
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", 9))]
    )
    assert interface_to("node0") is None, "at which other nodes would find themselves"


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "_chosen", None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    bind_gloo()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    bind_gloo()
    assert os.environ["GLOO_SOCKET_IFNAME"] == interface_to(LOOPBACK)
    bind_gloo("no-such-node.invalid")
    assert "GLOO_SOCKET_IFNAME" not in os.environ, "its own choice is made anew"


def test_who_is_on_one_node() -> None:
    assert on_one_node(1, {}) and on_one_node(4, {"LOCAL_WORLD_SIZE": "4"})
    assert not on_one_node(4, {"LOCAL_WORLD_SIZE": "2"}) and not on_one_node(4, {})
