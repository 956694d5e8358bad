"""`shoal serve`: from flags or a settings file to a running server. The server itself is put together in `shoal.compose`."""

from __future__ import annotations

import argparse

from shoal.cli.common import Commands, integer, judged, number
from shoal.config.flags import settings_for_model, with_server_flags
from shoal.config.loading import load_settings
from shoal.config.settings import BatchingSettings, ModelSettings, QueueSettings, ServerSettings, Settings
from shoal.errors import ConfigError

__all__ = ["add_parser", "run", "settings_from_options"]

_SERVER_FLAGS = (
    "host",
    "http_port",
    "grpc_port",
    "admin_port",
    "stream_port",
    "tls_certificate",
    "tls_key",
    "max_body_bytes",
    "drain_timeout_ms",
    "exit_on_load_error",
)
_MODEL_FLAGS = (
    "instances",
    "threads",
    "max_batch_size",
    "max_delay_ms",
    "oversize",
    "max_queue_rows",
    "default_timeout_ms",
)


def add_parser(commands: Commands) -> None:
    """Add `serve` to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        help="serve a model, or all models of a settings file",
        description="Serve a model over the Open Inference Protocol, gathering concurrent requests into batches.",
        epilog="Flags of [server] may be given together with --config and then go before the file's values. "
        "Stop with Ctrl-C or SIGTERM: what was accepted is answered first; a second signal stops at once.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="an ONNX file, a Python model as file.py:Class or module:object, or the embedded model `digits`",
    )
    parser.add_argument("--config", metavar="FILE", help="settings file (TOML), instead of MODEL")
    _add_model_flags(parser.add_argument_group("the model"))
    _add_server_flags(parser.add_argument_group("the server"))
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run `shoal serve` until it is told to stop. Raises `ConfigError` when flags, settings or model files are wrong."""
    settings = judged(settings_from_options(options), options.config)
    # Loads numpy and the backends, which `shoal check` and `shoal --version` can do without.
    from shoal import compose

    return compose.serve(settings)


def settings_from_options(options: argparse.Namespace) -> Settings:
    """The settings that the parsed words ask for, not yet judged. Raises `ConfigError` for words that contradict each other."""
    server_flags = {name: getattr(options, name) for name in _SERVER_FLAGS}
    model_flags = {name: getattr(options, name) for name in _MODEL_FLAGS}
    if options.config is None:
        if options.model is None:
            raise ConfigError("serve needs a MODEL (try `shoal serve digits`) or --config FILE")
        if options.model.endswith(".toml"):
            raise ConfigError(f"{options.model} is a settings file; use --config {options.model}")
        return settings_for_model(options.model, {**server_flags, **model_flags}, name=options.name)
    if options.model is not None:
        raise ConfigError("give either a MODEL or --config FILE, not both; models of a settings file stand in its [models.NAME]")
    misplaced = ["--" + name.replace("_", "-") for name in ("name", *_MODEL_FLAGS) if getattr(options, name) is not None]
    if misplaced:
        raise ConfigError(f"{', '.join(misplaced)} cannot be used with --config; write it under [models.NAME] in {options.config}")
    return with_server_flags(load_settings(options.config), server_flags)


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    batching, queue, model = BatchingSettings(), QueueSettings(), ModelSettings(path="")
    group.add_argument("--name", metavar="N", help="name in addresses (default: the file's stem, or the class in lower case)")
    group.add_argument(
        "--max-batch-size", metavar="R", type=integer, help=f"most rows in one batch (default {batching.max_batch_size})"
    )
    group.add_argument(
        "--max-delay-ms",
        metavar="D",
        type=number,
        help=f"how long a request may wait for company while an executor is free (default {batching.max_delay_ms:g}: not at all)",
    )
    group.add_argument(
        "--oversize",
        choices=("split", "reject"),
        help=f"requests with more rows than a batch: cut and rejoin, or refuse (default {batching.oversize})",
    )
    group.add_argument(
        "--instances", metavar="N", type=integer, help=f"executors that run batches at the same time (default {model.instances})"
    )
    group.add_argument("--threads", metavar="N", type=integer, help="threads of each instance (default: the CPUs shared out)")
    group.add_argument(
        "--max-queue-rows", metavar="R", type=integer, help=f"rows that may wait; more are refused (default {queue.max_queue_rows})"
    )
    group.add_argument("--default-timeout-ms", metavar="D", type=number, help="timeout of requests that bring none (default: none)")


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    server = ServerSettings()
    later = "reserved: this version has no server on it yet"
    group.add_argument("--host", metavar="H", help=f"address to listen on (default {server.host})")
    group.add_argument("--http-port", metavar="P", type=integer, help=f"default {server.http_port}; 0: any free port")
    group.add_argument("--grpc-port", metavar="P", type=integer, help=f"default {server.grpc_port}; {later}")
    group.add_argument("--admin-port", metavar="P", type=integer, help=f"default {server.admin_port}; {later}")
    group.add_argument("--stream-port", metavar="P", type=integer, help=f"default {server.stream_port}; {later}")
    group.add_argument("--tls-certificate", metavar="FILE", help="PEM certificate chain; with --tls-key serves HTTPS")
    group.add_argument(
        "--exit-on-load-error",
        action="store_const",
        const=True,
        help="end with status 1 when a model cannot be loaded (default: stay, not ready, and say why)",
    )
    group.add_argument("--tls-key", metavar="FILE", help="PEM private key of the certificate")
    group.add_argument(
        "--max-body-bytes", metavar="B", type=integer, help=f"largest request body (default {server.max_body_bytes})"
    )
    group.add_argument(
        "--drain-timeout-ms",
        metavar="D",
        type=number,
        help=f"how long a stopping server goes on answering what it has (default {server.drain_timeout_ms:g})",
    )
