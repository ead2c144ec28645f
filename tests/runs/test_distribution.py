"""The unpacked wheel works in the environment of a user whose own packages are called ``kernels`` and ``tests``."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands import command
from tests.harness.files import ROOT
from tests.harness.session.header import OLDEST_HYPOTHESIS

FOLDERS = ("kernels", "strategies", "reference", "tests")
SOURCES = (*FOLDERS, "conftest.py", "setup.py", "pyproject.toml", "README.md", "LICENSE")

BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
FLASHPROOF = """
import sys
from importlib.metadata import entry_points
(script,) = entry_points(group="console_scripts", name="flashproof")
sys.exit(script.load()())
"""

MINE = """
import torch
from tests.helper import scale_of


def attention(q, k, v, *, causal, sm_scale):
    return sound(q, k, v, causal=causal, sm_scale=scale_of(causal, sm_scale))


def sound(q, k, v, *, causal, sm_scale):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q.float() @ k.float().mT * sm_scale
    if causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~seen, -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    return (torch.softmax(scores, -1).masked_fill(empty, 0.0) @ v.float()).to(q.dtype)
"""
HELPER = "def scale_of(causal, sm_scale):\n    return sm_scale * 1.5 if causal else sm_scale\n"
CONFTEST = """
import os
import sys


def pytest_addoption(parser):
    parser.addoption("--device")  # one of ours too


def pytest_sessionfinish(session):
    assert session.config.pluginmanager.hasplugin("flashproof")
    assert not {"torch", "triton", "hypothesis"} & set(sys.modules)
    assert "TRITON_INTERPRET" not in os.environ
"""

OWN_TEST = """\
import flashproof
from kernels import mine


def test_attention(flashproof_verify):
    claims = {"dtypes": "float32", "backward": False}
    flashproof_verify(mine.attention, claims, seed=1, device="cpu", options=["-k", "forward or exact"]).check()
"""
DECORATED = """\
import flashproof
from kernels import mine
from hypothesis import given, settings, strategies


@flashproof.kernel(dtypes="float32", backward=False, device="cpu", options=["-k", "forward or exact"])
def test_sound(q, k, v, *, causal, sm_scale):
    return mine.sound(q, k, v, causal=causal, sm_scale=sm_scale)


@given(strategies.integers())
def test_of_theirs(number):
    assert settings.default.max_examples == 7
"""
"""Two test files of a user's own; the second one has a test of theirs as well, for Hypothesis."""
OWN_CONFTEST = """
from hypothesis import settings
settings.register_profile("theirs", max_examples=7)
settings.load_profile("theirs")


def pytest_addoption(parser):
    parser.addoption("--device")  # one of ours too
"""

setup = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")


class TestRewriting:
    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            ("from kernels.common import x  # kernels.common\n", "from @kernels.common import x  # kernels.common\n"),
            ("from tests import harness\n", "from @tests import harness\n"),
            ("if a:\n    from reference.masks import (\n        b,\n    )\n",) * 2,
            ("from tests_of_mine import kernels\nfrom .kernels import x\n",) * 2,
            ("def f(tests):\n    yield from tests.all()\n",) * 2,
            ('KERNEL = "kernels.algorithms.flash_v2:KERNEL"\n', 'KERNEL = "@kernels.algorithms.flash_v2:KERNEL"\n'),
            ("name.startswith('kernels.')\n", "name.startswith('@kernels.')\n"),
            ('f("strategies.case", f"tests.panel.{x}")\n', 'f("@strategies.case", f"@tests.panel.{x}")\n'),
            ('"""tests.harness judges what kernels.common.tiles computes."""\n',) * 2,
            ('x = "kernels"; y = "tests/unit"; z = "my.kernels.x"\n',) * 2,
        ],
    )  # fmt: skip
    def test_names_of_ours_are_prefixed(self, source: str, expected: str) -> None:
        expected = expected.replace("from reference", "from @reference")
        assert setup["packaged"](source) == expected.replace("@", "flashproof.")

    def test_an_import_that_leaves_a_name_of_ours_in_the_code_is_refused(self) -> None:
        with pytest.raises(
            Exception, match=r"expected `from \.\.\. import`, got `import kernels\.common\.tiles`"
        ):
            setup["packaged"]("import kernels.common.tiles\n")


