"""Several arrays in one upload arrive as single copies do."""

import numpy as np
import pytest
import torch

from distca.device.host_to_device import Upload, to_device, uploading

ARRAYS = [
    np.arange(1000) * 10**12,
    np.array([3, 1, 2], np.int32),
    np.zeros(0, np.int64),
    np.arange(7) % 2 == 0,
    np.arange(600, dtype=np.int64).reshape(200, 3),
    np.arange(40)[::3],
    np.arange(3, dtype=np.float64) / 7,
]


@pytest.mark.parametrize("first_bytes", [1, 100, 5000, 1 << 20])
def test_arrays_keep_values_dtypes_and_shapes_in_any_number_of_chunks(first_bytes):
    upload = Upload("cpu", first_bytes)
    tensors = [to_device(array, upload) for array in ARRAYS]
    upload.send()
    for array, tensor in zip(ARRAYS, tensors, strict=True):
        alone = to_device(array, "cpu")
        assert tensor.dtype == alone.dtype and torch.equal(tensor, alone)
        assert tensor.data_ptr() % 16 == 0


def test_arrays_may_change_after_they_were_added_and_before_they_are_sent():
    array = np.arange(5)
    with uploading("cpu") as upload:
        tensor = to_device(array, upload)
        array[:] = 0
    assert tensor.tolist() == [0, 1, 2, 3, 4]


def test_one_transfer_for_many_arrays():
    with uploading("cpu") as upload:
        tensors = [upload.add(np.full(10, number)) for number in range(300)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


def test_an_upload_that_was_begun_elsewhere_is_sent_there():
    with uploading("cpu") as outer:
        with uploading(outer) as inner:
            tensor = inner.add(np.arange(3))
        outer.add(np.arange(4))
    assert inner is outer and tensor.tolist() == [0, 1, 2]
    with pytest.raises(AssertionError):
        outer.add(np.arange(3))
