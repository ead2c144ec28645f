"""``flashproof.verify``: a kernel is verified in a process of its own, and the verdict is returned."""

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tests.harness.api.result import Result
from tests.harness.api.specs import Kernel, folder_name, spec_of
from tests.harness.files import OWN_FOLDERS
from tests.harness.machine import SHARERS

COMMAND = "tests.harness.commands.command"
"""The module of the command ``flashproof``."""
OURS = COMMAND.partition(".harness.")[0] + ".harness.api"
"""The package of this module: the caller is the first frame outside of it."""

UNDER_WAY = "FLASHPROOF_UNDER_WAY"
"""The variable of the environment that a process has which verifies a kernel."""
STORAGE = "HYPOTHESIS_STORAGE_DIRECTORY"
"""The variable with the folder where failing cases are kept: that of the reports, not that of the caller's tests."""
OF_OTHERS = ("PYTEST_", "HYPOTHESIS_")
"""How variables begin that tell pytest and Hypothesis what concerns the caller's tests, but for ``SHARERS``."""
PACKAGES = ("site-packages", "dist-packages")
"""The names of folders that each process of an environment has on its path."""


def verify(
    kernel: Kernel,
    claims: Mapping[str, Any] | None = None,
    *,
    minutes: float | None = None,
    device: str = "auto",
    seed: int | None = None,
    report_dir: str | Path | None = None,
    options: Sequence[str] = (),
    **more: Any,
) -> Result:
    """Verify a kernel in a process of its own, and return the verdict.

    Args:
        kernel: a SPEC such as "mine.py:attention", or an object that has a name at the top of a module: a function, a
            lambda, a ``functools.partial``, a method of an object with such a name, or an ``AttentionKernel``.
        claims: claims by name, such as ``{"head_dims": (64, 128), "backward": False}``.
        minutes: the time of the whole run, its start and end included; None for 4 minutes of examples.
        device: "auto", "cpu", or the type of an accelerator that torch has, such as "cuda" or "xpu".
        seed: the same seed draws the same cases; None for others in each run, after those that failed in the last one.
        report_dir: the folder of the reports; None for one below ``reports`` that is the same for the same arguments.
        options: further options of the command ``flashproof verify``, such as ``["-k", "forward"]``.
        more: further claims, by name.

    Raises:
        ValueError: in one line, if an argument is wrong, or the kernel can't be imported or called.
        RuntimeError: if the process ended without a verdict, or if the file of the kernel calls this as it is imported.
    """
    __tracebackhide__ = True  # pytest shows the line that calls this
    if UNDER_WAY in os.environ:
        raise RuntimeError(
            "flashproof.verify is called as the file of the kernel is imported: put the call into a function, or below "
            '`if __name__ == "__main__":`'
        )
    spec, words, folder = arguments_of(
        spec_of(kernel, _caller()),
        {**(claims or {}), **more},
        minutes=minutes,
        device=device,
        seed=seed,
        report_dir=report_dir,
        options=options,
    )
    run = subprocess.run(
        [sys.executable, "-P", "-m", COMMAND, "verify", spec, *words],
        env=environment() | {STORAGE: str(folder / ".hypothesis"), "PY_COLORS": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return _result(run)


def arguments_of(
    spec: str,
    claims: Mapping[str, Any] | None = None,
    *,
    minutes: float | None = None,
    device: str = "auto",
    seed: int | None = None,
    report_dir: str | Path | None = None,
    options: Sequence[str] = (),
) -> tuple[str, list[str], Path]:
    """Return a SPEC, the options of ``flashproof verify`` for the arguments of ``verify``, and the folder of reports.

    Raises ValueError, in one line.
    """
    stated = [f"{name}={spelled(name, value)}" for name, value in (claims or {}).items()]
    folder = Path(report_dir) if report_dir else Path("reports", _folder(spec, device, stated))
    words = [*_given(minutes, seed), "--device", device, *options]
    words += [word for claim in stated for word in ("--claims", claim)]
    return spec, [*words, "--report-dir", str(folder), "--json", "-"], folder


def _result(run: "subprocess.CompletedProcess[str]") -> Result:
    __tracebackhide__ = True
    last = next(reversed(run.stderr.split("\n\n")[-1].strip().splitlines()), "no output")
    try:
        verdict = json.loads(run.stdout)
    except ValueError:
        if run.returncode == 4:
            raise ValueError(last.removeprefix("ERROR: ")) from None
        raise RuntimeError(f"flashproof verify ended with status {run.returncode}: {last}") from None
    if verdict["error"]:
        raise ValueError(verdict["error"])
    return Result(verdict, run.stderr)


def _given(minutes: float | None, seed: int | None) -> Iterator[str]:
    """Yield the options for these arguments. Raises ValueError, in one line."""
    if minutes is not None:
        is_number = isinstance(minutes, int | float) and not isinstance(minutes, bool)
        if not is_number or not 0 < minutes < math.inf:
            raise ValueError(f"minutes: got {minutes!r}, expected a positive number")
        yield from ("--budget", f"{60 * minutes}s")
    if seed is not None:
        if not isinstance(seed, int):
            raise ValueError(f"seed: got {seed!r}, expected an integer")
        yield from ("--hypothesis-seed", str(seed))


def spelled(name: str, value: object) -> str:
    """Return the value of a claim as ``--claims`` takes it, such as "64,128". Raises ValueError, in one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list | tuple | range):
        return ",".join(spelled(name, each) for each in value)
    raise ValueError(
        f"claim {name}: got {value!r}, expected a text, a number, True, False, or several of these"
    )


def environment() -> dict[str, str]:
    """Return the environment of a process that verifies: it imports what this one imports."""
    kept = {
        name: value for name, value in os.environ.items() if name == SHARERS or not name.startswith(OF_OTHERS)
    }
    python = (sys.base_prefix, sys.prefix)
    own = [x for x in sys.path if x and Path(x).name not in PACKAGES and not x.startswith(_libraries(python))]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([*OWN_FOLDERS, *own]),
        UNDER_WAY: "1",
    }


def _libraries(prefixes: tuple[str, str]) -> tuple[str, ...]:
    """Return the folders of Python's own library."""
    return tuple(str(Path(prefix, "lib", "python")) for prefix in prefixes)


def _folder(spec: str, device: str, claims: Sequence[str]) -> str:
    told = json.dumps([spec, device, claims])
    return f"{folder_name(spec)}-{hashlib.sha256(told.encode()).hexdigest()[:8]}"


def _caller() -> str:
    """Return the name of the module that has called a function of this package."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(OURS):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")) if frame else ""
