"""Sizes of what is on the device for a while, which predictions of memory count too; no torch."""

from __future__ import annotations

LOGITS_BYTES = 2 << 30
"""Bytes of one chunk of the output layer's logits on one rank. The weight's float32 gradient is read and written once
per chunk, so chunks are not small."""
PARKED_TENSORS = 5
"""The tensors of each layer and nano-batch that wait for backward in host memory."""
STAYING_NANO_BATCHES = 2
"""The number of nano-batches of layers whose tensors stay on the device after they were copied to host memory."""
