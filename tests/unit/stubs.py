"""What stands in for a kernel in tests of what is asked of it."""

from types import SimpleNamespace
from typing import Any

from kernels.contract import Capabilities


def runs_of(capabilities: Capabilities, **answers: Any) -> Any:
    """Return what stands in for ``Runs`` of a kernel with these claims that refuses nothing, with other ``answers``."""
    info = SimpleNamespace(capabilities=capabilities)
    return SimpleNamespace(info=info, claims_of=lambda law: capabilities, **answers)
