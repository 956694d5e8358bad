"""Rules between settings: each broken one is found, placed, and told with what to change."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.config.checks import Problem, check_settings, errors_of, warnings_of
from shoal.config.settings import BatchingSettings, LevelSettings, ModelSettings, QueueSettings, ServerSettings, Settings


def with_model(name: str = "m", **parts: Any) -> Settings:
    """Settings of one model that exists."""
    return Settings(models={name: ModelSettings(**{"path": "digits", **parts})})


def with_batching(**batching: Any) -> Settings:
    """Settings of one model with this batching."""
    return with_model(batching=BatchingSettings(**batching))


def with_queue(*, max_delay_ms: float = 0.0, **queue: Any) -> Settings:
    """Settings of one model with this queue."""
    return with_model(batching=BatchingSettings(max_delay_ms=max_delay_ms), queue=QueueSettings(**queue))


def with_server(**server: Any) -> Settings:
    """Settings with this server and a model that is right."""
    return msgspec.structs.replace(with_model(), server=ServerSettings(**server))


def only(problems: list[Problem]) -> tuple[str, str, str]:
    """The single problem's severity, place and message."""
    (problem,) = problems
    return problem.severity, problem.where, problem.message


def test_defaults_are_right() -> None:
    """The embedded model with nothing else set has no problem at all."""
    assert check_settings(with_model("digits"), cpu_count=1) == []


def test_no_model_is_an_error() -> None:
    """A server of nothing is not meant."""
    assert only(check_settings(Settings())) == (
        "error",
        "models",
        'no model is set up; add a table [models.NAME] with path = "..."',
    )


