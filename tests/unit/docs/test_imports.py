"""Imports go one way: from the laws and what runs them to strategies, to the contract of kernels, to the references."""

import ast
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

from tests.harness.files import ROOT

DESCRIPTIONS = ("reference.arithmetic", "reference.family", "reference.mask_pattern")
"""What describes a kernel's roundings and a mask. The other modules of ``reference`` compute answers and bounds."""

BELOW_KERNELS = (*DESCRIPTIONS, "kernels.contract")
BELOW_LAWS = (*BELOW_KERNELS, "reference", "strategies")
BELOW_RUNNING = (*BELOW_LAWS, "tests.harness", "tests.harness.accelerators")
BELOW_WRITING = (
    "tests.harness.interpreter",
    "tests.harness.interpreter.ttir.ir",
    "tests.harness.interpreter.ttir.calls",
)
BELOW_TRIAL = (*BELOW_RUNNING, "tests.harness.device", "tests.harness.interpreter")
BELOW_REPORT = (*BELOW_RUNNING, "tests.harness.running", "tests.harness.bugs")

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "reference.arithmetic": (),
    "reference.family": ("reference.arithmetic",),
    "reference.mask_pattern": (),
    "reference": DESCRIPTIONS,
    "kernels.contract": DESCRIPTIONS,
    "strategies": (*BELOW_KERNELS, "reference"),
    "kernels.common": BELOW_KERNELS,
    "kernels": BELOW_KERNELS,
    "kernels.algorithms": (*BELOW_KERNELS, "kernels.common", "kernels"),
    "kernels.adapters": BELOW_KERNELS,
    "kernels.mutants": (*BELOW_KERNELS, "kernels"),
    "tests.harness": BELOW_LAWS,
    "tests.harness.accelerators": (),
    "tests.harness.device": BELOW_RUNNING,
    "tests.harness.interpreter": ("tests.harness",),
    "tests.harness.interpreter.ttir.ir": (),
    "tests.harness.interpreter.ttir.calls": (
        "tests.harness.interpreter",
        "tests.harness.interpreter.ttir.ir",
    ),
    "tests.harness.interpreter.ttir.writing": BELOW_WRITING,
    "tests.harness.interpreter.ttir": (*BELOW_WRITING, "tests.harness.interpreter.ttir.writing"),
    "tests.harness.trial": BELOW_TRIAL,
    "tests.harness.designs": (*BELOW_TRIAL, "tests.harness.trial"),
    "tests.harness.fitting": (*BELOW_TRIAL, "tests.harness.trial"),
    "tests.harness.worker": (
        *BELOW_TRIAL,
        "tests.harness.trial",
        "tests.harness.designs",
        "tests.harness.fitting",
        "kernels",
    ),
    "tests.harness.running": (*BELOW_RUNNING, "tests.harness.device", "kernels"),
    "tests.harness.bugs": (*BELOW_RUNNING, "tests.harness.running"),
    "tests.harness.report": BELOW_REPORT,
    "tests.harness.programs": (*BELOW_REPORT, "tests.harness.report", "kernels"),
    "tests.harness.api": ("tests.harness",),
    "tests.harness.certificates": BELOW_REPORT,
    "tests.harness.diagnosis": (*BELOW_REPORT, "tests.harness.report", "tests.harness.certificates"),
    "tests.harness.session": (
        *BELOW_REPORT,
        "tests.harness.report",
        "tests.harness.programs",
        "tests.harness.certificates",
        "tests.harness.diagnosis",
        "tests.harness.device",
        "kernels",
    ),
    "tests.harness.commands": (
        *BELOW_REPORT,
        "tests.harness.report",
        "tests.harness.programs",
        "tests.harness.api",
        "tests.harness.session",
        "kernels",
        "tests.bench",
    ),
    "tests.properties": (*BELOW_TRIAL, "tests.harness.trial"),
}
"""By package, the others that its modules may import, lowest first. A module belongs to the longest name that it begins
with. Modules that belong to none, such as unit tests, may import everything.
"""

