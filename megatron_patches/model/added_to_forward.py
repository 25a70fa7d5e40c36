"""Tells what a user added to a module's ``forward``, which is passed over if only parts of the module are called."""

from __future__ import annotations

import torch

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # attributes of a module


def added_to_forward(module: torch.nn.Module) -> str:
    """Returns the words for what a user added to a module's ``forward``; "" without such a change."""
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return "a hook"
    if module._compiled_call_impl is not None:
        return "a compiled forward"
    return "a forward of its own" if "forward" in vars(module) else ""
