"""Sizes of buffers on a device, shared by the code that allocates them and by predictions of memory; without torch."""

from __future__ import annotations

LOGITS_BYTES = 2 << 30
"""Bytes of logits that one rank computes at once, a chunk of rows. Each chunk reads and writes the whole float32
gradient of the output layer's weight, so smaller chunks would take longer."""
PARKED_TENSORS = 5
"""The number of tensors for each layer and nano-batch that wait for backward in host memory, with ``offload``."""
STAYING_NANO_BATCHES = 2
"""The number of latest pairs of layer and nano-batch whose tensors stay on the device after their copy to the host."""
