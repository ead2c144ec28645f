"""What GitHub is told: annotations at the line of a kernel, and a comment that nothing in a verdict can break."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.programs.github import MOST_BUGS, annotations, comment_of
from tests.harness.programs.verdict import no_verdict, verdict_of
from tests.unit.support.reports import bug, summary


def verdict(**kernel: Any) -> dict[str, Any]:
    told = verdict_of(summary(bug(), exit=1), Path("reports"))
    told["kernels"]["k.f"] |= {"status": "broken", "file": "package/mine.py", "line": 7, **kernel}
    return told | {"status": "broken"}


def lines(told: dict[str, Any], root: Path) -> list[str]:
    return annotations(told, {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(root)})


def test_a_bug_is_an_error_at_the_line_of_its_kernel() -> None:
    (line,) = lines(verdict(), Path.cwd())
    title = "title=k.f%3A law `forward` is broken%2C out is wrong"
    assert line.startswith(f"::error file=package/mine.py,line=7,{title}")
    assert (
        "::14 failures, only with causal True%0Asmallest: Case(dtype='float16', causal=True)%0Aagain: "
        in line
    )


def test_a_lack_of_precision_is_a_warning() -> None:
    told = verdict() | {"bugs": [], "less_precise": {"k.f": "100 % in\nfloat16"}}
    title = "title=k.f%3A less precise than claimed"
    expected = f"::warning file=package/mine.py,line=7,{title}::100 %25 in%0Afloat16"
    assert lines(told, Path.cwd()) == [expected]


def test_a_file_is_told_from_the_root_of_the_repository() -> None:
    (line,) = lines(verdict(), Path.cwd().parent)
    assert line.startswith(f"::error file={Path.cwd().name}/package/mine.py,line=7,")
    (line,) = lines(verdict(), Path("/elsewhere"))
    assert line.startswith(f"::error file={Path.cwd() / 'package/mine.py'},line=7,")
    (line,) = lines(verdict(file=None, line=None), Path.cwd())
    assert line.startswith("::error title=k.f")
    (line,) = lines(verdict(line=None), Path.cwd())
    assert "mine.py,line=1," in line


@pytest.mark.parametrize("environment", [{}, {"GITHUB_ACTIONS": "false"}])
def test_elsewhere_nothing_is_annotated(environment: dict[str, str]) -> None:
    assert annotations(verdict(), environment) == []


def test_a_comment_has_the_kernels_and_the_bugs() -> None:
    text = comment_of(verdict())
    assert text.startswith("**Flashproof: broken**\n\n| kernel | status | score | examples |\n")
    assert "\n| `k.f` | broken | " in text
    assert "\n```text\n1. k.f: law `forward` is broken, out is wrong" in text
    assert "\n   smallest  Case(dtype='float16', causal=True)\n" in text


def test_no_text_of_a_kernel_ends_its_block() -> None:
    told = verdict()
    told["bugs"][0]["claim"] = "raised ValueError: ````\n# heading"
    block = comment_of(told).split("`````")
    assert len(block) == 3
    assert "# heading" in block[1]


def test_of_many_and_long_bugs_a_comment_has_the_worst_and_the_beginning() -> None:
    told = verdict()
    told["bugs"] *= MOST_BUGS + 2
    told["bugs"] = [{**each, "claim": "x" * 20000} for each in told["bugs"]]
    text = comment_of(told)
    assert "\nThe page of the run has 2 bugs more.\n" in text
    assert len(text) < 2**16


def test_a_command_line_that_cannot_be_run_is_told() -> None:
    text = comment_of(no_verdict("kernel 'mine.py:f': no file mine.py", 4, Path("reports")))
    assert text.startswith(
        "**Flashproof: usage error**\n\n```text\nkernel 'mine.py:f': no file mine.py\n```\n\n0 s, "
    )
