"""``flashproof.kernel``: a kernel becomes a test of one's own suite."""

from collections.abc import Callable, Mapping
from typing import Any

from tests.harness.api.result import Result

Kernel = Callable[..., Any]
Test = Callable[[Callable[..., Result]], None]
"""A test that pytest gives the fixture ``flashproof_verify``."""


def kernel(claims: Mapping[str, Any] | Kernel | None = None, **options: Any) -> Any:
    """Make a test of a kernel: ``@flashproof.kernel(head_dims=(64, 128))`` above a function ``test_attention``.

    The function is called as a kernel, ``test_attention(q, k, v, *, causal, sm_scale)``, and the test fails unless it
    holds. The attribute ``kernel`` of the test is the function.

    Args:
        claims: claims by name. The function itself stands here if the decorator has no brackets.
        options: further claims by name, and the other arguments of ``flashproof.verify``.
    """
    if callable(claims):
        return kernel()(claims)

    def decorate(function: Kernel) -> Test:
        def test(flashproof_verify: Callable[..., Result]) -> None:
            result = flashproof_verify(function, claims, **options)
            if not result.held:
                import pytest  # here, as the process of the kernel imports this module as well

                pytest.fail(str(result), pytrace=False)

        test.__name__ = test.__qualname__ = function.__name__
        test.__module__, test.__doc__ = function.__module__, function.__doc__
        test.kernel = function  # type: ignore[attr-defined]  # KERNEL of ``specs``
        return test

    return decorate
