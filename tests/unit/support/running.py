"""What several test files share: small cases, and functions that run a toy kernel by the harness or by pytest."""

import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from tests.harness.files import ROOT
from tests.harness.law import law_named
from tests.harness.run import Run
from tests.harness.session.subject import Subject
from tests.harness.trial.trial import LawBroken, Trial
from tests.harness.verdict import Finding
from tests.harness.worker.repro import script
from tests.harness.worker.source import WritingTrial
from tests.unit.support.toys import ROWS

TOYS = Path(__file__).with_name("toys.py")
SEVERAL = Path(__file__).with_name("several.py")
SMALL = Case(seqlen_q=ROWS - 1, seqlen_k=2)
CASE = Case(seqlen_q=ROWS, seqlen_k=2)
ENVIRONMENT = {"device": "cpu", "device_name": "abacus", "torch": "2.0"}
SLOW_IMPORTS = ["torch", "torch.fx.experimental.symbolic_shapes", "triton", "hypothesis", "pytest", "jinja2"]
"""What every run of the suite and every script imports first: seconds of computing, and none of it is ours."""
SEEDS = 20
"""How many seeds of a case are tried to find one that breaks a law."""
SubjectOf = Callable[..., Subject]


def finding_of(subject: Subject, law_name: str, case: Case) -> Finding:
    """Run a law on a case, and return the one finding of it that is new to the subject."""
    known = set(subject.known.failures)
    subject.check(law_named(law_name), case)
    (new,) = subject.known.failures.keys() - known
    return subject.known.failures[new].finding


def report_of(subject: Subject) -> Path:
    """Return the folder with the report of the one failure that a subject has met."""
    (failure,) = subject.known.failures.values()
    return subject.known.report_dir / failure.folder


def broken(spec: str, case: Case, law_name: str, claims: tuple[str, ...] = ()) -> tuple[Finding, Trial]:
    """Return what a law finds in a case of a kernel that breaks it, and the trial."""
    trial = Trial(load(spec, claims), case, "cpu", SAFETY)
    try:
        law_named(law_name)(trial)
    except LawBroken as told:
        return told.finding, trial
    raise AssertionError(f"{law_name} holds for {spec} in {case}")


def script_of(spec: str, claims: tuple[str, ...], law_name: str, case: Case, folder: Path) -> Path:
    """Write the script of what a law finds in a case, or in that with another seed if it holds, and return its path."""
    law, kernel = law_named(law_name), load(spec, claims)
    for seed in range(case.seed, case.seed + SEEDS):
        tried = replace(case, seed=seed)
        trial = WritingTrial(kernel, tried, "cpu", SAFETY)
        try:
            law(trial)
        except LawBroken as broken:
            path = folder / "repro.py"
            path.write_text(script(Run(spec, claims, law_name, tried), trial, broken.finding, "broken", None))
            return path
    raise AssertionError(f"{law_name} holds for {spec} with {SEEDS} seeds of {case}")


def mended(path: Path, planted: str, sound: str) -> Path:
    """Have a script call a sound function in place of one with a planted bug, both given by their SPEC."""
    text = path.read_text()
    for wrong, right in zip(planted.split(":"), sound.split(":"), strict=True):
        text = text.replace(wrong, right)
    path.write_text(text)
    return path


def exit_status(path: Path, folder: Path) -> int:
    """Return the exit status of a script that is run in a new process, in an empty folder below the given one."""
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    return forked(run_script, empty, path)


def run_script(folder: Path, path: Path) -> None:
    os.chdir(folder)
    runpy.run_path(str(path), run_name="__main__")


def forked(function: Callable[..., None], *arguments: Any) -> int:
    """Return the exit status of a new process that calls a function.

    It is a fork of a process that has imported the packages which take long, so that this is done once for many tests.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(SLOW_IMPORTS)
    process = context.Process(target=function, args=arguments)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def pytest_run(
    folder: Path, *arguments: str, status: int | None = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run pytest on the property tests in a folder, as a user does, and return the process after it has ended.

    It must end with ``status``, unless that is None.
    """
    words = ["pytest", str(ROOT / "tests/properties"), "--device", "cpu", *arguments]
    variables = {k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"} | environment
    with tempfile.TemporaryDirectory() as kept:
        files = Path(kept, "stdout"), Path(kept, "stderr")
        run = subprocess.CompletedProcess(
            words, forked(run_module, words, folder, variables, files), *(file.read_text() for file in files)
        )
    assert status in (None, run.returncode), run.stdout + run.stderr
    return run


def run_module(words: list[str], folder: Path, environment: dict[str, str], files: tuple[Path, Path]) -> None:
    """Do as ``python -m`` with these words does in a folder, and write stdout and stderr to two files."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    sys.path.insert(0, str(folder))
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def summary_in(folder: Path) -> Any:
    """Return the summary that a run of pytest has written."""
    return json.loads((folder / "reports/summary.json").read_text())


def runs(pid: int) -> bool:
    """Whether a process is still running; a zombie, which has no command line, is not."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False


def has_ended(process: int) -> bool:
    """Whether a process ends within half a minute."""
    for _ in range(300):
        if not runs(process):
            return True
        time.sleep(0.1)  # no event tells the end of a process that is no child of this one
    return False
