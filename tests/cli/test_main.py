"""The `shoal` command: words to settings, mistakes to one clear line and status 2, nothing heavy loaded on the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal import __version__
from shoal.cli.main import build_parser, main
from shoal.cli.serve import settings_from_options
from shoal.config.settings import BatchingSettings, ModelSettings, QueueSettings, ServerSettings, Settings

GOOD = '[models.digits]\npath = "digits"\n[models.digits.batching]\nmax_delay_ms = 2\n'


def served(*words: str) -> Settings:
    """The settings that `shoal serve WORDS` asks for."""
    return settings_from_options(build_parser().parse_args(["serve", *words]))


def test_serve_with_every_flag() -> None:
    """Each flag of `shoal serve MODEL` arrives in its setting."""
    words = (
        "m.onnx --name n --max-batch-size 8 --max-delay-ms 1.5 --http-port 1 --grpc-port 2 --admin-port 3 --stream-port 4 "
        "--host 0.0.0.0 --instances 2 --threads 3 --max-queue-rows 99 --default-timeout-ms 50 --oversize reject "
        "--tls-certificate c.pem --tls-key k.pem --max-body-bytes 1000 --drain-timeout-ms 5 --exit-on-load-error"
    )
    assert served(*words.split()) == Settings(
        server=ServerSettings(
            host="0.0.0.0",
            http_port=1,
            grpc_port=2,
            admin_port=3,
            stream_port=4,
            tls_certificate="c.pem",
            tls_key="k.pem",
            max_body_bytes=1000,
            exit_on_load_error=True,
            drain_timeout_ms=5.0,
        ),
        models={
            "n": ModelSettings(
                path="m.onnx",
                instances=2,
                threads=3,
                batching=BatchingSettings(max_batch_size=8, max_delay_ms=1.5, oversize="reject"),
                queue=QueueSettings(max_queue_rows=99, default_timeout_ms=50.0),
            )
        },
    )


def test_serve_without_flags_has_the_defaults() -> None:
    """`shoal serve digits` is the embedded model with every setting at its default."""
    assert served("digits") == Settings(models={"digits": ModelSettings(path="digits")})


def test_serve_with_a_settings_file(tmp_path: Path) -> None:
    """The file gives models and server; server flags go before it."""
    file = tmp_path / "shoal.toml"
    file.write_text(GOOD + "[server]\nhttp_port = 5\nhost = 'x'\n")
    settings = served("--config", str(file), "--http-port", "6")
    assert settings.server == ServerSettings(http_port=6, host="x")
    assert settings.models["digits"].batching.max_delay_ms == 2.0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["serve"], "shoal: serve needs a MODEL (try `shoal serve digits`) or --config FILE"),
        (["serve", "digits", "--config", "x.toml"], "shoal: give either a MODEL or --config FILE, not both"),
        (["serve", "--config", "x.toml", "--threads", "1"], "shoal: --threads cannot be used with --config; write it under"),
        (["serve", "--config", "no.toml"], "shoal: no.toml: no such file"),
        (["serve", "no.onnx"], "shoal: models.no.path: there is no file 'no.onnx'; embedded models: digits"),
        (["serve", "digits", "--max-batch-size", "0"], "shoal: models.digits.batching.max_batch_size: is 0, must be 1 or more"),
        (["serve", "digits", "--max-delay-ms", "nan"], "shoal: models.digits.batching.max_delay_ms: is nan, must be a finite"),
        (["serve", "digits", "--name", "a/b"], "shoal: models.a/b: the model name must be"),
        (["serve", "digits", "--http-port", "8001"], "shoal: server.grpc_port: is 8001, which http_port has already"),
        (["serve", "digits", "--tls-key", "k"], "shoal: server.tls_certificate: is missing although tls_key is set"),
        (["check", "no.toml"], "shoal: no.toml: no such file"),
    ],
)
def test_mistakes_are_told_in_one_line_with_status_2(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Contradictions, missing files and broken rules: status 2, nothing on stdout, one line per problem on stderr."""
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0].startswith(expected)
    assert all(line.startswith("shoal: ") for line in err.splitlines())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["serve", "digits", "--max-batch-size", "many"], "argument --max-batch-size: 'many' is not a whole number"),
        (["serve", "digits", "--max-delay-ms", "x"], "argument --max-delay-ms: 'x' is not a number"),
        (["serve", "digits", "--oversize", "x"], "argument --oversize: invalid choice: 'x'"),
        (["serve", "digits", "--max-batch", "8"], "unrecognized arguments: --max-batch"),
        (["check"], "the following arguments are required: FILE"),
    ],
)
def test_wrong_words_are_usage_errors(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What argparse refuses ends with status 2 as well, and names the word; flags are never guessed from their beginning."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err


def test_check_prints_the_settings_in_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A right file: status 0, the settings in force on stdout, nothing on stderr."""
    file = tmp_path / "shoal.toml"
    file.write_text(GOOD)
    assert main(["check", str(file)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "model digits (version 1): digits (embedded)" in out.splitlines()
    assert "  batching   fixed, up to 64 rows, at most 2 ms delay, larger requests are split" in out.splitlines()


def test_check_tells_all_errors_and_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong file: status 2, each problem with file and setting on its own line, warnings marked as such, nothing on stdout."""
    file = tmp_path / "shoal.toml"
    file.write_text(GOOD + "[models.digits.queue]\nslo_ms = 1\nmax_queue_rows = 1\n[server]\noverload_status = 500\n")
    assert main(["check", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0].startswith(f"shoal: warning: {file}: models.digits.queue.max_queue_rows: is 1, less than max_batch_size = 64")
    assert lines[1].startswith(f"shoal: {file}: server.overload_status: is 500")
    assert lines[2].startswith(f"shoal: {file}: models.digits.queue.slo_ms: is 1, must be more than max_delay_ms = 2")
    assert len(lines) == 3


def test_a_typo_in_a_file_names_the_right_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message of loading reaches the person, with file and line."""
    file = tmp_path / "shoal.toml"
    file.write_text('[models.digits]\npath = "digits"\n[models.digits.batching]\nmax_batch = 3\n')
    assert main(["check", str(file)]) == 2
    err = capsys.readouterr().err
    assert err == f"shoal: {file}, line 4: [models.digits.batching] has no setting `max_batch`; did you mean `max_batch_size`?\n"


def test_version_and_check_load_nothing_heavy(tmp_path: Path) -> None:
    """`shoal --version` and `shoal check` start without numpy, ONNX Runtime or an event loop library (a real process)."""
    file = tmp_path / "shoal.toml"
    file.write_text(GOOD)
    program = (
        "import sys\nfrom shoal.cli.main import main\n"
        f"assert main(['check', {str(file)!r}]) == 0\n"
        "try:\n    main(['--version'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print(sorted({'numpy', 'onnxruntime', 'uvloop', 'httptools', 'asyncio'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-2:] == [f"shoal {__version__}", "[]"]


def test_help_says_what_the_reserved_ports_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Ports without a server yet are accepted, and the help does not promise more."""
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"])
    assert caught.value.code == 0
    assert " ".join(capsys.readouterr().out.split()).count("reserved: this version has no server on it yet") == 3


def test_settings_file_as_model_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """The most natural slip, a forgotten --config, is named."""
    assert main(["serve", "shoal.toml"]) == 2
    assert "is a settings file; use --config shoal.toml" in capsys.readouterr().err


def test_server_that_may_not_stay_without_its_model_ends(tmp_path: Path) -> None:
    """With --exit-on-load-error a corrupt model ends the process with status 1 and the reason on the last line."""
    model = tmp_path / "corrupt.onnx"
    model.write_bytes(b"nothing of the kind")
    command = [sys.executable, "-m", "shoal", "serve", str(model), "--http-port", "0", "--exit-on-load-error"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("shoal: model corrupt cannot be served: ")
