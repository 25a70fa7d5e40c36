"""Transports, which move rows of tensors between ranks."""

from distca.errors import TransportError
from distca.transport.interface import Handle, Part, Transport
from distca.transport.row_moves import RowMoves
from distca.transport.select import TransportName, choose_transport

__all__ = ["Handle", "Part", "RowMoves", "Transport", "TransportError", "TransportName", "choose_transport"]
