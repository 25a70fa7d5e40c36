"""DistCA: long-context LLM training by core attention disaggregation.

The names in ``__all__`` are the public API. Importing this package needs numpy only. Each name is imported when it is
first used: it then loads torch, and all but ``serve`` also Megatron-Core.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distca.runtime.attention_server import serve
    from megatron_patches.api import CAD
    from megatron_patches.model.model_options import ModelOptions, QueryScaling, Rotary
    from megatron_patches.ranks.world import join_world, leave_world
    from megatron_patches.steps.per_document import rows_of
    from megatron_patches.steps.step_documents import StepDocuments

__version__ = "0.1.0"
__all__ = [
    "CAD",
    "ModelOptions",
    "QueryScaling",
    "Rotary",
    "StepDocuments",
    "join_world",
    "leave_world",
    "rows_of",
    "serve",
]

# By public name, the module that it is imported from at first use.
_FACE = {
    "CAD": "megatron_patches.api",
    "ModelOptions": "megatron_patches.model.model_options",
    "QueryScaling": "megatron_patches.model.model_options",
    "Rotary": "megatron_patches.model.model_options",
    "StepDocuments": "megatron_patches.steps.step_documents",
    "join_world": "megatron_patches.ranks.world",
    "leave_world": "megatron_patches.ranks.world",
    "rows_of": "megatron_patches.steps.per_document",
    "serve": "distca.runtime.attention_server",
}


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'distca' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_FACE[name]), name)
