"""A verdict for GitHub: lines that GitHub Actions shows as annotations, and a comment on a pull request."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.harness.telling import bug_text

MOST_BUGS = 10
"""So many bugs are in a comment, the worst first. The page of the run has all."""
KEYS = ("device", "torch", "triton")
"""What a comment says of the environment."""
MOST_CHARACTERS = 5000
"""So much of a bug is in a comment, of which GitHub takes 65,536 characters."""


def annotations(verdict: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return a workflow command for each bug, and each kernel that is less precise than it claims.

    Outside GitHub Actions there are none.
    """
    if environment.get("GITHUB_ACTIONS") != "true":
        return []
    root = Path(environment.get("GITHUB_WORKSPACE") or ".")
    return [*_annotated(verdict, root)]


def _annotated(verdict: Mapping[str, Any], root: Path) -> Iterator[str]:
    for bug in verdict["bugs"]:
        needs = f", {bug['needs']}" if bug["needs"] else ""
        text = f"{bug['failures']} failures{needs}\nsmallest: {bug['case']}\nagain: {bug['replay']}"
        yield _command("error", bug["headline"], text, _place(verdict["kernels"][bug["kernel"]], root))
    for name, text in verdict["less_precise"].items():
        title = f"{name}: less precise than claimed"
        yield _command("warning", title, text, _place(verdict["kernels"][name], root))


def _place(kernel: Mapping[str, Any], root: Path) -> dict[str, str]:
    """Return the file of a kernel, as a path from the root of the repository if it is in there, and its line."""
    if kernel["file"] is None:
        return {}
    path = Path(kernel["file"]).resolve()
    below = path.is_relative_to(root.resolve())
    return {
        "file": str(path.relative_to(root.resolve()) if below else path),
        "line": str(kernel["line"] or 1),
    }


def _command(level: str, title: str, text: str, place: Mapping[str, str]) -> str:
    fields = {**place, "title": title}
    told = ",".join(f"{name}={_escaped(value, in_field=True)}" for name, value in fields.items())
    return f"::{level} {told}::{_escaped(text)}"


def _escaped(text: str, *, in_field: bool = False) -> str:
    for character in "%\r\n" + ":," * in_field:
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def comment_of(verdict: Mapping[str, Any]) -> str:
    """Return a verdict as Markdown: the status of each kernel, then each bug as text that nothing in it can end."""
    return "\n\n".join(_paragraphs(verdict)) + "\n"


def _paragraphs(verdict: Mapping[str, Any]) -> Iterator[str]:
    yield f"**Flashproof: {verdict['status']}**"
    if verdict["error"]:
        yield _fenced(verdict["error"])
    if verdict["kernels"]:
        rows = [
            f"| `{name}` | {kernel['status']} | {kernel['score']:g} | {kernel['examples']} |"
            for name, kernel in verdict["kernels"].items()
        ]
        yield "\n".join(["| kernel | status | score | examples |", "| --- | --- | --- | --- |", *rows])
    bugs = verdict["bugs"]
    for number, bug in enumerate(bugs[:MOST_BUGS], 1):
        yield _fenced(f"{number}. {bug_text(bug)}"[:MOST_CHARACTERS])
    if len(bugs) > MOST_BUGS:
        yield f"The page of the run has {len(bugs) - MOST_BUGS} bugs more."
    for name, text in verdict["less_precise"].items():
        yield _fenced(f"{name}: {text}")
    told = [f"{name} {verdict['environment'][name]}" for name in KEYS if name in verdict["environment"]]
    yield ", ".join([f"{verdict['seconds']:.0f} s", *told, f"Flashproof {verdict['flashproof']}"])


def _fenced(text: str) -> str:
    """Return a text as a block of code, with a fence that is longer than any row of backticks in the text."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"
