"""Planted bugs: every edit applies, and makes a kernel that differs from the original only there."""

import ast
import builtins
import importlib
import re
import symtable
from pathlib import Path

import pytest
import torch

from kernels import mutants, registry
from kernels.algorithms.flash_v2 import KERNEL
from kernels.mutants import CATALOGUE, MUTANTS
from kernels.mutants.mutant import Edit, load_module, source_of
from kernels.mutants.reading import bug
from strategies.case import Case
from tests.harness.bugs.failure import FEATURES
from tests.harness.trial.pattern import known_numbers
from tests.harness.trial.trial import Trial, run_kernel
from tests.mutation.diagnosis import CAUSES, FACTS
from tests.mutation.equivalent import ARGUMENTS
from tests.mutation.targets import targets
from tests.unit.support.calling import DEVICE


@pytest.mark.parametrize("name", CATALOGUE)
def test_edit_applies_the_kernel_imports_and_its_causes_are_known_words(name: str) -> None:
    mutant = CATALOGUE[name]
    for module, text in mutant.sources().items():
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(source_of(module)))
    kernel = registry.load(f"kernels.mutants:{name}")
    assert kernel.name == name
    assert kernel.capabilities.dtypes == registry.load(mutant.kernel).capabilities.dtypes
    words = {*FEATURES, *FACTS, *kernel.capabilities.launch, *known_numbers(0.3, 2, 0.25)}
    assert set(CAUSES[name]) <= words


def test_catalogue_is_what_it_says() -> None:
    assert len(CATALOGUE) == sum(map(len, MUTANTS.values())), "two planted bugs have one name"
    of_flash_v2 = [m for m in CATALOGUE.values() if m.kernel == "flash_v2"]
    of_backward = [m for m in of_flash_v2 if any(re.search("backward|gradient|_d", e.where) for e in m.edits)]
    assert len(of_flash_v2) >= 80
    assert 0.4 < len(of_backward) / len(of_flash_v2) < 0.6
    assert sum(name.startswith("lse_") for name in CATALOGUE) >= 10
    assert sum(m.subtle for m in CATALOGUE.values()) >= 15
    assert all(m.what and name == m.name for name, m in CATALOGUE.items())


def test_every_bug_has_its_causes() -> None:
    assert CAUSES.keys() == CATALOGUE.keys()


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_bug_takes_no_name_that_is_not_there(name: str) -> None:
    """A name that does not exist would raise an exception instead of a wrong answer."""
    for text in CATALOGUE[name].sources().values():
        tables = [module := symtable.symtable(text, name, "exec")]
        for table in tables:
            tables += table.get_children()
        known = {x.get_name() for x in module.get_symbols()} | set(dir(builtins))
        assert {x.get_name() for table in tables for x in table.get_symbols() if x.is_global()} <= known


BUG = """\
flag: a flag is set
source: https://example.com/1
# Why it is written like this.
subtle
@@ tiles:advance
-    pointers += offset
-    if ALIGNED:
+    if True:
@@ tiles:dot
-    return tl.dot(a, b, acc, input_precision=PRECISION)"""


def test_a_bug_is_read_from_its_difference() -> None:
    flag = bug(BUG)
    assert (flag.name, flag.what, flag.kernel) == ("flag", "a flag is set", "flash_v2")
    assert (flag.source, flag.subtle, flag.device, flag.raises) == ("https://example.com/1", True, "", False)
    assert flag.edits == (
        Edit("kernels.common.tiles:advance", "    pointers += offset\n    if ALIGNED:", "    if True:"),
        Edit("kernels.common.tiles:dot", "    return tl.dot(a, b, acc, input_precision=PRECISION)", ""),
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [(": a flag is set", ""), ("subtle", "subtel"), ("@@ ", "@ "), ("+    if True:", "    if True:")],
)
def test_a_bug_that_cannot_be_read_is_an_error(old: str, new: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        bug(BUG.replace(old, new))


def test_an_unknown_bug_is_no_kernel() -> None:
    with pytest.raises(registry.SpecError, match=r"no 'no_such_bug' in kernels\.mutants"):
        registry.load("kernels.mutants:no_such_bug")


def test_an_edit_whose_line_is_gone_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"kernels\.common\.tiles:advance: expected once, found 0 times: 'no such line'"
    ):
        Edit("kernels.common.tiles:advance", "no such line", "").apply(source_of("kernels.common.tiles"))


def test_a_bug_in_what_the_kernel_imports_reaches_it_and_nothing_else() -> None:
    trial = Trial(KERNEL, Case(seqlen_q=3, seqlen_k=70, head_dim=16), DEVICE, 0.0)
    wrong = load_module("kernels.algorithms.flash_v2", CATALOGUE["tail_tile_dropped"].sources()).KERNEL
    before, after = (run_kernel(KERNEL, trial.problem, {}, backward=False).out for _ in range(2))
    assert torch.equal(before, after)
    assert not torch.equal(before, run_kernel(wrong, trial.problem, {}, backward=False).out)
    assert mutants.CATALOGUE["tail_tile_dropped"].edits[0].module == "kernels.common.tiles"


def test_arguments_name_mutants_that_there_are() -> None:
    changes = {target.change for target in targets("flash_v2")}
    argued = [change for argument in ARGUMENTS for change in argument.changes]
    assert [change for change in argued if change not in changes] == []
    assert len(set(argued)) == len(argued)


def test_modules_between_edited_ones_keep_what_they_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has run a planted bug runs the sound kernel next."""
    package = tmp_path / "layers"
    package.mkdir()
    texts = {
        "__init__": "",
        "low": "VALUE = 'right'\n",
        "middle": "from layers.low import VALUE\n",
        "high": "from layers import low, middle\nfrom layers.low import VALUE\n",
    }
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    edited = load_module("layers.high", {"layers.low": "VALUE = 'wrong'\n"})
    assert (edited.VALUE, edited.low.VALUE, edited.middle.VALUE) == ("wrong", "wrong", "right")
    again = importlib.import_module("layers")
    assert (again.low.VALUE, again.middle.VALUE) == ("right", "right")
