"""What a timeout may be."""

from __future__ import annotations

import math


def timeout_problems(timeout_minutes: float) -> list[str]:
    """Returns why these minutes are no timeout; nothing where they are one."""
    number = isinstance(timeout_minutes, int | float) and not isinstance(timeout_minutes, bool)
    if number and 0 < timeout_minutes < math.inf:
        return []
    return [f"timeout_minutes={timeout_minutes!r} must be a number of minutes more than 0"]
