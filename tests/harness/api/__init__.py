"""The functions of the package ``flashproof``: a verdict in one's own program or tests.

They run the command ``flashproof verify`` in a process of its own. All but the fixture import neither torch nor pytest,
since a file with kernels may import them.
"""

from tests.harness.api.decorator import kernel
from tests.harness.api.result import Bug, Result
from tests.harness.api.running import verify

__all__ = ["verify", "kernel", "Result", "Bug"]
