"""``flashproof.verify``: the command that it runs, and what becomes of its answer."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.api import running, verify
from tests.harness.machine import SHARERS
from tests.harness.programs.verdict import no_verdict, verdict_of
from tests.unit.support.reports import bug, summary


class Ran:
    """Takes the place of ``subprocess.run``: it keeps the command, and returns what it is told to."""

    def __init__(self, stdout: str, status: int = 1, stderr: str = "") -> None:
        self.answer = subprocess.CompletedProcess([], status, stdout, stderr)
        self.words: list[str] = []
        self.environment: dict[str, str] = {}

    def __call__(self, words: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        self.words, self.environment = words, options["env"]
        return self.answer

    def after(self, option: str) -> list[str]:
        """Return what stands behind an option, each time that it is given."""
        return [self.words[at + 1] for at, word in enumerate(self.words) if word == option]


def verdict(**run: Any) -> str:
    return json.dumps(verdict_of(summary(bug(), **{"exit": 1, **run}), Path("reports")))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    one = Ran(verdict())
    monkeypatch.setattr(subprocess, "run", one)
    return one


def test_what_is_given_becomes_options(ran: Ran) -> None:
    result = verify(
        "mine.py:f",
        {"head_dims": (64, 128), "backward": False},
        minutes=0.5,
        device="cpu",
        seed=3,
        options=["-k", "forward"],
        softcap=30.0,
    )
    assert ran.words[1:6] == ["-P", "-m", "tests.harness.commands.command", "verify", "mine.py:f"]
    assert ran.after("--claims") == ["head_dims=64,128", "backward=false", "softcap=30.0"]
    assert ran.after("--budget") == ["30.0s"]
    assert ran.after("--device") == ["cpu"]
    assert ran.after("--hypothesis-seed") == ["3"]
    assert ran.after("-k") == ["forward"]
    assert ran.after("--json") == ["-"]
    assert (
        result.status == "error of the environment"
    )  # the summary that is made up has no row that is broken


def test_what_is_not_given_is_left_to_the_command(ran: Ran) -> None:
    verify("mine.py:f")
    assert not {"--budget", "--hypothesis-seed", "--claims"} & {*ran.words}


def test_the_log_is_plain_text_where_the_caller_wants_colours(
    ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a notebook
    verify("mine.py:f")
    assert ran.environment["PY_COLORS"] == "0"  # pytest looks at this first


def test_reports_of_the_same_arguments_have_the_same_folder(ran: Ran) -> None:
    folders = []
    for claims in ({}, {"causal": True}, {}):
        verify("mine.py:f", claims)
        folders += ran.after("--report-dir")
    assert folders[0] == folders[2] != folders[1]
    assert folders[0].startswith("reports/mine.f-")
    verify("mine.py:f", report_dir="elsewhere")
    assert ran.after("--report-dir") == ["elsewhere"]


def test_a_kernel_of_the_caller_is_found(ran: Ran) -> None:
    verify(KERNEL)
    assert ran.words[5] == "tests.unit.harness.api.test_running:KERNEL"


KERNEL = type("Kernel", (), {})()
KERNEL.__class__.__module__ = "nowhere"


def test_the_callers_pytest_and_hypothesis_are_left_alone(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", SHARERS, "HYPOTHESIS_EXPERIMENTAL"):
        monkeypatch.setenv(name, "theirs")
    monkeypatch.setenv("TRITON_CACHE_DIR", "kept")
    verify("mine.py:f", report_dir="here")
    assert [name for name in ran.environment if name.startswith("PYTEST_")] == [SHARERS]
    assert {name for name in ran.environment if name.startswith("HYPOTHESIS_")} == {
        "HYPOTHESIS_STORAGE_DIRECTORY"
    }
    assert ran.environment["HYPOTHESIS_STORAGE_DIRECTORY"] == "here/.hypothesis"
    assert ran.environment["TRITON_CACHE_DIR"] == "kept"
    assert os.environ["PYTEST_ADDOPTS"] == "theirs"


def test_the_process_imports_what_the_caller_imports(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("/of/the/caller")
    verify("mine.py:f")
    path = ran.environment["PYTHONPATH"].split(os.pathsep)
    assert "/of/the/caller" in path
    assert os.path.dirname(os.__file__) not in path  # noqa: PTH120 - as sys.path has it
    assert not [x for x in path if x.endswith("site-packages")]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"minutes": 0}, "minutes: got 0, expected a positive number"),
        ({"minutes": -1.0}, "minutes: got -1.0, expected a positive number"),
        ({"minutes": float("nan")}, "minutes: got nan, expected a positive number"),
        ({"minutes": "4"}, "minutes: got '4', expected a positive number"),
        ({"minutes": True}, "minutes: got True, expected a positive number"),
        ({"seed": "7"}, "seed: got '7', expected an integer"),
        (
            {"causal": None},
            "claim causal: got None, expected a text, a number, True, False, or several of these",
        ),
    ],
)
def test_a_wrong_argument_is_one_line_and_runs_nothing(ran: Ran, given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=r"\A.*\Z") as raised:
        verify("mine.py:f", **given)
    assert str(raised.value) == told
    assert not ran.words


@pytest.mark.parametrize(
    ("stdout", "status", "stderr", "error", "told"),
    [
        (json.dumps(no_verdict("kernel 'f': no file 'f'", 4, Path("r"))), 4, "", ValueError, "kernel 'f': no file 'f'"),
        ("", 4, "usage: x\n\nERROR: --nonsense\n", ValueError, "--nonsense"),
        ("", 3, "INTERNALERROR\nKeyError: x\n", RuntimeError, "flashproof verify ended with status 3: KeyError: x"),
        ("{", -9, "", RuntimeError, "flashproof verify ended with status -9: no output"),
    ],
)  # fmt: skip
def test_a_run_without_a_verdict_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, stdout: str, status: int, stderr: str, error: type[Exception], told: str
) -> None:
    monkeypatch.setattr(subprocess, "run", Ran(stdout, status, stderr))
    with pytest.raises(error) as raised:
        verify("f")
    assert str(raised.value) == told


def test_the_file_of_a_kernel_must_not_call_it_as_it_is_imported(
    ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify("mine.py:f")
    monkeypatch.setenv(running.UNDER_WAY, ran.environment[running.UNDER_WAY])
    with pytest.raises(RuntimeError, match=r"\Aflashproof.verify is called as the file .*__main__\":`\Z"):
        verify("mine.py:f")


def test_all_but_the_fixture_imports_neither_torch_nor_pytest() -> None:
    named = {name: module for name, module in sys.modules.items() if name.startswith("tests.harness.api.")}
    assert named
    heavy = {"torch", "pytest", "hypothesis", "triton", "numpy"}
    for name, module in named.items():
        assert name == "tests.harness.api.fixture" or not heavy & {*vars(module)}, name
