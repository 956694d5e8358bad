"""What a request costs, by a function of the operator's (`cost = "module:function"`): found at load, asked for each request."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from shoal.backends.python_import import import_target
from shoal.errors import ClientError, ConfigError, ModelFailed

__all__ = ["Cost", "checked_cost", "load_cost"]

Cost = Callable[[Mapping[str, tuple[int, ...]], Mapping[str, Any]], float]
"""From the shapes of a request's inputs (by name, the batch first) and its custom parameters to its cost, a number above 0."""


def load_cost(target: str) -> Cost:
    """The function that `target` names. Raises ConfigError where there is none."""
    function = import_target(target).target
    if not callable(function):
        raise ConfigError(f"{target}: is a {type(function).__name__}, but the cost must be a function of (shapes, parameters)")
    return function  # type: ignore[no-any-return]


def checked_cost(name: str, give: Callable[[], Any]) -> float:
    """What a cost function gives, if it is a number above 0; `name` is what it is called in messages.

    Raises ModelFailed for anything else and for whatever it raises, but for a `ClientError`, which it raises on purpose.
    """
    try:
        cost = give()
    except ClientError:
        raise
    except Exception as error:
        raise ModelFailed(f"{name} raised {type(error).__name__}: {error}") from error
    if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 < cost < math.inf:
        raise ModelFailed(f"{name} gave {cost!r}, but a cost is a finite number above 0")
    return float(cost)
