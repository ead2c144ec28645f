"""The name by which another process imports a kernel that is given as an object."""

import importlib
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.harness.api.specs import folder_name, spec_of

TEXT = """
from functools import partial, wraps
from types import SimpleNamespace


def plain(q, k, v, *, causal, sm_scale):
    return q


def test_plain():
    pass


def hidden(q, k, v, *, causal, sm_scale):
    return q


class Model:
    def attend(self, q, k, v, *, causal, sm_scale):
        return q

    @staticmethod
    def static(q, k, v, *, causal, sm_scale):
        return q

    @classmethod
    def of_class(cls, q, k, v, *, causal, sm_scale):
        return q

    def __call__(self, q, k, v, *, causal, sm_scale):
        return q


def made():
    def local(q, k, v, *, causal, sm_scale):
        return q

    return local


test_plain.kernel = hidden
del hidden
short = lambda q, k, v, *, causal, sm_scale: q
bound = partial(plain, window=3)
model = Model()
method = Model().attend
KERNEL = SimpleNamespace(name="mine", forward=plain, capabilities=None)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the module of a file in the current folder."""
    (tmp_path / "mine_of_specs.py").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("mine_of_specs")
    del sys.modules["mine_of_specs"]


@pytest.mark.parametrize(
    ("expression", "name"),
    [
        ("mine.plain", "plain"),
        ("mine.short", "short"),
        ("mine.bound", "bound"),
        ("mine.model", "model"),
        ("mine.method", "method"),
        ("mine.model.attend", "model.attend"),
        ("mine.Model.static", "Model.static"),
        ("mine.Model.of_class", "Model.of_class"),
        ("mine.test_plain.kernel", "test_plain.kernel"),
    ],
)
def test_an_object_is_found_by_its_name(mine: Any, expression: str, name: str) -> None:
    assert spec_of(eval(expression), "nowhere") == f"mine_of_specs.py:{name}"


def test_an_object_without_a_module_is_looked_for_in_that_of_the_caller(mine: Any) -> None:
    assert spec_of(mine.KERNEL, "mine_of_specs") == "mine_of_specs.py:KERNEL"
    with pytest.raises(ValueError, match="got an object of type SimpleNamespace, expected"):
        spec_of(mine.KERNEL, "nowhere")


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("mine.made()", "the function made.<locals>.local"),
        ("lambda q: q", "the function <lambda>"),
        ("partial(mine.plain, window=4)", "a partial of the function plain"),
        ("mine.Model().attend", "the method Model.attend of an object"),
        ("mine.Model()", "an object of type Model"),
        ("3", "an object of type int"),
    ],
)
def test_one_without_a_name_is_refused_in_one_line(mine: Any, expression: str, told: str) -> None:
    kernel = eval(expression, {"mine": mine, "partial": partial})
    with pytest.raises(ValueError, match=r"\Akernel: got .*, expected an object with a name .*\Z") as raised:
        spec_of(kernel, "mine_of_specs")
    assert f"got {told}, expected" in str(raised.value)


def test_one_of_a_notebook_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = ModuleType("of_a_notebook")
    exec("def attention(q, k, v, *, causal, sm_scale): return q", vars(cell))
    monkeypatch.setitem(sys.modules, cell.__name__, cell)
    with pytest.raises(
        ValueError, match=r"\Akernel: got the function attention, .* %%writefile mine.py, .*\Z"
    ):
        spec_of(cell.attention, "nowhere")


def test_a_file_outside_of_the_folder_has_its_whole_path(mine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("mine_of_specs.py").resolve()
    monkeypatch.chdir("/")
    assert spec_of(mine.plain, "nowhere") in (f"{path}:plain", f"{path.relative_to('/')}:plain")


def test_a_module_of_a_package_has_its_name() -> None:
    assert spec_of(folder_name, "nowhere") == "tests.harness.api.specs:folder_name"


def test_a_text_is_a_spec_already() -> None:
    assert spec_of("flash_v2", "nowhere") == "flash_v2"


@pytest.mark.parametrize(
    ("spec", "name"),
    [("a/mine.py:model.f", "mine.model.f"), ("package.mine:f", "mine.f"), ("flash_v2", "flash_v2")],
)
def test_a_folder_is_called_by_what_a_person_reads(spec: str, name: str) -> None:
    assert folder_name(spec) == name


def test_a_namespace_is_no_test_of_ours(mine: Any) -> None:
    mine.other = SimpleNamespace(kernel=mine.KERNEL)
    del mine.KERNEL
    with pytest.raises(ValueError, match="got an object of type SimpleNamespace"):
        spec_of(mine.other.kernel, "mine_of_specs")
