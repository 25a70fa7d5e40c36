"""Tells what a user added to a module's ``forward``, such as a hook.

Code that calls only parts of the module would skip such an addition.
"""

from __future__ import annotations

import torch


def added_to_forward(module: torch.nn.Module) -> str:
    """Returns the words for what a user added to a module's ``forward``; "" without such a change."""
    # This runs for all experts' linear layers while the device waits for the host. ``vars`` has the fastest look-ups.
    own = vars(module)
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return "a hook"
    if module._compiled_call_impl is not None:
        return "a compiled forward"
    return "a forward of its own" if "forward" in own else ""
