"""Reads planted bugs from the files ``*.diff`` beside this one, in which each is written as a difference.

Blank lines divide a file into paragraphs. One that begins with ``#`` is a heading, any other a bug:

    lse_in_base_2: lse is a logarithm to base 2
    source: https://github.com/flashinfer-ai/flashinfer/issues/4485
    @@ flash_v2:normalise
    -    return acc / l_i[:, None], (m_i + tl.log2(l_i)) * LN2
    +    return acc / l_i[:, None], m_i + tl.log2(l_i)

The first line is its name, and the bug in words. The lines up to ``@@`` are other attributes of a ``Mutant``, as
``attribute: value``, or ``attribute`` alone where the value is true, and comments that begin with ``#``. Each ``@@``
begins an edit, with the function that is edited as ``kernel:name`` or ``module:name``. A registered kernel has the
functions that its module, or a module of its package, defines or imports; a module is one of ``kernels.common``, or any
other below ``kernels``. The lines that follow with ``-``, indented as they are there, stand once in the function and
become those with ``+``.
"""

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

from kernels.mutants.mutant import Edit, Mutant, modules_of, source_of
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
    return Edit(f"{_module_of(*where.split(':'))}:{where.partition(':')[2]}", old, new)


def _module_of(name: str, function: str) -> str:
    """Return the module that defines a function, by the name of a kernel or of a module that stands before it."""
    if name in REGISTERED:
        return _functions(name).get(function, locate(name)[0])
    return f"kernels.common.{name}" if (KERNELS / f"common/{name}.py").exists() else f"kernels.{name}"


@cache
def _functions(kernel: str) -> dict[str, str]:
    """Return the module that defines each function of a registered kernel."""
    imported: dict[str, str] = {}
    defined: dict[str, str] = {}
    for module in modules_of(locate(kernel)[0]):
        for node in ast.parse(source_of(module)).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined[node.name] = module
            elif isinstance(node, ast.ImportFrom):
                imported |= {x.name: str(node.module) for x in node.names}
    return imported | defined
