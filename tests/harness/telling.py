"""A bug of verdict.json in lines of text, as a failing test and a comment on a pull request show it."""

from collections.abc import Mapping
from typing import Any

SHOWN = ("certificate", "claim", "where", "error", "needs", "case", "report", "replay")
"""The fields of a bug that are shown, each with its label, if they are known."""
LABELS = {"certificate": "instead", "case": "smallest"}
"""The label of a field that is not shown by its own name."""


def bug_text(bug: Mapping[str, Any]) -> str:
    """Return the headline of a bug, and below it the facts that are known, a line for each."""
    told = [(LABELS.get(name, name), bug[name]) for name in SHOWN if bug[name]]
    return "\n".join([bug["headline"], *(f"   {label:<9} {text}" for label, text in told)])
