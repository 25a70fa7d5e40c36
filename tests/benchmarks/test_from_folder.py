"""The made-up folders are those of the models that they stand for."""

import math

import pytest

from benchmarks.from_folder import SHAPES
from distca.models.description import ModelDescription, describe
from distca.models.exported_config import config_fields
from distca.models.layout import expected_shapes


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shapes_config_describes_it(shape):
    model = ModelDescription(**SHAPES[shape])
    described = describe(config_fields(model, "bfloat16", {}), "config.json")
    assert described == ModelDescription(**(SHAPES[shape] | {"dtype": "bfloat16"}))


def test_llama_1b_has_as_many_weights_as_llama_3_2():
    shapes = expected_shapes(ModelDescription(**SHAPES["llama-1b"]))
    assert sum(map(math.prod, shapes.values())) == 1_235_814_400
