"""NVSHMEM's calls on streams, for peers whose memory cannot be mapped.

For such a peer NVSHMEM queues a kernel of one thread that hands the call to a thread of the host, which drives the
network; for a peer whose memory is mapped, which tests treat alike, a put is a copy on a stream that NVSHMEM owns, and
quiet lets the caller's stream wait for that one. Nothing blocks the host.
"""

from __future__ import annotations

import torch

from distca.transport import cuda_ops


class NvshmemQueue:
    """:class:`distca.transport.nvshmem.internode.InternodeQueue` on GPUs; NVSHMEM runs already."""

    create_stream = staticmethod(cuda_ops.create_stream)
    current_stream = staticmethod(cuda_ops.current_stream)
    mark = staticmethod(cuda_ops.mark)
    push_rows = staticmethod(cuda_ops.push_rows)

    def __init__(self) -> None:
        from nvshmem import bindings

        self._calls = bindings
        self._set, self._add = int(bindings.Signal_op.SIGNAL_SET), int(bindings.Signal_op.SIGNAL_ADD)
        self._at_least = int(bindings.Cmp_type.CMP_GE)

    def put(self, to: int, source: int, size: int, peer: int, stream: torch.cuda.Stream) -> None:
        self._calls.putmem_nbi_on_stream(to, source, size, peer, stream.cuda_stream)

    def quiet(self, stream: torch.cuda.Stream) -> None:
        self._calls.quiet_on_stream(stream.cuda_stream)

    def set_signal(self, slot: int, number: int, peer: int, stream: torch.cuda.Stream) -> None:
        self._calls.signal_op_on_stream(slot, number, self._set, peer, stream.cuda_stream)

    def add_to_signal(self, slot: int, by: int, peer: int, stream: torch.cuda.Stream) -> None:
        self._calls.signal_op_on_stream(slot, by, self._add, peer, stream.cuda_stream)

    def wait_for_signal(self, slot: int, number: int, stream: torch.cuda.Stream) -> None:
        # Not the driver's plain wait, as for intra-node peers: it need not order what a network card wrote before
        # the slot.
        self._calls.signal_wait_until_on_stream(slot, self._at_least, number, stream.cuda_stream)