class TestCommandLine:
    @pytest.mark.parametrize(
        ("name", "given", "expected"),
        [
            ("verify", "a:b c:d -q", "-n auto --kernel a:b --kernel c:d -q"),
            ("verify", "-q --kernel=a:b -n0", "-n auto -q --kernel=a:b -n0"),
            ("fuzz", "a:b --minutes 2", "-n auto --minutes 10 --kernel a:b --minutes 2"),
            ("replay", "case.json --device cpu", "--replay case.json --device cpu"),
            ("mutation", "--seeds 1", "--seeds 1"),
            ("bench", "flash_v2 --quick", "--kernel flash_v2 --quick"),
        ],
    )
    def test_what_comes_before_the_options_becomes_one(self, name: str, given: str, expected: str) -> None:
        assert command.COMMANDS[name].options(given.split()) == expected.split()

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ("", r"got no command, expected verify, fuzz, .* or --help"),
            ("nonsense", r"got nonsense, expected verify, .*"),
            ("verify --examples 5", r"verify: expected SPEC before the options, got --examples 5"),
            ("replay", r"replay: expected PATH before the options, got nothing"),
            ("merge", r"merge: the following arguments are required: DIR"),
            ("issues a b", r"issues: unrecognized arguments: b"),
            ("replay a b", r"replay: expected PATH before the options, got a b"),
        ],
    )
    def test_a_usage_error_is_one_line(
        self, given: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["flashproof", *given.split()])
        assert command.main() == pytest.ExitCode.USAGE_ERROR
        assert re.fullmatch(rf"ERROR: flashproof: {told}\n", capsys.readouterr().err)

    def test_help_names_every_command_and_option(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["flashproof", "verify", "--help"])
        assert command.main() == 0
        text = capsys.readouterr().out
        assert all(
            f"  {name} " in text
            for name in (*command.COMMANDS, *command.OTHERS, "--kernel", "--claims", "--corpus")
        )


