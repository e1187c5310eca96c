"""Global hooks and torch modes that change all that torch computes in a call."""

from __future__ import annotations

from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hf_paged.errors import Reason
from hf_paged.guards.hints import REMOVE_HOOK


def global_state_reason() -> Reason | None:
    """Return why global hooks or modes keep the engine from computing as stock would, or None."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return Reason("global forward hooks are registered", remedy=REMOVE_HOOK)
    for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()):
        if type(mode) is not DeviceContext:  # a default device, which the engine keeps off its own tensors
            return Reason("a {} is active, which sees or changes every function of torch", type(mode).__qualname__,
                          remedy="Leave the torch mode (`with` block) before generating.")
    return None
