"""The README is short, links of the documentation lead somewhere, and figures name the command that makes them."""

import re
from pathlib import Path

import pytest

from tests.harness.files import ROOT
from tests.harness.law import LAWS

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
FIGURE = {
    "date": re.compile(r"\d{4}-\d\d-\d\d"),
    "commit": re.compile(r"`[0-9a-f]{7,40}`"),
    "command": re.compile(r"`(python|tox|flashproof)\b[^`]*`"),
}
"""Patterns for the cells of a row of figures, by the names of their columns."""


def rows_of_tables(text: str) -> list[dict[str, str]]:
    """Return each row of the tables in a Markdown page, as its cells by the names of their columns."""
    rows = []
    for table in re.findall(r"(?:^.*\|.*\n)+", FENCED.sub("", text), re.MULTILINE):
        head, _, *body = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
        ]
        rows += [dict(zip(head, cells, strict=True)) for cells in body]
    return rows


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    heads = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def leads_nowhere(page: Path, link: str) -> bool:
    """Whether a relative link names a file or a heading that does not exist."""
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return not target.exists() or (bool(anchor) and anchor not in anchors(target))


def test_readme_has_under_1000_words() -> None:
    assert len((ROOT / "README.md").read_text().split()) < 1000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = LINK.findall(FENCED.sub("", page.read_text()))
    relative = [link for link in links if not link.startswith(("https://", "mailto:"))]
    assert [link for link in relative if leads_nowhere(page, link)] == []


def test_links_that_lead_nowhere_are_seen() -> None:
    page = ROOT / "README.md"
    assert leads_nowhere(page, "docs/no_such_page.md")
    assert leads_nowhere(page, "docs/measurements.md#no-such-heading")
    assert not leads_nowhere(page, "docs/measurements.md#planted-bugs-are-caught")


def test_every_figure_names_date_commit_and_command() -> None:
    rows = rows_of_tables((ROOT / "docs/measurements.md").read_text())
    assert len(rows) > 10
    lacking = [
        (row, column)
        for row in rows
        for column, form in FIGURE.items()
        if not form.fullmatch(row.get(column, ""))
    ]
    assert lacking == []


def test_readme_gives_no_speed_that_is_not_measured() -> None:
    """Each speed in the README must be the ratio that the measurements give in brackets."""
    measured = {
        row["kernel"]: row["forward"]
        for row in rows_of_tables((ROOT / "docs/measurements.md").read_text())
        if "kernel" in row
    }
    kernels = [row for row in rows_of_tables((ROOT / "README.md").read_text()) if "speed" in row]
    assert kernels
    assert [row for row in kernels if f"({row['speed']})" not in measured[row["kernel"]]] == []


def test_readme_names_every_law() -> None:
    rows = rows_of_tables((ROOT / "README.md").read_text())
    assert sorted(row["name"].strip("`") for row in rows if "law" in row) == sorted(LAWS)


TEXTS = sorted((ROOT / "docs/findings").glob("*.md"))
"""Texts that are ready to be filed upstream."""


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_a_text_to_be_filed_has_a_script_that_is_short_and_needs_nothing_of_ours(page: Path) -> None:
    scripts = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert scripts
    for script in scripts:
        compile(script, page.name, "exec")
        assert len([line for line in script.splitlines() if line.strip()]) <= 20
        assert not re.search(r"\b(kernels|strategies|reference|tests|flashproof)\.", script)


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_a_text_to_be_filed_is_in_the_triage_and_on_the_site(page: Path) -> None:
    place = f"findings/{page.name}"
    assert f"({place})" in (ROOT / "docs/findings.md").read_text()
    assert place in (ROOT / "mkdocs.yml").read_text()


def test_pre_commit_lints_with_the_version_of_tox() -> None:
    versions = {
        name: set(re.findall(r"ruff==[\d.]+", (ROOT / name).read_text()))
        for name in (".pre-commit-config.yaml", "pyproject.toml")
    }
    assert versions[".pre-commit-config.yaml"] == versions["pyproject.toml"] != set()
