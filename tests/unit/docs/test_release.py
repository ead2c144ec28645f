"""The version is the same wherever it stands, and the changelog has a section for it."""

import re
import tomllib

from tests.harness.files import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEADINGS = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def numbers(version: str) -> tuple[int, ...]:
    """Return a version as numbers, which can be compared."""
    return tuple(map(int, version.split(".")))


def test_the_changelog_has_a_section_for_each_release_the_last_one_first() -> None:
    released = [heading for heading in HEADINGS if heading != "Unreleased"]
    assert released[0] == PROJECT["version"]
    assert [*map(numbers, released)] == sorted({*map(numbers, released)}, reverse=True)
    assert "Unreleased" not in HEADINGS[1:]


def test_the_documentation_of_the_action_names_the_version() -> None:
    named = re.findall(r"(?:flashproof@|rev: )(\S+)", (ROOT / "docs/ci.md").read_text())
    assert named == [f"v{PROJECT['version']}"] * 2


def test_the_classifiers_are_the_versions_of_python_that_are_supported() -> None:
    least, most = re.findall(r"3\.(\d+)", PROJECT["requires-python"])
    found = re.findall(r"Python :: 3\.(\d+)", "\n".join(PROJECT["classifiers"]))
    assert found == [str(minor) for minor in range(int(least), int(most))]
