"""What several commands share: types of flags, and judging settings before anything starts."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from shoal.backends.threads import cpu_budget
from shoal.config.checks import check_settings, errors_of
from shoal.config.settings import Settings
from shoal.errors import ConfigError

__all__ = ["Commands", "integer", "judged", "number"]

Commands = Any
"""What `add_subparsers` returns; argparse keeps its class private."""


def integer(text: str) -> int:
    """An argparse type: a whole number, with a message that says so."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """An argparse type: a number, with a message that says so."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def judged(settings: Settings, source: str | None = None) -> Settings:
    """The settings, if nothing is wrong with them; warnings go to stderr.

    Raises `ConfigError` with one line per broken rule. `source` (the settings file) is put before each.
    """
    prefix = "" if source is None else f"{source}: "
    problems = check_settings(settings, cpu_count=cpu_budget().cpus)
    for problem in problems:
        if problem.severity == "warning":
            print(f"shoal: warning: {prefix}{problem.where}: {problem.message}", file=sys.stderr)
    errors = errors_of(problems)
    if errors:
        raise ConfigError("\n".join(f"{prefix}{problem.where}: {problem.message}" for problem in errors))
    return settings
