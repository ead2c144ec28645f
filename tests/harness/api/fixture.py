"""The pytest plugin for one's own tests: the fixture ``flashproof_verify``, and how long it takes.

Every run of pytest in the user's environment imports this module, so it imports nothing that takes time.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.harness.api.result import Result
from tests.harness.api.running import verify

QUICK = 0.5
"""The minutes that a test takes, unless the command line or the test itself says otherwise."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the time of a test, by a name that is ours."""
    parser.getgroup("flashproof").addoption(
        "--flashproof-minutes",
        type=float,
        metavar="M",
        default=QUICK,
        help="minutes of each test that verifies a kernel and names no time (default: %(default)s)",
    )


@pytest.fixture
def flashproof_verify(request: pytest.FixtureRequest) -> Callable[..., Result]:
    """Return ``flashproof.verify``, with the time of ``--flashproof-minutes``. Its score goes into the JUnit file."""

    def verified(kernel: Any, *arguments: Any, minutes: float | None = None, **options: Any) -> Result:
        __tracebackhide__ = True
        minutes = request.config.getoption("--flashproof-minutes") if minutes is None else minutes
        result = verify(kernel, *arguments, minutes=minutes, **options)
        request.node.user_properties.append(("flashproof_score", result.score))
        return result

    return verified
