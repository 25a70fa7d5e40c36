"""Moving rows between home ranks and attention servers, behind one interface."""

from distca.transport.choose import choose_transport
from distca.transport.rows import RowMoves
from distca.transport.transport import Handle, Part, Transport, TransportError

__all__ = ["Handle", "Part", "RowMoves", "Transport", "TransportError", "choose_transport"]
