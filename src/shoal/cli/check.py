"""`shoal check FILE`: is this settings file right, and what is in force with it? Loads no model."""

from __future__ import annotations

import argparse

from shoal.cli.common import Commands, judged
from shoal.config.effective import effective
from shoal.config.loading import load_settings

__all__ = ["add_parser", "run"]


def add_parser(commands: Commands) -> None:
    """Add `check` to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "check",
        help="check a settings file and print the settings in force",
        description="Check a settings file: names, types, and rules between settings. "
        "Prints the settings in force; loads no model. "
        "Exit status 0 when the file is right (warnings go to stderr), 2 when it is not.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", help="settings file, TOML")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `shoal check`. Raises `ConfigError` when the file is wrong."""
    print(effective(judged(load_settings(options.file), options.file)))
    return 0