NAMED = {*MAY_IMPORT, *(name for names in MAY_IMPORT.values() for name in names)}
FOLDERS = {name.partition(".")[0] for name in MAY_IMPORT}


def package_of(name: str) -> str:
    """Return the package in ``MAY_IMPORT`` to which a module, or a name in a module, belongs; else the name itself."""
    return max((x for x in NAMED if f"{name}.".startswith(f"{x}.")), key=len, default=name)


def imported(source: str, package: str) -> Iterator[str]:
    """Yield what a module of a package imports, wherever in its text: modules, and names as ``module.name``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (x.name for x in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{module}.{x.name}" for x in node.names)


def forbidden(root: Path) -> list[str]:
    """Return the imports below a folder that ``MAY_IMPORT`` does not allow, each as ``importer > imported``."""
    found = []
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        *folders, stem = path.relative_to(root).with_suffix("").parts
        importer = ".".join(folders if stem == "__init__" else [*folders, stem])
        package = package_of(importer)
        if package not in MAY_IMPORT:
            continue
        found += [
            f"{importer} > {name}"
            for name in imported(path.read_text(), ".".join(folders))
            if name.partition(".")[0] in FOLDERS and package_of(name) not in (package, *MAY_IMPORT[package])
        ]
    return found


def test_imports_go_one_way() -> None:
    assert forbidden(ROOT) == []


def test_packages_import_none_that_is_declared_after_them() -> None:
    order = list(MAY_IMPORT)
    for package, names in MAY_IMPORT.items():
        assert {name for name in names if name in order} <= {*order[: order.index(package)]}, package


@pytest.mark.parametrize(
    ("module", "line", "name"),
    [
        ("reference.bounds.exact", "from kernels.contract import DTYPES", "kernels.contract.DTYPES"),
        ("kernels.contract.declaration", "from strategies.case import Case", "strategies.case.Case"),
        ("kernels.contract", "from kernels.common import tiles", "kernels.common.tiles"),
        ("kernels.common.tiles", "from reference.masks import blocks", "reference.masks.blocks"),
        ("strategies.case", "import kernels.registry", "kernels.registry"),
        ("kernels.adapters.libraries.fla", "from tests.harness.law import LAWS", "tests.harness.law.LAWS"),
        (
            "tests.harness.interpreter.ttir.ir.parse",
            "from kernels.common.tiles import advance",
            "kernels.common.tiles.advance",
        ),
        ("tests.harness.interpreter.ttir.ir.parse", "from .... import commands", "tests.harness.commands"),
        (
            "tests.harness.trial.trial",
            "from ..interpreter.ttir import launch",
            "tests.harness.interpreter.ttir.launch",
        ),
        ("tests.harness.trial.trial", "from tests.harness.worker import main", "tests.harness.worker.main"),
        (
            "tests.harness.running.runs",
            "from tests.harness.bugs.bug import Bug",
            "tests.harness.bugs.bug.Bug",
        ),
        (
            "tests.harness.verdict",
            "from tests.harness.trial.judge import judge",
            "tests.harness.trial.judge.judge",
        ),
        ("tests.harness.law", "from tests.unit.support.toys import ROWS", "tests.unit.support.toys.ROWS"),
        (
            "tests.properties.test_forward",
            "from kernels.common.tiles import advance",
            "kernels.common.tiles.advance",
        ),
    ],
)
def test_an_arrow_back_is_seen(tmp_path: Path, module: str, line: str, name: str) -> None:
    is_package = (ROOT / module.replace(".", "/")).is_dir()
    path = tmp_path / (module.replace(".", "/") + ("/__init__.py" if is_package else ".py"))
    path.parent.mkdir(parents=True)
    path.write_text(f"import torch\n\n\ndef function():\n    {line}\n")
    assert forbidden(tmp_path) == [f"{module} > {name}"]
