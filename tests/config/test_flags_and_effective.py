"""Settings from flags, and settings as text."""

from __future__ import annotations

import pytest

from shoal.config.checks import check_settings
from shoal.config.effective import effective, startup_lines
from shoal.config.flags import default_model_name, settings_for_model, with_server_flags
from shoal.config.settings import BatchingSettings, ModelSettings, QueueSettings, ServerSettings, Settings


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("digits", "digits"),
        ("path/to/resnet50.onnx", "resnet50"),
        ("my model (v2).onnx", "my-model-v2"),
        ("v1.2.onnx", "v1.2"),
        ("models.py:Sentiment", "sentiment"),
        ("package.module:Outer.Inner", "inner"),
        ("package.module:classify", "classify"),
        ("ü.onnx", "model"),
    ],
)
def test_the_default_name_comes_from_the_file_or_the_class(model: str, name: str) -> None:
    """File stem, or class in lower case; always a name that may stand in an address."""
    assert default_model_name(model) == name
    settings = settings_for_model("digits", {}, name=name)
    assert check_settings(settings) == []


def test_flags_land_in_their_sections() -> None:
    """Each flag sets the setting of its name; flags that were not given (None) leave the default."""
    flags = {
        "max_batch_size": 8,
        "max_delay_ms": 1.5,
        "http_port": 0,
        "threads": 2,
        "max_queue_rows": 9,
        "host": None,
        "oversize": None,
    }
    assert settings_for_model("a/b.onnx", flags) == Settings(
        server=ServerSettings(http_port=0),
        models={
            "b": ModelSettings(
                path="a/b.onnx",
                threads=2,
                batching=BatchingSettings(max_batch_size=8, max_delay_ms=1.5),
                queue=QueueSettings(max_queue_rows=9),
            )
        },
    )


def test_an_empty_name_is_kept_for_the_checks() -> None:
    """`--name ""` is a mistake to be told, not a wish for the default."""
    assert list(settings_for_model("digits", {}, name="").models) == [""]


def test_a_flag_without_a_setting_is_a_programming_error() -> None:
    """A flag that no section has must not be dropped in silence."""
    with pytest.raises(TypeError, match="colour"):
        settings_for_model("digits", {"colour": 1})


def test_server_flags_go_before_the_file() -> None:
    """With a settings file, given flags replace values of [server], everything else stays."""
    base = Settings(server=ServerSettings(http_port=1, host="h"), models={"m": ModelSettings(path="digits")})
    assert with_server_flags(base, {"http_port": 2, "host": None}).server == ServerSettings(http_port=2, host="h")
    assert with_server_flags(base, {"http_port": None}) is base


def test_names_of_settings_are_unique_over_the_sections() -> None:
    """Flags are mapped to sections by name alone, so no name of a flag may stand in two sections."""
    kinds = (ServerSettings, ModelSettings, BatchingSettings, QueueSettings)
    names = [name for kind in kinds for name in kind.__struct_fields__]
    assert sorted(names) == sorted(set(names))


def test_effective_settings_show_every_model_and_default() -> None:
    """The text names what is in force, set or not, with units."""
    settings = Settings(
        server=ServerSettings(http_port=0, overload_status=503),
        models={
            "a": ModelSettings(path="digits"),
            "b": ModelSettings(
                path="/m/b.onnx",
                version="3",
                instances=2,
                threads=1,
                stage=False,
                probe=False,
                batching=BatchingSettings(
                    max_batch_size=8,
                    max_delay_ms=2.5,
                    preferred_batch_sizes=(4, 8),
                    allowed_batch_sizes=(1, 2, 4, 8),
                    oversize="reject",
                    reorder=True,
                ),
                queue=QueueSettings(
                    max_queue_requests=10,
                    max_queue_rows=None,
                    max_queue_bytes=1536,
                    default_timeout_ms=1500,
                    allow_timeout_override=False,
                    timeout_action="delay",
                    slo_ms=50,
                    priority_levels=3,
                    default_priority=2,
                ),
            ),
            "c": ModelSettings(path="digits", queue=QueueSettings(max_queue_rows=None, max_queue_bytes=None)),
        },
    )
    assert effective(settings).splitlines() == [
        "server",
        "  address    127.0.0.1, HTTP port chosen by the system (set aside: gRPC 8001, admin 8002, stream 8003)",
        "  TLS        off",
        "  limits     body 64 MiB, header 64 KiB, 10000 connections, 64 pipelined requests each, write buffer 4 MiB",
        "  timeouts   header 10 s, body 60 s, idle 75 s, drain 30 s",
        "  overload   status 503, ready while queues are full, ready only with every model",
        "model a (version 1): digits (embedded)",
        "  execution  in threads (on the event loop if that is cheaper), 1 instance, "
        "threads each: its share of the CPUs, one batch staged",
        "  batching   fixed, up to 64 rows, no delay (whenever an executor is free, what waits runs together), "
        "larger requests are split",
        "  queue      at most 4096 rows, 1 GiB",
        "  deadlines  no default timeout, requests may set their own, expired requests fail",
        "model b (version 3): /m/b.onnx",
        "  execution  in threads (on the event loop if that is cheaper), 2 instances, "
        "threads each: 1, nothing staged, load-time probe off",
        "  batching   fixed, up to 8 rows, at most 2.5 ms delay, preferred sizes 4/8, allowed sizes 1/2/4/8, "
        "larger requests are refused, reordering for equal shapes",
        "  queue      at most 10 requests, 1536 bytes, 3 priority levels (default 2)",
        "  deadlines  default timeout 1.5 s, requests may not set their own, "
        "expired requests go behind all others, objective 50 ms",
        "model c (version 1): digits (embedded)",
        "  execution  in threads (on the event loop if that is cheaper), 1 instance, "
        "threads each: its share of the CPUs, one batch staged",
        "  batching   fixed, up to 64 rows, no delay (whenever an executor is free, what waits runs together), "
        "larger requests are split",
        "  queue      no bound",
        "  deadlines  no default timeout, requests may set their own, expired requests fail",
    ]


def test_start_up_lines_tell_ports_models_and_the_sum_of_threads() -> None:
    """The port is the one that was bound, the thread budget is summed over all instances of all models (case 16)."""
    settings = Settings(
        server=ServerSettings(http_port=0, host="::1", tls_certificate="c", tls_key="k"),
        models={"a": ModelSettings(path="digits"), "b": ModelSettings(path="digits", instances=3)},
    )
    lines = startup_lines(settings, {"a": 2, "b": 1}, {"http": 4711}, cpu_count=8)
    assert lines[0] == "http listening on https://[::1]:4711"
    assert [line for line in lines if line.startswith("model ")] == [
        "model a (version 1): digits (embedded)",
        "model b (version 1): digits (embedded)",
    ]
    assert lines[-1] == "threads: 5 for models on 8 CPUs (a 1 x 2, b 3 x 1)"
    assert not any("8001" in line for line in lines)
