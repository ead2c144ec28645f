"""Planted bugs: ``kernels.mutants:NAME`` is a SPEC like any other, a kernel of ours with the bug NAME.

Each is an edit of a kernel's source, kept as data, so that it can't lag behind the kernel. The suite must
catch every one (``tox -e mutation``), and find nothing in the kernel as it is.
"""

from typing import Any

from kernels.mutants.atomic import ATOMIC
from kernels.mutants.backward import BACKWARD
from kernels.mutants.decode import DECODE
from kernels.mutants.dropout import DROPOUT
from kernels.mutants.flash_v1 import FLASH_V1
from kernels.mutants.flash_v3 import FLASH_V3
from kernels.mutants.flash_v3_gluon import FLASH_V3_GLUON
from kernels.mutants.forward import FORWARD
from kernels.mutants.fp8 import FP8
from kernels.mutants.launcher import LAUNCHER
from kernels.mutants.lazy import LAZY
from kernels.mutants.lse import LSE
from kernels.mutants.padding import PADDING
from kernels.mutants.persistent import PERSISTENT
from kernels.mutants.ring import RING
from kernels.mutants.staged import STAGED
from kernels.mutants.varlen import VARLEN
from kernels.mutants.window import WINDOW

MUTANTS = (
    *FORWARD,
    *LSE,
    *BACKWARD,
    *LAUNCHER,
    *ATOMIC,
    *DECODE,
    *DROPOUT,
    *FLASH_V1,
    *FLASH_V3,
    *FLASH_V3_GLUON,
    *FP8,
    *LAZY,
    *PADDING,
    *PERSISTENT,
    *RING,
    *STAGED,
    *VARLEN,
    *WINDOW,
)
CATALOGUE = {mutant.name: mutant for mutant in MUTANTS}
"""Every planted bug, by name."""


def __getattr__(name: str) -> Any:
    """A planted bug's kernel, by the bug's name."""
    if name in CATALOGUE:
        return CATALOGUE[name].load()
    raise AttributeError(f"no planted bug {name!r}")
