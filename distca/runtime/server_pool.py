"""The server pool as one rank sees it: how rows move, what computes, and who keeps what for backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from distca.attention import Kernel
from distca.runtime.timeline import Timeline
from distca.transport import Transport


@dataclass(frozen=True)
class AttentionPool:
    """All ranks that serve core attention to each other.

    Attributes:
        transport: moves rows between them.
        kernel: computes CA-tasks on this rank.
        timeline: records what this rank does when.
        backward: "keep": servers keep q, k, v, o and log-sum-exp of their tasks, home ranks send only dO. "resend":
            home ranks keep them and send them again with dO, to the servers that the backward plan names.
    """

    transport: Transport
    kernel: Kernel
    timeline: Timeline
    backward: Literal["keep", "resend"] = "keep"
