"""Arrays of several uploads arrive, while memory of earlier ones is used again and the GPU is behind the host."""

import numpy as np
import torch

from distca.device.host_to_device import uploading


def test_uploads_behind_a_busy_gpu_keep_their_values():
    rng = np.random.default_rng(1)
    busy = torch.randn(8192, 8192, device="cuda")
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    expected = []
    for _ in range(20):
        busy = busy @ busy * 1e-4
        arrays = [rng.integers(0, 1 << 40, size) for size in rng.integers(0, 200_000, 30)]
        with uploading("cuda") as upload:
            tensors = [upload.add(array) for array in arrays]
        expected.append(sum(int(array.sum()) for array in arrays))
        wrong += abs(sum(tensor.sum() for tensor in tensors) - expected[-1])
    assert wrong.item() == 0
