"""Names of settings in messages: lower layers name their own parameters, in backquotes, and know no settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from distca.errors import DistcaError
from distca.words import rename_parameters

SETTINGS = {
    "bad": "data.bad",
    "backward": "cad.backward",
    "begin_token": "data.begin_token",
    "cache": "data.cache",
    "conversations": "data.conversations",
    "context_length": "data.context_length",
    "cost_table": "cad.cost_table",
    "end_token": "data.end_token",
    "field": "data.field",
    "fp8": "train.fp8",
    "fp8_recipe": "train.fp8",
    "kernel": "cad.kernel",
    "linears": "train.linears",
    "longer": "data.longer",
    "micro_batches": "train.micro_batches",
    "moments": "train.moments",
    "nvshmem_buffer_gb": "EXPERIMENT_NVSHMEM_BUFFER_SIZE_GB (cad.nvshmem_buffer_gb)",
    "path": "data.path",
    "seed": "data.seed",
    "servers": "SERVERS (cad.servers)",
    "server_gb_s": "cad.server_gb_s",
    "speeds": "cad.speeds",
    "source": "data.source",
    "tokenizer": "data.tokenizer",
    "tokens_per_rank": "data.tokens_per_rank",
    "ranks_per_node": "cad.ranks_per_node",
    "tolerance": "cad.tolerance",
    "tp": "parallel.tp",
    "transport": "cad.transport",
    "validation_fraction": "data.validation_fraction",
    "vocabulary": "data.vocabulary",
}
"""The setting that a run gives each parameter of a lower layer by."""
_VALUES = {"tensorwise": "current", "delayed": "delayed", "blockwise": "blockwise"}
"""The setting train.fp8 for each value of Megatron's ``fp8_recipe``."""


def with_settings(message: str) -> str:
    """The message with the names of settings, and their values, in place of what is in backquotes."""
    return rename_parameters(message, (SETTINGS | _VALUES).get)


@contextmanager
def settings_named() -> Iterator[None]:
    """Errors that leave the context name settings in place of parameters."""
    try:
        yield
    except DistcaError as error:
        error.args = (with_settings(str(error)), *error.args[1:])
        raise
