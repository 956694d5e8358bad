"""What the project's own files promise: documents, examples, make targets and pinned versions agree with the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from shoal.config.checks import check_settings
from shoal.config.loading import load_settings, parse_settings
from shoal.config.settings import BatchingSettings, ModelSettings, QueueSettings, ServerSettings

ROOT = Path(__file__).resolve().parents[2]
LATER = {"mode", "allowed_batch_sizes"}
"""Settings that the README names only where it says what is to come."""


def test_the_example_settings_are_right() -> None:
    """`examples/shoal.toml` loads, and neither an error nor a warning is found in it."""
    settings = load_settings(ROOT / "examples" / "shoal.toml")
    assert sorted(settings.models) == ["digits", "standardize"]
    assert check_settings(settings) == []


def test_lines_that_the_example_comments_out_are_settings_too() -> None:
    """Whoever removes the `#` before a setting of the example gets a file that still loads."""
    text = (ROOT / "examples" / "shoal.toml").read_text()
    uncommented, count = re.subn(r"(?m)^# (?=[a-z_]+ = )", "", text)
    assert count > 15
    parse_settings(uncommented)


@pytest.mark.parametrize("section", [ServerSettings, ModelSettings, BatchingSettings, QueueSettings])
def test_the_readme_names_every_setting(section: type[ServerSettings]) -> None:
    """A setting that nobody can read about does not exist."""
    readme = (ROOT / "README.md").read_text()
    missing = [
        name for name in section.__struct_fields__ if f"`{name}`" not in readme and name not in LATER | {"batching", "queue"}
    ]
    assert missing == []


def test_files_that_the_documents_link_to_exist() -> None:
    """Relative links and `examples/…` paths in the documents lead somewhere."""
    for document in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        text = (ROOT / document).read_text()
        targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", text) + re.findall(r"\bexamples/[a-z_]+\.[a-z]+", text)
        assert [target for target in targets if not (ROOT / target).exists()] == []


def test_make_has_the_targets_that_the_documents_name() -> None:
    """Every `make TARGET` of the documents is a target, with a line of help."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?m)^([a-z-]+):.*## ", makefile))
    named = {
        target
        for document in ("README.md", "CONTRIBUTING.md")
        for target in re.findall(r"(?m)(?:`|^)make ([a-z-]+)", (ROOT / document).read_text())
    }
    assert {"install", "run", "test", "check", "bench", "verify-queueing"} <= targets
    assert named <= targets


def test_everything_that_the_project_needs_is_pinned() -> None:
    """Each requirement of pyproject.toml has one exact version in the lock file, which names no place to get it from."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]).lower() for line in wanted}
    lines = [line for line in (ROOT / "requirements-dev.lock").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.+!]*( ; .+)?", line) for line in lines)
    pinned = [line.partition("==")[0] for line in lines]
    assert pinned == sorted(set(pinned))
    assert names <= set(pinned)
