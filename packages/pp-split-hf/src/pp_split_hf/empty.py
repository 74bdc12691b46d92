"""Construction of a model without its weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """Put every parameter that is registered inside the context on the meta device.

    Buffers stay real: rotary tables and the like are not in checkpoints and would be lost. A
    parameter that two modules share stays one parameter, so a tie is still a tie. It acts on the
    whole process while it is open, through torch's own registration hook.

    Example:
        >>> with init_empty_weights():
        ...     model = AutoModelForCausalLM.from_config(config)
    """

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.device.type == "meta":
            return None  # None keeps what is being registered
        empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        empty.__dict__.update(parameter.__dict__)
        return empty

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()
