"""From a TOML file to settings: what is read, and what each kind of mistake is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config.loading import load_settings, parse_settings, python_target, resolve_model_path
from shoal.config.locate import dotted, line_of
from shoal.config.settings import BatchingSettings, ModelSettings, QueueSettings, ServerSettings, Settings
from shoal.errors import ConfigError

FULL = """
[server]
host = "0.0.0.0"
http_port = 9000
idle_timeout_ms = 5000

[models.digits]
path = "digits"
instances = 2
threads = 1

[models.digits.batching]
max_batch_size = 16
max_delay_ms = 2
preferred_batch_sizes = [4, 8]
oversize = "reject"

[models.digits.queue]
max_queue_rows = 100
default_timeout_ms = 250.5
"""


def message_of(text: str) -> list[str]:
    """The lines of the ConfigError that parsing `text` raises."""
    with pytest.raises(ConfigError) as caught:
        parse_settings(text, source="shoal.toml")
    return caught.value.message.splitlines()


def test_every_section_is_read() -> None:
    """A file with all sections becomes exactly those settings; what is not named keeps its default."""
    assert parse_settings(FULL) == Settings(
        server=ServerSettings(host="0.0.0.0", http_port=9000, idle_timeout_ms=5000.0),
        models={
            "digits": ModelSettings(
                path="digits",
                instances=2,
                threads=1,
                batching=BatchingSettings(max_batch_size=16, max_delay_ms=2.0, preferred_batch_sizes=(4, 8), oversize="reject"),
                queue=QueueSettings(max_queue_rows=100, default_timeout_ms=250.5),
            )
        },
    )


def test_whole_numbers_become_floats_where_times_are_meant() -> None:
    """`max_delay_ms = 2` is a float afterwards, so that later arithmetic never meets an integer."""
    delay = parse_settings(FULL).models["digits"].batching.max_delay_ms
    assert (delay, type(delay)) == (2.0, float)


@pytest.mark.parametrize(
    ("section", "typo", "right"),
    [
        ("[server]", "http_prt", "http_port"),
        ("[server]", "http-port", "http_port"),
        ("[models.m]", "instance", "instances"),
        ("[models.m.batching]", "max_batchsize", "max_batch_size"),
        ("[models.m.batching]", "MAX_DELAY_MS", "max_delay_ms"),
        ("[models.m.queue]", "default_timeout", "default_timeout_ms"),
    ],
)
def test_a_typo_names_the_nearest_setting_and_its_section(section: str, typo: str, right: str) -> None:
    """An unknown key is refused in every section, with file, line, section and the key that was probably meant."""
    path_line = 'path = "m.onnx"\n' if section == "[models.m]" else ""
    lines = message_of(f'[models.x]\npath = "x.onnx"\n{section}\n{path_line}{typo} = 1\n')
    number = 5 if path_line else 4
    assert lines[0] == f"shoal.toml, line {number}: {section} has no setting `{typo}`; did you mean `{right}`?"


def test_an_unknown_key_like_no_other_lists_what_there_is() -> None:
    """Where nothing is near, all valid names of the section are given."""
    (line,) = message_of('[models.m]\npath = "m.onnx"\nzzz = 1\n')
    assert line == (
        "shoal.toml, line 3: [models.m] has no setting `zzz`; it may have `batching`, `execution`, `instances`, `path`, "
        "`probe`, `profile`, `queue`, `stage`, `threads`, `version`"
    )


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        ("[model.digits]\npath='digits'\n", "line 1: there is no `model` at the top of the file; did you mean `models`?"),
        ("[sever]\n", "line 1: there is no `sever` at the top of the file; did you mean `server`?"),
        ("server = 3\n", "line 1: `server` must be a table, but is the integer 3"),
        ("[[models]]\npath='x'\n", "line 1: `models` must be a table, but is an array"),
        ("[models]\nm = 'x.onnx'\n", 'line 2: `models.m` must be a table, but is the string "x.onnx"'),
        (
            "[models]\npath = 'x.onnx'\n",
            'line 2: `models.path` must be a table, but is the string "x.onnx"; settings of a model stand in a table [models.NAME]',
        ),
    ],
)
def test_wrong_tables_at_the_top(top: str, expected: str) -> None:
    """Mistakes in the structure itself are told with the line and what would be right."""
    (line,) = message_of(top)
    assert line.removeprefix("shoal.toml, ") == expected


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ('batching.max_batch_size = "8"', '`models.m.batching.max_batch_size` must be an integer, but is the string "8"'),
        ("batching.max_batch_size = 8.0", "`models.m.batching.max_batch_size` must be an integer, but is the number 8.0"),
        ("batching.max_batch_size = true", "`models.m.batching.max_batch_size` must be an integer, but is the boolean true"),
        ("batching.max_delay_ms = [1]", "`models.m.batching.max_delay_ms` must be a number, but is an array"),
        ("batching.reorder = 1", "`models.m.batching.reorder` must be true or false, but is the integer 1"),
        ('batching.mode = "fixd"', '`models.m.batching.mode` must be "fixed" or "adaptive", but is "fixd"; did you mean "fixed"?'),
        ("batching.mode = 1", '`models.m.batching.mode` must be "fixed" or "adaptive", but is the integer 1'),
        (
            'batching.allowed_batch_sizes = [1, "2"]',
            '`models.m.batching.allowed_batch_sizes[1]` must be an integer, but is the string "2"',
        ),
        (
            "batching.allowed_batch_sizes = 4",
            "`models.m.batching.allowed_batch_sizes` must be an array, each item an integer, but is the integer 4",
        ),
        ("threads = 1.5", "`models.m.threads` must be an integer, but is the number 1.5"),
        ("version = 1", "`models.m.version` must be a string, but is the integer 1"),
        ("queue = []", "`models.m.queue` must be a table, but is an array"),
        ("queue.slo_ms = 2026-01-01", "`models.m.queue.slo_ms` must be a number, but is a date"),
    ],
)
def test_a_wrong_type_says_what_was_expected_and_what_was_found(setting: str, expected: str) -> None:
    """Each kind of type mistake gives the full path in TOML's words, and the line."""
    assert message_of(f'[models.m]\npath = "m.onnx"\n{setting}\n') == [f"shoal.toml, line 3: {expected}"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1" + "0" * 30, "`models.m.instances` is an integer of 31 digits, which no setting can hold"),
        ("-9223372036854775809", "`models.m.instances` is the integer -9223372036854775809, which no setting can hold"),
        ("1" * 5000, "not valid TOML: Exceeds the limit (4300 digits) for integer string conversion"),
    ],
)
def test_integers_that_no_counter_can_hold(value: str, expected: str) -> None:
    """TOML in Python has unbounded integers; one beyond 64 bits is a ConfigError now, not a crash later."""
    (line,) = message_of(f'[models.m]\npath = "m"\ninstances = {value}\n')
    assert expected in line


