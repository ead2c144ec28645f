"""Reads planted bugs from the files ``*.diff`` beside this one, in which each is written as a difference.

Blank lines divide a file into paragraphs. One that begins with ``#`` is a heading, any other a bug:

    lse_in_base_2: lse is a logarithm to base 2
    source: https://github.com/flashinfer-ai/flashinfer/issues/4485
    @@ flash_v2:normalise
    -    return acc / l_i[:, None], (m_i + tl.log2(l_i)) * LN2
    +    return acc / l_i[:, None], m_i + tl.log2(l_i)

The first line is its name, and the bug in words. The lines up to ``@@`` are other attributes of a ``Mutant``, as
``attribute: value``, or ``attribute`` alone where the value is true, and comments that begin with ``#``. Each ``@@``
begins an edit, with the function that is edited as ``module:name``: the module is that of a registered kernel, by the
kernel's name, or one of ``kernels.common``, or any other below ``kernels``. The lines that follow with ``-``, indented
as they are there, stand once in the function and become those with ``+``.
"""

import re
from pathlib import Path
from typing import Any

from kernels.mutants.mutant import Edit, Mutant
from kernels.registry import REGISTERED, locate

KERNELS = Path(__file__).parents[1]


def bugs(file: str) -> tuple[Mutant, ...]:
    """Return the planted bugs of one file, such as ``forward``. Raises ValueError for a bug that can't be read."""
    paragraphs = Path(__file__).with_name(f"{file}.diff").read_text().strip("\n").split("\n\n")
    return tuple(bug(text) for text in paragraphs if not text.startswith("#"))


def bug(text: str) -> Mutant:
    """Return the bug that a paragraph describes. Raises ValueError if it can't be read."""
    head, *edits = re.split("^@@ ", text, flags=re.MULTILINE)
    title, *others = (line for line in head.splitlines() if not line.startswith("#"))
    name, _, what = title.partition(": ")
    attributes: dict[str, Any] = dict(map(attribute, others))
    if not what or not edits or not attributes.keys() <= Mutant.__dataclass_fields__.keys():
        raise ValueError(f"expected a name and words, attributes of a Mutant, and then edits, got {text!r}")
    return Mutant(name, what, tuple(map(edit, edits)), **attributes)


def attribute(line: str) -> tuple[str, str | bool]:
    """Return an attribute of a ``Mutant`` and its value."""
    name, colon, value = line.partition(": ")
    return name, value if colon else True


def edit(text: str) -> Edit:
    """Return the edit that the lines after ``@@`` describe. Raises ValueError for a line without ``-`` or ``+``."""
    where, *lines = text.splitlines()
    if strange := [line for line in lines if line[:1] not in ("-", "+")]:
        raise ValueError(f"{where}: expected lines that begin with - or +, got {strange[0]!r}")
    old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
    module, _, function = where.partition(":")
    return Edit(f"{_path_of(module)}:{function}", old, new)


def _path_of(module: str) -> str:
    """Return the dotted path of a module that an edit names."""
    if module in REGISTERED:
        return locate(module)[0]
    return f"kernels.common.{module}" if (KERNELS / f"common/{module}.py").exists() else f"kernels.{module}"
