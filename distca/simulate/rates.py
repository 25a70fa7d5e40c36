"""The speeds of a GPU that a cost table does not have, fitted to measured runs (benchmarks/calibration.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

from distca.errors import SimulationError
from distca.json_file import read_object

RATES = Path(__file__).parent / "rates_h200.json"
"""The file with the rates of the H200."""


@dataclass(frozen=True)
class Rates:
    """Constants of one kind of GPU.

    Attributes:
        linear_factor: the time of a layer's matrix products in training, over their time in the cost table. There
            products were measured alone.
        attention_factor: the same for core attention.
        head_s: seconds of the output layer and the loss, forward and backward, per row, hidden element and token of the
            vocabulary.
        elementwise_s: seconds per row and element of a layer's norms, activation, rotation and residuals, forward and
            backward. A row counts 2 · hidden + ffn elements.
        rotation_s: further seconds per row and element of q, k and v where their rotation is not fused.
        copy_bytes_per_s: bytes per second of copying rows for the attention kernel; a byte is read and written once.
        optimizer_s: seconds per parameter whose optimizer state is on the rank.
        parameter_s: seconds per parameter of the rank for clearing its gradient, scaling it and computing its norm.
        step_s: constant seconds of a step, in which the host works before the first kernel and after the last one.
        phase_s: constant seconds of one micro-batch's forward, or backward, on a pipeline stage.
        expert_layer_s: seconds in which a GPU waits for the host in each layer with experts and nano-batch, forward and
            backward together. The host learns how many rows each expert has before it launches their products.
    """

    linear_factor: float
    attention_factor: float
    head_s: float
    elementwise_s: float
    rotation_s: float
    copy_bytes_per_s: float
    optimizer_s: float
    parameter_s: float
    step_s: float
    phase_s: float
    expert_layer_s: float


def load_rates(path: str | Path = RATES) -> Rates:
    """Returns the rates in a file that ``benchmarks/calibration.py`` wrote; by default those of the H200.

    Raises:
        SimulationError: the file cannot be read, lacks a rate, or has a rate with an impossible value.
    """
    try:
        content = read_object(path)
        rates = Rates(**{field.name: float(content["rates"][field.name]["value"]) for field in fields(Rates)})
    except OSError as error:
        raise SimulationError(f"`rates` {path} cannot be read ({error.strerror}); give another file.") from None
    except UnicodeDecodeError:
        raise SimulationError(f"`rates` {path} are no text (UTF-8); benchmarks/calibration.py writes them.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise SimulationError(
            f"`rates` {path} lack a number ({error}); benchmarks/calibration.py writes them."
        ) from None
    for name, value in vars(rates).items():
        if not 0 <= value < math.inf or (name == "copy_bytes_per_s" and not value):
            least = "above 0" if name == "copy_bytes_per_s" else "0 or more"
            raise SimulationError(f"`rates` {path} have {name} {value:g}; it must be {least}.")
    return rates