@pytest.mark.parametrize(
    ("settings", "where", "message"),
    [
        (with_batching(max_batch_size=0), "models.m.batching.max_batch_size", "is 0, must be 1 or more"),
        (with_batching(max_batch_size=-3), "models.m.batching.max_batch_size", "is -3, must be 1 or more"),
        (with_batching(max_delay_ms=-1), "models.m.batching.max_delay_ms", "is -1, must be 0 or more"),
        (with_batching(max_delay_ms=math.inf), "models.m.batching.max_delay_ms", "is inf, must be a finite number of milliseconds"),
        (with_batching(max_delay_ms=math.nan), "models.m.batching.max_delay_ms", "is nan, must be a finite number of milliseconds"),
        (
            with_batching(max_delay_ms=1e9),
            "models.m.batching.max_delay_ms",
            "is 1e+09 ms, more than a day; times are in milliseconds",
        ),
        (
            with_batching(max_batch_cost=0.5),
            "models.m.batching.max_batch_cost",
            "is 0.5, must be a finite number of 1 or more: a single row costs that much",
        ),
        (
            with_batching(cost="tokens"),
            "models.m.batching.cost",
            'is "tokens", but no input has a length policy that puts rows of different length into one batch; see lengths',
        ),
        (
            with_batching(cost="words", max_batch_cost=9),
            "models.m.batching.cost",
            'is \'words\', must be "rows", "tokens", or module:function',
        ),
        (with_batching(margin_sigmas=-1), "models.m.batching.margin_sigmas", "is -1, must be within 0…6"),
        (with_batching(margin_sigmas=math.nan), "models.m.batching.margin_sigmas", "is nan, must be within 0…6"),
        (with_batching(length_window=0), "models.m.batching.length_window", "is 0, must be 1 or more"),
        (
            with_batching(early_drop=True, order="arrival"),
            "models.m.batching.order",
            'is "arrival", but early_drop works on deadlines; leave order out, or set early_drop = false',
        ),
        (
            with_queue(aging_ms=0, priority_levels=2),
            "models.m.queue.aging_ms",
            "is 0, must be more than 0; leave it out for its default",
        ),
        (with_queue(max_tenants=0), "models.m.queue.max_tenants", "is 0, must be 1 or more"),
        (
            with_queue(tenant_weights={"a": 0.0}),
            "models.m.queue.tenant_weights",
            "gives 'a' the weight 0, must be a finite number above 0",
        ),
        (
            with_queue(tenant_weights={"a": -1.0}),
            "models.m.queue.tenant_weights",
            "gives 'a' the weight -1, must be a finite number above 0",
        ),
        (
            with_queue(tenant_weights={"": 1.0}),
            "models.m.queue.tenant_weights",
            "has the name ''; tenants are named with 1 to 128 characters",
        ),
        (
            with_queue(levels={2: LevelSettings()}),
            "models.m.queue.levels.2",
            "there is no such level; levels are 1…priority_levels (1)",
        ),
        (
            with_queue(levels={1: LevelSettings(max_queue_rows=0)}),
            "models.m.queue.levels.1.max_queue_rows",
            "is 0, must be 1 or more",
        ),
        (
            with_queue(levels={1: LevelSettings(default_timeout_ms=-1)}),
            "models.m.queue.levels.1.default_timeout_ms",
            "is -1, must be 0 or more",
        ),
        (
            with_batching(max_batch_size=8, max_delay_ms=1, preferred_batch_sizes=(4, 16)),
            "models.m.batching.preferred_batch_sizes",
            "16 lies outside 1…8; remove them, or raise max_batch_size",
        ),
        (
            with_batching(max_delay_ms=1, preferred_batch_sizes=(8, 4, 4)),
            "models.m.batching.preferred_batch_sizes",
            "is [8, 4, 4], must rise without repeats: write [4, 8]",
        ),
        (
            with_batching(max_batch_size=8, allowed_batch_sizes=(0, 8)),
            "models.m.batching.allowed_batch_sizes",
            "0 lies outside 1…8; remove them, or raise max_batch_size",
        ),
        (
            with_batching(allowed_batch_sizes=(64, 1)),
            "models.m.batching.allowed_batch_sizes",
            "is [64, 1], must rise without repeats: write [1, 64]",
        ),
        (with_queue(max_queue_requests=0), "models.m.queue.max_queue_requests", "is 0, must be 1 or more"),
        (with_queue(max_queue_rows=0), "models.m.queue.max_queue_rows", "is 0, must be 1 or more"),
        (with_queue(max_queue_bytes=-1), "models.m.queue.max_queue_bytes", "is -1, must be 1 or more"),
        (
            with_queue(max_delay_ms=5, slo_ms=5),
            "models.m.queue.slo_ms",
            "is 5, must be more than max_delay_ms = 5: the objective could never be met; raise it, or lower max_delay_ms",
        ),
        (
            with_queue(max_delay_ms=5, default_timeout_ms=4),
            "models.m.queue.default_timeout_ms",
            "is 4, must be more than max_delay_ms = 5: lone requests would always expire; raise it, or lower max_delay_ms",
        ),
        (with_queue(slo_ms=0), "models.m.queue.slo_ms", "is 0, must be more than 0; leave it out for its default"),
        (
            with_queue(default_timeout_ms=math.nan),
            "models.m.queue.default_timeout_ms",
            "is nan, must be a finite number of milliseconds",
        ),
        (with_queue(priority_levels=0), "models.m.queue.priority_levels", "is 0, must be 1 or more"),
        (
            with_queue(priority_levels=3, default_priority=4),
            "models.m.queue.default_priority",
            "is 4, must be within 1…priority_levels (3); 1 is the highest",
        ),
        (
            with_queue(default_priority=0),
            "models.m.queue.default_priority",
            "is 0, must be within 1…priority_levels (1); 1 is the highest",
        ),
        (with_model(instances=0), "models.m.instances", "is 0, must be 1 or more"),
        (with_model(threads=0), "models.m.threads", "is 0, must be 1 or more"),
        (with_model(version="a/b"), "models.m.version", "is 'a/b', must be a short word such as \"1\": it is part of addresses"),
        (
            with_model(path=" "),
            "models.m.path",
            "is empty, must name an ONNX file, file.py:Class, module:object, or an embedded model such as digits",
        ),
        (with_model(path="no/such.onnx"), "models.m.path", "there is no file 'no/such.onnx'; embedded models: digits"),
        (with_model(path="no/such.py:Class"), "models.m.path", "there is no file 'no/such.py'; embedded models: digits"),
        (
            with_model(path=str(Path(__file__).parent)),
            "models.m.path",
            f"{str(Path(__file__).parent)!r} is a folder; give the model's file in it",
        ),
        (
            with_model(path=__file__),
            "models.m.path",
            f"{__file__!r} is a Python file; name the class or function in it too: test_checks.py:Class",
        ),
        (with_model(path="a\0b"), "models.m.path", "holds a NUL character"),
        (with_server(http_port=65_536), "server.http_port", "is 65536, must be within 0…65535 (0 lets the system choose)"),
        (with_server(stream_port=-1), "server.stream_port", "is -1, must be within 0…65535 (0 lets the system choose)"),
        (
            with_server(admin_port=8000),
            "server.admin_port",
            "is 8000, which http_port has already; give each its own port, or 0 to let the system choose",
        ),
        (
            with_server(overload_status=500),
            "server.overload_status",
            "is 500, must be 429 (the default) or 503 (as Triton answers)",
        ),
        (with_server(max_body_bytes=0), "server.max_body_bytes", "is 0, must be 1 or more"),
        (with_server(max_header_bytes=10), "server.max_header_bytes", "is 10, must be 256 or more"),
        (with_server(max_connections=0), "server.max_connections", "is 0, must be 1 or more"),
        (with_server(max_pipelined_requests=0), "server.max_pipelined_requests", "is 0, must be 1 or more"),
        (with_server(write_buffer_bytes=0), "server.write_buffer_bytes", "is 0, must be 1 or more"),
        (with_server(header_timeout_ms=0), "server.header_timeout_ms", "is 0, must be more than 0; leave it out for its default"),
        (with_server(drain_timeout_ms=-1), "server.drain_timeout_ms", "is -1, must be 0 or more"),
        (
            with_server(host="http://x"),
            "server.host",
            "is 'http://x', must be an address or a host name without a scheme or a path",
        ),
        (
            with_server(host=""),
            "server.host",
            "is '', must be an address or a host name, such as 127.0.0.1, or 0.0.0.0 for all interfaces",
        ),
    ],
)
def test_each_broken_rule_is_one_error(settings: Settings, where: str, message: str) -> None:
    """Exactly one error, at the right setting, saying what is wrong and what would be right."""
    assert only(check_settings(settings)) == ("error", where, message)


