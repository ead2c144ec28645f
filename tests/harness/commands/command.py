"""The command ``flashproof``: pytest on the tests in this package, in the user's folder and environment.

The user's pytest configuration, conftest.py, PYTEST_ADDOPTS and plugins are left out; ``-p NAME`` adds a plugin.
"""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.harness.files import IS_INSTALLED, ROOT, own_version

CONFTEST = f"{ROOT.name}.conftest" if IS_INSTALLED else "conftest"
"""The module with our options."""

USAGE = """\
flashproof COMMAND [SPEC ...] [options]

commands:
  verify SPEC ...              try every law on each kernel
  fuzz SPEC ... --minutes M    the same with fresh random cases until the time is up
  replay PATH                  run the case of one report (its case.json) again
  mutation [SPEC ...]          plant bugs in a kernel and tell which are caught
  merge DIR ...                make one result of several runs, such as the shards of a night
  issues DIR [--write]         open, update and close GitHub issues for the bugs of a run
  serve [--socket PATH]        verify a kernel for each line of JSON, by processes that are warm
  bench [SPEC ...]             time kernels beside PyTorch's, on a GPU

SPEC is package.module:attribute or path/to/file.py:attribute, looked up from the current folder,
or the name of a kernel that comes with Flashproof, such as flash_v2.
verify and fuzz take as many processes as the machine bears, unless -n N says how many.
Exit status: 0 if every law held, 1 if one was broken, 4 for a wrong command line, 5 if nothing was tried.
"""


@dataclass(frozen=True)
class Command:
    """What a command runs.

    Attributes:
        folder: the folder of the tests, below ``tests``.
        takes: what may follow the command's name, before the options: the name of it in messages.
        option: pytest's option that each of these is given by.
        least: how many of these there must be, if ``option`` is not among the options.
        most: how many there may be.
        defaults: options that the user's come after.
    """

    folder: str
    takes: str = "SPEC"
    option: str = "--kernel"
    least: int = 1
    most: float = float("inf")
    defaults: tuple[str, ...] = ()

    def options(self, arguments: Sequence[str]) -> list[str]:
        """Return the arguments after the command's name as options of pytest. Raises ValueError, in one line."""
        given = list(takewhile(lambda x: not x.startswith("-"), arguments))
        rest = arguments[len(given) :]
        named = any(x.partition("=")[0] == self.option for x in rest)
        if not self.least * (not named) <= len(given) <= self.most:
            raise ValueError(
                f"expected {self.takes} before the options, got {' '.join(arguments) or 'nothing'}"
            )
        return [*self.defaults, *(x for value in given for x in (self.option, value)), *rest]


COMMANDS = {
    "verify": Command("properties", defaults=("-n", "auto")),
    "fuzz": Command("properties", defaults=("-n", "auto", "--minutes", "10")),
    "replay": Command("properties", takes="PATH", option="--replay", most=1),
    "mutation": Command("mutation", least=0),
    "bench": Command("bench", least=0),
}

OTHERS = {
    "merge": "tests.harness.commands.merge",
    "issues": "tests.harness.commands.issues",
    "serve": "tests.harness.commands.serve",
}
"""Commands that are no run of pytest: the module of each, whose ``main`` has options of its own."""


def main() -> int:
    """Run the command that ``sys.argv`` names; the exit status is pytest's."""
    name, *arguments = sys.argv[1:] or [""]
    if {name, *arguments} & {"-h", "--help"} and name not in ("bench", *OTHERS):
        return tell_help()
    if name == "--version":
        print(f"flashproof {own_version()}")
        return 0
    if name not in (*COMMANDS, *OTHERS):
        return fail(f"got {name or 'no command'}, expected {', '.join((*COMMANDS, *OTHERS))} or --help")
    try:
        if name in OTHERS:
            return int(import_module(OTHERS[name]).main(arguments))
        command = COMMANDS[name]
        options = command.options(arguments)
    except ValueError as e:
        return fail(f"{name}: {e}")
    sys.path.insert(0, str(Path.cwd()))  # instead of the folder of the script: SPEC is looked up there
    return bench(options) if command.folder == "bench" else run_pytest(command.folder, options)


def fail(text: str) -> int:
    """Print a usage error and return its exit status."""
    print(f"ERROR: flashproof: {text}", file=sys.stderr)
    return pytest.ExitCode.USAGE_ERROR


def run_pytest(folder: str, options: Sequence[str]) -> int:
    """Run pytest on a folder below ``tests``, without the user's own configuration, and return its exit status."""
    for variable in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(variable, None)
    plugins = [CONFTEST, *(["tests.mutation.conftest"] if folder == "mutation" else [])]
    loaded = [x for name in plugins for x in ("-p", name)]
    configuration = ["-c", str(ROOT / "tests/harness/commands/command.ini"), "--rootdir", str(ROOT)]
    return pytest.main([*configuration, *loaded, str(ROOT / "tests" / folder), *options])


def bench(options: Sequence[str]) -> int:
    """Time kernels, and return the exit status."""
    from tests.bench.__main__ import main as time_kernels

    sys.argv[1:] = options
    try:
        time_kernels("flashproof bench")
    except SystemExit as e:  # argparse has printed the reason
        return pytest.ExitCode.USAGE_ERROR if e.code else pytest.ExitCode.OK
    return pytest.ExitCode.OK


def tell_help() -> int:
    """Print the commands, and the options that are ours."""
    parser = ArgumentParser(usage=USAGE, add_help=False, epilog="The options of pytest work as well.")
    group = SimpleNamespace(addoption=parser.add_argument_group("options of ours").add_argument)
    import_module(CONFTEST).pytest_addoption(SimpleNamespace(getgroup=lambda *_: group))
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
