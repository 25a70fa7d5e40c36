"""How fast a GPU is at what a cost table does not say, fitted to measured runs (benchmarks/calibration.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

from distca.errors import SimulationError
from distca.json_file import read_object

RATES = Path(__file__).parent / "rates_h200.json"


@dataclass(frozen=True)
class Rates:
    """Constants of one kind of GPU.

    Attributes:
        linear_factor: time of a layer's matrix products in training over that in the cost table, whose products run
            alone.
        attention_factor: the same for core attention.
        head_s: seconds per row, hidden element and row of the vocabulary of the output layer with its loss: forward and
            both products of backward.
        elementwise_s: seconds per row and element of what a layer does beside products, forward and backward: norms,
            activation, rotation, residuals. A row has 2 · hidden + ffn elements.
        rotation_s: seconds more per row and element of q, k and v where their rotation is no kernel of its own.
        copy_bytes_per_s: of rows that are put together for the attention kernel, read and written once.
        optimizer_s: seconds per parameter whose optimizer state is on the rank.
        parameter_s: seconds per parameter of the rank, for clearing, scaling and measuring its gradient.
        step_s: seconds of a step that depend on nothing: the host's, before the first kernel and after the last.
        phase_s: the same of a pipeline's forward or backward of one micro-batch.
        expert_weight_s: seconds per weight of the GPU's experts in which it waits for the host, which launches their
            products and gradients one by one; of each layer and nano-batch, forward and backward.
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
    expert_weight_s: float


def load_rates(path: str | Path = RATES) -> Rates:
    """Constants from a file that ``benchmarks/calibration.py`` wrote, by default the shipped ones of the H200.

    Raises:
        SimulationError: there is no such file, or it lacks a constant, or has one that cannot be.
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