@pytest.mark.parametrize(
    ("settings", "where", "words"),
    [
        (with_queue(max_queue_rows=32), "models.m.queue.max_queue_rows", "less than max_batch_size = 64"),
        (with_queue(max_queue_bytes=1000), "models.m.queue.max_queue_bytes", "less than server.max_body_bytes = 67108864"),
        (with_queue(slo_ms=100), "models.m.queue.slo_ms", "has no effect: nothing acts on it"),
        (with_queue(allow_timeout_override=False), "models.m.queue.allow_timeout_override", "no request ever times out"),
        (with_batching(preferred_batch_sizes=(4,)), "models.m.batching.preferred_batch_sizes", "no effect while max_delay_ms = 0"),
        (
            with_batching(mode="adaptive", max_delay_ms=5),
            "models.m.batching.max_delay_ms",
            "longest that a request may be held back",
        ),
        (with_batching(mode="adaptive", preferred_batch_sizes=(4,)), "models.m.batching.preferred_batch_sizes", "finds the size"),
        (with_batching(max_batch_cost=8), "models.m.batching.max_batch_cost", "less than max_batch_size = 64, which it replaces"),
        (with_batching(cost="costs:of"), "models.m.batching.cost", "max_batch_cost sets no budget for it"),
        (with_queue(aging_ms=5), "models.m.queue.aging_ms", "has little use with one priority level"),
        (
            with_queue(max_queue_requests=5, levels={1: LevelSettings(max_queue_requests=6)}),
            "models.m.queue.levels.1.max_queue_requests",
            "more than max_queue_requests = 5 of the whole queue",
        ),
        (with_model(instances=2, threads=2), "models", "ask for 4 threads, but the process may use 3 CPUs"),
    ],
)
def test_what_works_but_is_hardly_meant_is_a_warning(settings: Settings, where: str, words: str) -> None:
    """Warnings do not keep the server from starting, and say what to change."""
    problems = check_settings(settings, cpu_count=3)
    assert errors_of(problems) == []
    (warning,) = warnings_of(problems)
    assert (warning.where, words in warning.message) == (where, True)
    assert str(warning) == f"warning: {where}: {warning.message}"