def test_all_mistakes_are_told_at_once() -> None:
    """One run shows every wrong name and type, in any number of sections."""
    lines = message_of('[server]\nhost = 1\nprt = 2\n[models.a]\n[models.b]\npath = "b"\nthreads = "x"\n')
    assert [line.split(": ", 1)[0] for line in lines] == [f"shoal.toml, line {number}" for number in (2, 3, 4, 7)]
    assert lines[2].endswith("[models.a] needs `path = ...`, which is missing")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "the file is empty; it needs at least one table"),
        (b" \n\t\n", "the file is empty; it needs at least one table"),
        (b"[models.a]\npath = 'a\xff'\n", ", line 2: byte 0xff is not UTF-8"),
        (b"[models.a\n", ", line 1, column 10: not valid TOML: "),
        (b"[models.a]\npath = 'a'\n[models.a]\n", ", line 3, column "),
        (b"[models.a]\npath = 'a'\npath = 'b'\n", ", line 3, column "),
        (b"\x7fELF\x01\x00\x00", "not valid TOML"),
        (b"x = " + b"[" * 100_000, "nested too deeply"),
    ],
)
def test_files_that_are_no_settings(tmp_path: Path, content: bytes, expected: str) -> None:
    """Empty, binary, broken, doubly defined and absurd files end in a ConfigError that names the file."""
    file = tmp_path / "shoal.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_settings(file)
    assert caught.value.message.startswith(str(file))
    assert expected in caught.value.message
    assert "\n" not in caught.value.message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing file, a folder, a name with NUL and a huge file are told apart, and none is read."""
    huge = tmp_path / "huge.toml"
    with huge.open("wb") as stream:
        stream.truncate(1 << 30)
    for path, expected in (
        (tmp_path / "missing.toml", "no such file"),
        (tmp_path, "is a folder"),
        (Path("a\0b"), "cannot be read"),
        (huge, "1073741824 bytes is too large"),
        (tmp_path / "huge.toml" / "x", "cannot be read: Not a directory"),
    ):
        with pytest.raises(ConfigError, match=expected):
            load_settings(path)


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    """Editors on Windows write one; the file is read all the same."""
    file = tmp_path / "shoal.toml"
    file.write_bytes(b"\xef\xbb\xbf" + FULL.encode())
    assert load_settings(file) == parse_settings(FULL)


def test_paths_are_relative_to_the_settings_file(tmp_path: Path) -> None:
    """Model and TLS files are looked for beside the settings file, wherever the process was started."""
    folder = tmp_path / "conf"
    folder.mkdir()
    (folder / "shoal.toml").write_text(
        '[server]\ntls_certificate = "cert.pem"\n'
        '[models.a]\npath = "../a.onnx"\n[models.b]\npath = "b.py:Model"\n[models.c]\npath = "my.models:Model"\n'
        '[models.d]\npath = "digits"\n[models.e]\npath = "/abs/e.onnx"\n'
    )
    settings = load_settings(folder / "shoal.toml")
    assert {name: model.path for name, model in settings.models.items()} == {
        "a": str(tmp_path / "a.onnx"),
        "b": f"{folder}/b.py:Model",
        "c": "my.models:Model",
        "d": "digits",
        "e": "/abs/e.onnx",
    }
    assert settings.server.tls_certificate == str(folder / "cert.pem")
    assert settings.server.tls_key is None


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("a/b c.py:Model", ("a/b c.py", "Model")),
        ("/x/file.py:outer.Inner", ("/x/file.py", "outer.Inner")),
        ("package.module:function", ("package.module", "function")),
        ("model.onnx", None),
        ("dir:with/colon.onnx", None),
        ("file.py", None),
        ("file.py:", None),
        (":Model", None),
        ("digits", None),
    ],
)
def test_python_targets_are_told_from_files(path: str, target: tuple[str, str] | None) -> None:
    """Only `file.py:Object` and `module:object` are Python models; a colon alone does not make one."""
    assert python_target(path) == target


def test_paths_without_a_folder_stay_as_written() -> None:
    """On the command line, paths are left to the working directory."""
    assert resolve_model_path("a.onnx", None) == "a.onnx"


def test_lines_are_found_for_dotted_quoted_and_nested_keys() -> None:
    """The line finder understands TOML's ways to write one path, and gives none rather than a wrong one."""
    text = (
        '[models."a b".batching]\nx = 1\n[models.c]\nbatching.y = 2 # z = 3\n"q k" = 1\n'
        '[models.c.queue]\nx = """\nz = 1\n"""\nz = 1\n'
    )
    assert line_of(text, ("models", "a b", "batching", "x")) == 2
    assert line_of(text, ("models", "a b")) == 1
    assert line_of(text, ("models", "c", "batching", "y")) == 4
    assert line_of(text, ("models", "c", "q k")) == 5
    assert line_of(text, ("models", "c", "queue", "z")) is None
    assert line_of(text, ("models", "nowhere")) is None
    assert dotted(("models", "a b", 'c"')) == 'models."a b"."c\\""'


VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=4,
)
KEYS = st.sampled_from(
    [name for kind in (ServerSettings, ModelSettings, BatchingSettings, QueueSettings) for name in kind.__struct_fields__]
)


def toml(value: object) -> str:
    """A value as inline TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if value == value else "nan"
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(character):08x}" for character in value) + '"'
    if isinstance(value, list):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(key)} = {toml(item)}" for key, item in value.items()) + "}"
    return repr(value)


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(["server", "models", "models.m", "models.m.batching", "models.m.queue"]),
    st.dictionaries(KEYS, VALUES, max_size=3),
)
def test_no_value_of_any_setting_breaks_loading(section: str, values: dict[str, object]) -> None:
    """Any TOML value under any real key either becomes settings or a ConfigError; nothing else ever escapes."""
    text = f"[{section}]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in values.items())
    try:
        parse_settings(text)
    except ConfigError as error:
        assert error.message


@settings(deadline=None, max_examples=100)
@given(st.text(max_size=60))
def test_no_text_breaks_loading(text: str) -> None:
    """Arbitrary text is settings or a ConfigError."""
    try:
        parse_settings(text)
    except ConfigError as error:
        assert error.message