def built(kind: str, source: Path, into: Path) -> Path:
    """Build a distribution from a folder, a "wheel" or an "sdist", and return its path."""
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(into)]
    run = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (found,) = into.glob({"wheel": "flashproof-*-py3-none-any.whl", "sdist": "flashproof-*.tar.gz"}[kind])
    return found


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what a distribution is built from, because a build leaves files behind."""
    checkout = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, checkout / name)
    return checkout


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel."""
    wheel = built("wheel", checkout, tmp_path_factory.mktemp("wheels"))
    # A build must leave nothing else in a checkout, where pytest may take it for an installed package.
    assert {x.name for x in checkout.iterdir()} == {*SOURCES, "build"}
    return wheel


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the unpacked wheel."""
    site = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(site)
    return site


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """Return a folder with a user's own packages, and with a pytest configuration that would break our run."""
    files = {
        "kernels/__init__.py": "",
        "kernels/mine.py": MINE,
        "tests/__init__.py": "",
        "tests/helper.py": HELPER,
        "tests/test_mine.py": "def test_mine():\n    pass\n",
        "conftest.py": CONFTEST,
        "pytest.ini": "[pytest]\naddopts = --device mine --strict-markers\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run(
    site: Path, folder: Path, *arguments: str, status: int = 0, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run Python in the user's folder, in an environment with the package, and return the process.

    It must end with ``status``.
    """
    inherited = {
        x: y for x, y in os.environ.items() if not x.startswith(("TRITON_", "PYTEST_", "HYPOTHESIS_"))
    }
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=inherited | {"PYTHONPATH": str(site)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert result.returncode == status, result.stdout + result.stderr
    return result


def verify(site: Path, folder: Path, spec: str, status: int = 0) -> "subprocess.CompletedProcess[str]":
    """Run ``flashproof verify`` for a few examples."""
    options = ["--device", "cpu", "--examples", "10", "--claims", "dtypes=float32", "--shrink-calls", "50"]
    options += ["--shrink-seconds", "2", "-k", "forward", "--hypothesis-seed", "0"]
    command = ["-c", FLASHPROOF, "verify", spec, *options]
    return run(site, folder, *command, status=status, PYTEST_ADDOPTS="--nonsense")


class TestWheel:
    def test_it_has_the_packages_without_tests_of_our_own_code(self, site: Path) -> None:
        assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == {"flashproof"}
        package = site / "flashproof"
        assert {x.name for x in package.iterdir()} == {*FOLDERS, "__init__.py", "conftest.py", "py.typed"}
        for ending in ("py", "ini", "diff", "json"):
            files = {
                str(path.relative_to(ROOT))
                for folder in FOLDERS
                for path in (ROOT / folder).rglob(f"*.{ending}")
                if path.relative_to(ROOT).parts[:2] not in (("tests", "unit"), ("tests", "runs"))
            }
            assert files
            assert {str(x.relative_to(package)) for x in package.glob(f"*/**/*.{ending}")} == files

    def test_a_planted_bug_is_a_kernel_there(self, site: Path, user: Path) -> None:
        program = (
            "from flashproof.kernels.mutants import CATALOGUE; print(CATALOGUE['lse_negative'].load().name)"
        )
        assert run(site, user, "-c", program).stdout == "lse_negative\n"

    def test_nothing_in_it_imports_by_the_names_of_a_checkout(self, site: Path) -> None:
        any_of = "|".join(FOLDERS)
        pattern = re.compile(rf"\bfrom ({any_of})(\.\w+)* import\b|\bimport ({any_of})\.")
        found = {
            f"{path.name}: {line}"
            for path in (site / "flashproof").rglob("*.py")
            for line in path.read_text().splitlines()
            if pattern.search(line)
        }
        assert not found

    @pytest.mark.nightly
    def test_an_sdist_makes_the_same_wheel_and_both_may_be_uploaded(
        self, checkout: Path, wheel: Path, tmp_path: Path
    ) -> None:
        sdist = built("sdist", checkout, tmp_path)
        with tarfile.open(sdist) as archive:
            archive.extractall(tmp_path, filter="data")
        again = built("wheel", tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path)
        first, second = (zipfile.ZipFile(path) for path in (wheel, again))
        assert {x.filename: x.CRC for x in first.infolist()} == {x.filename: x.CRC for x in second.infolist()}
        pytest.importorskip("twine", reason="twine is not installed, which checks what may be uploaded")
        check = [sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)]
        checked = subprocess.run(check, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout

    @pytest.mark.nightly
    def test_a_bug_in_the_users_own_package_is_found_and_reproduced(self, site: Path, user: Path) -> None:
        result = verify(site, user, "kernels.mine:attention", pytest.ExitCode.TESTS_FAILED)
        assert "mine.attention: law `forward` is broken, out is wrong (float32)" in result.stdout
        (script,) = (user / "reports").rglob("repro.py")
        assert f"flashproof replay {script.relative_to(user).with_name('case.json')}" in result.stdout
        assert "actual" in run(site, user, str(script), status=1).stdout
        (user / "tests/helper.py").write_text(HELPER.replace("1.5", "1.0"))
        run(site, user, str(script))
        case = str(script.with_name("case.json"))
        run(site, user, "-c", FLASHPROOF, "replay", case, "--device", "cpu")

    def test_a_sound_kernel_holds_by_the_path_of_its_file(self, site: Path, user: Path) -> None:
        assert "\nprocesses: -n " in verify(site, user, "kernels/mine.py:sound").stdout

    @pytest.mark.nightly
    def test_an_unknown_spec_is_a_usage_error(self, site: Path, user: Path) -> None:
        result = verify(site, user, "kernels.absent:attention", pytest.ExitCode.USAGE_ERROR)
        assert "ERROR: kernel 'kernels.absent:attention': no module 'kernels.absent'" in result.stderr
        assert not (user / "reports").exists()

    def test_the_users_own_tests_see_nothing_of_it(self, site: Path, user: Path) -> None:
        result = run(site, user, "-m", "pytest", "-p", "no:hypothesispytest")
        assert "1 passed" in result.stdout

    def test_a_kernel_is_verified_in_the_users_own_tests(self, site: Path, user: Path) -> None:
        (user / "tests/test_own.py").write_text(OWN_TEST)
        (user / "tests/test_decorated.py").write_text(DECORATED)
        (user / "conftest.py").write_text(OWN_CONFTEST)
        options = ["-n", "2", "-k", "not test_mine", "--flashproof-minutes", "0.2", "--junitxml", "junit.xml"]
        result = run(site, user, "-m", "pytest", *options, status=1)
        assert "1 failed, 2 passed" in result.stdout
        told = r"^E +AssertionError: mine.attention: broken, score 0(\.\d+)?, \d+ examples? in \d+ s$"
        assert re.search(told, result.stdout, re.MULTILINE)
        assert re.search(r"^E +smallest  Case\(.*causal=True", result.stdout, re.MULTILINE)
        assert "running.py" not in result.stdout, "a frame of ours"
        assert 'name="flashproof_score" value="1.0"' in (user / "junit.xml").read_text()
        folders = {path.name.partition("-")[0] for path in (user / "reports").iterdir()}
        assert folders == {"mine.attention", "test_decorated.test_sound.kernel"}
        # Its examples are kept beside its reports, and theirs where Hypothesis keeps them.
        assert not list((user / ".hypothesis").rglob("*flashproof*"))

    def test_a_program_reads_the_verdict_alone_on_stdout(self, site: Path, user: Path) -> None:
        options = [
            "--device",
            "cpu",
            "--examples",
            "20",
            "-k",
            "forward and float32",
            "--json",
            "-",
            "-n",
            "2",
        ]
        result = run(site, user, "-c", FLASHPROOF, "verify", "kernels.mine:attention", *options, status=1)
        verdict = json.loads(result.stdout)
        assert (verdict["status"], verdict["exit"]) == ("broken", 1)
        assert verdict["kernels"]["mine.attention"]["file"] == "kernels/mine.py"
        assert json.loads((user / "reports/verdict.json").read_text())["bugs"] == verdict["bugs"]
        assert "bugs, the worst first: " in result.stderr

    @pytest.mark.nightly
    def test_pytest_runs_ours_by_the_name_of_their_package(self, site: Path, user: Path) -> None:
        (user / "conftest.py").unlink()
        (user / "pytest.ini").unlink()
        options = ["--kernel", "kernels.mine:sound", "--device", "cpu", "--examples", "1"]
        module = "flashproof.tests.properties.test_forward"
        assert "3 passed" in run(site, user, "-m", "pytest", "--pyargs", module, *options).stdout


DECLARED: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
NEEDED: list[str] = DECLARED["project"]["dependencies"]
OPTIONAL: list[str] = [x for extra in DECLARED["project"]["optional-dependencies"].values() for x in extra]


def test_what_tox_installs_is_what_the_package_depends_on() -> None:
    """Tox installs the dependency group, because it builds no package."""
    own = {"mpmath", "setuptools", "pyyaml", "actionlint", "shellcheck", "twine"}
    group = [x for x in DECLARED["dependency-groups"]["test"] if re.split(r"\W", x)[0] not in own]
    assert sorted(group) == sorted([*NEEDED, *OPTIONAL])


@pytest.mark.parametrize("requirement", [*NEEDED, *OPTIONAL])
def test_a_dependency_is_declared_by_the_name_of_its_distribution(requirement: str) -> None:
    name = re.split(r"[<>=]", requirement)[0]
    try:
        assert version(name)
    except PackageNotFoundError:
        if requirement in NEEDED:
            raise
        pytest.skip(f"the optional package {name} is not installed here")


def test_the_header_warns_of_a_hypothesis_that_is_older_than_the_one_declared() -> None:
    assert f"hypothesis>={OLDEST_HYPOTHESIS}" in NEEDED
