"""Operator mutants of our kernels that no test can tell from the original, each with the reason.

Keys are the edited line and what it became: a line that changes must be argued anew. Mutants that compile to
the same Triton IR need no entry.
"""

from collections.abc import Mapping

EQUIVALENT: Mapping[str, str] = {}
