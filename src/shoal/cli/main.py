"""The `shoal` command: words of the command line to settings, and settings to the right entry point. No logic of its own.

Start-up must be quick, so nothing heavy (numpy, ONNX Runtime) is imported here; each command imports what it needs when it runs.
People's mistakes end in one clear line per problem on stderr and exit status 2, never in a traceback.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

from shoal import __version__
from shoal.cli import check, serve
from shoal.errors import ConfigError, ShoalError

__all__ = ["build_parser", "main"]

EXIT_USAGE = 2
"""The command line, a settings file or a model file is wrong."""
EXIT_FAILED = 1
"""The system would not let us: a port in use, no permission."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these words (default: the process's own) and return its exit status."""
    try:
        options = build_parser().parse_args(arguments)
        status: int = options.run(options)
    except ConfigError as error:
        _complain(error.message)
        return EXIT_USAGE
    except ShoalError as error:
        _complain(error.message)
        return EXIT_FAILED
    except BrokenPipeError:
        # The reader of our output went away (`shoal check … | head`). Nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        _complain(str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130
    return status


def build_parser() -> argparse.ArgumentParser:
    """The whole command line, for `main` and for documentation."""
    parser = argparse.ArgumentParser(
        prog="shoal", description="Dynamic-batching inference server: many small requests move as one.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    serve.add_parser(commands)
    check.add_parser(commands)
    if importlib.util.find_spec("shoal.cli.simulate") is not None:
        importlib.import_module("shoal.cli.simulate").add_parser(commands)
    return parser


def _complain(message: str) -> None:
    for line in message.splitlines() or [""]:
        print(f"shoal: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
