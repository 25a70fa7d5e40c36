"""Lines that newer versions of megatron-core log, and about which no user of this project can do anything."""

from __future__ import annotations

import logging

_DROPPED = {
    # HybridModel follows it.
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    # It makes the same one itself.
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
    # Of checkpoints that earlier versions wrote.
    "megatron.core.dist_checkpointing.strategies.common": "load_common is deprecated",
}


def drop_log_lines() -> None:
    """Keep these lines out of the log, from now on; harmless to call again."""
    for name in _DROPPED:
        logging.getLogger(name).addFilter(_is_kept)


def _is_kept(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_DROPPED[record.name])
