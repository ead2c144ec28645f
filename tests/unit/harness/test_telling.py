"""A bug in lines of text: what is known of it, and nothing else."""

from typing import Any

from tests.harness.telling import SHOWN, bug_text


def test_what_is_not_known_has_no_line() -> None:
    bug: dict[str, Any] = dict.fromkeys(SHOWN) | {
        "headline": "k: wrong",
        "certificate": "no mask",
        "case": "Case()",
    }
    assert bug_text(bug) == "k: wrong\n   instead   no mask\n   smallest  Case()"
