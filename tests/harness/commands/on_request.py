"""The pytest plugin of the installed package: it does nothing unless pytest runs with ``--pyargs flashproof.tests...``.

Every run of pytest in the user's environment imports this module, so it imports nothing that takes time or has options.
"""

from importlib import import_module
from pathlib import Path

import pytest

HERE = Path(__file__).parents[3]
TESTS = f"{HERE.name}.tests"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """If pytest is to run any of our tests, load our options and replace the names of the tests by their paths."""
    asked = [place for place, arg in enumerate(args) if arg.startswith(TESTS)]
    for place in asked:
        module, *rest = args[place].split("::")
        path = HERE.joinpath(*module.split(".")[1:])
        args[place] = "::".join([str(path if path.is_dir() else path.with_suffix(".py")), *rest])
    if asked:
        # By the name that pytest gives a conftest.py, which it then doesn't load a second time.
        name = str(HERE / "conftest.py")
        early_config.pluginmanager.register(import_module(f"{HERE.name}.conftest"), name)
