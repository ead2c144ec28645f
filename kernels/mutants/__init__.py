"""Planted bugs: ``kernels.mutants:NAME`` is a SPEC like any other, a kernel of ours with the bug NAME.

Each is an edit of a kernel's source, kept as data, so that it can't lag behind the kernel. The suite must
catch every one (``tox -e mutation``), and find nothing in the kernel as it is. ``kernels.mutants.reading`` says how
they are written.
"""

from typing import Any

from kernels.mutants.mutant import Mutant
from kernels.mutants.reading import bugs

FILES = (
    *("forward", "lse", "backward", "launcher", "atomic", "bias", "combined", "decode"),
    *(
        "dropout",
        "flash_v1",
        "flash_v3",
        "flash_v3_gluon",
        "flash_v3_gluon_atomic",
        "fp8",
        "fp8_gluon",
        "lazy",
        "padding",
        "persistent",
    ),
    *("ring", "scores", "staged", "varlen", "window"),
)
MUTANTS = {file: bugs(file) for file in FILES}
"""The planted bugs of each file."""
CATALOGUE: dict[str, Mutant] = {mutant.name: mutant for mutants in MUTANTS.values() for mutant in mutants}
"""Every planted bug, by name."""


def __getattr__(name: str) -> Any:
    """A planted bug's kernel, by the bug's name."""
    if name in CATALOGUE:
        return CATALOGUE[name].load()
    raise AttributeError(f"no planted bug {name!r}")
