"""Settings that servers without a model, and servers of other speeds, do not go with."""

from __future__ import annotations

import math
import os

from distca.train.config.schema import RunConfig
from distca.words import count


def servers_problems(config: RunConfig, world_size: int) -> list[str]:
    """Sentences on what cannot work with cad.servers and cad.speeds beside so many ranks, which tensor parallelism
    divides."""
    cad, tp, problems = config.cad, config.parallel.tp, []
    if cad.servers:
        problems += _not_served(config)
    if cad.servers % tp:
        problems.append(
            f"cad.servers is {cad.servers}, which parallel.tp {tp} does not divide, but each tensor-parallel rank has "
            "servers of its own; change one."
        )
    if cad.server_gb_s < 0 or (cad.server_gb_s and not cad.servers):
        problems.append(
            f"cad.server_gb_s is {cad.server_gb_s:g}, and there are {count(cad.servers, 'server')} without a model; "
            "give 0 or more, and above 0 only beside such servers."
        )
    pool = (world_size + cad.servers) // tp
    if cad.speeds and not cad.enabled:
        problems.append("cad.speeds are given, but cad.enabled is false, so each rank computes what it has; drop them.")
    elif cad.speeds and (len(cad.speeds) != pool or not all(0 < speed < math.inf for speed in cad.speeds)):
        problems.append(
            f"cad.speeds is {list(cad.speeds)}, but there are {count(pool, 'attention server')}; give one number above "
            "0 for each, or none."
        )
    return problems


def servers_not_started(config: RunConfig) -> list[str]:
    """Sentences where a launcher that checks settings starts another number of servers than cad.servers, or too many of
    them on a GPU."""
    started, sharing = (int(os.environ.get(name) or least) for name, least in (("SERVERS", 0), ("SERVERS_PER_GPU", 1)))
    problems = []
    if started != config.cad.servers:
        problems.append(
            f"cad.servers is {config.cad.servers}, but pretrain_llama.sh starts servers by SERVERS, which is "
            f"{started or 'not set'}; set SERVERS to start them, and leave cad.servers out."
        )
    if sharing > config.parallel.tp:
        problems.append(
            f"SERVERS_PER_GPU is {sharing}, but parallel.tp (TP_SIZE) is {config.parallel.tp}, and servers of one "
            f"tensor-parallel rank cannot share a GPU; lower SERVERS_PER_GPU to at most {config.parallel.tp}."
        )
    return problems


def _not_served(config: RunConfig) -> list[str]:
    offload = "none" if config.train.offload == "auto" else config.train.offload
    by = ("auto", "nccl", "gloo")
    wrong = {
        "cad.enabled is false": not config.cad.enabled,
        f"train.offload is {offload}": offload != "none",
        "train.fp8 is delayed": config.train.fp8 == "delayed",
        f"cad.transport is {config.cad.transport}": config.cad.transport not in by,
    }
    return [
        f"{what}, which servers without a model have not been shown with; change it, or leave SERVERS (cad.servers "
        f"{config.cad.servers}) out."
        for what, so in wrong.items()
        if so
    ]