def test_a_timeout_below_the_objective_is_a_warning() -> None:
    """Requests that end before their objective can be missed make the objective pointless."""
    messages = {problem.where: problem.message for problem in check_settings(with_queue(slo_ms=100, default_timeout_ms=50))}
    assert messages["models.m.queue.default_timeout_ms"] == "is 50, less than slo_ms = 100: requests end before it"


@pytest.mark.parametrize("name", ["", "a b", "a/b", "../x", ".hidden", "-x", "ü", "a?b", "a\nb", "x" * 129])
def test_names_that_cannot_be_part_of_an_address(name: str) -> None:
    """Model names stand in URLs; anything that would need quoting is refused."""
    severity, _, message = only(check_settings(with_model(name)))
    assert severity == "error" and message.startswith("the model name must be 1 to 128 letters")


@pytest.mark.parametrize("name", ["digits", "ResNet-50", "a.b_c", "1", "x" * 128])
def test_names_that_are_fine(name: str) -> None:
    """What file stems and class names look like is accepted."""
    assert check_settings(with_model(name)) == []


def test_the_name_of_an_address_is_taken() -> None:
    """`/v2/models/stats` means all models, so no model may be called so."""
    assert only(check_settings(with_model("stats")))[0] == "error"


def test_names_that_differ_in_case_only_are_warned_of() -> None:
    """`Digits` beside `digits` works, but will be mixed up."""
    model = ModelSettings(path="digits")
    severity, where, message = only(check_settings(Settings(models={"digits": model, "Digits": model})))
    assert (severity, where) == ("warning", "models.Digits")
    assert "'digits'" in message


def test_tls_needs_both_files_and_they_must_exist(tmp_path: Path) -> None:
    """One of the two alone is an error at the missing one; files that are not there are named; both there is right."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.touch()
    assert [problem.where for problem in check_settings(with_server(tls_certificate=str(certificate)))] == ["server.tls_key"]
    assert [problem.where for problem in check_settings(with_server(tls_certificate=str(certificate), tls_key=str(key)))] == [
        "server.tls_key"
    ]
    assert [problem.where for problem in check_settings(with_server(tls_key=str(certificate)))] == ["server.tls_certificate"]
    key.touch()
    assert check_settings(with_server(tls_certificate=str(certificate), tls_key=str(key))) == []


def test_port_zero_may_repeat() -> None:
    """0 means any free port, so several may be 0."""
    assert check_settings(with_server(http_port=0, grpc_port=0, admin_port=0, stream_port=0)) == []


def test_errors_come_before_warnings_and_all_are_given() -> None:
    """One call shows everything, over all models, errors first."""
    settings = Settings(
        server=ServerSettings(overload_status=1),
        models={
            "a": ModelSettings(path="digits", batching=BatchingSettings(preferred_batch_sizes=(4,))),
            "b": ModelSettings(path="digits", instances=0),
        },
    )
    problems = check_settings(settings)
    assert [(problem.severity, problem.where) for problem in problems] == [
        ("error", "server.overload_status"),
        ("error", "models.b.instances"),
        ("warning", "models.a.batching.preferred_batch_sizes"),
    ]


def test_python_models_are_accepted_unopened(tmp_path: Path) -> None:
    """A Python file needs to exist, a module is looked for only when it is loaded."""
    file = tmp_path / "model.py"
    file.write_text("raise SystemExit('opened')\n")
    assert check_settings(with_model(path=f"{file}:Model")) == []
    assert check_settings(with_model(path="surely.not.there:Model")) == []
