"""The steps of the GitHub Action run here as on a runner, with a command gh that notes how it is called."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands.command import COMMANDS
from tests.harness.files import ROOT
from tests.unit.support.running import TOYS

yaml = pytest.importorskip(
    "yaml", reason="the steps of action.yml are read by PyYAML, which is not installed"
)

ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS: dict[str, dict[str, Any]] = {step["name"]: step for step in ACTION["runs"]["steps"]}
EXPRESSION = re.compile(r"\$\{\{ ([\w.-]+) \}\}")
GITHUB = {
    "github.repository": "me/mine",
    "github.event.pull_request.number": "7",
    "github.server_url": "https://github.com",
    "github.run_id": "99",
    "inputs.github-token": "secret",
}
FLASHPROOF = f"""#!/bin/sh
PYTHONPATH={ROOT} exec {sys.executable} -P -m tests.harness.commands.command "$@"
"""
GH = f"""#!{sys.executable}
import json, pathlib, sys
home = pathlib.Path(__file__).parent
if "--jq" in sys.argv:
    print((home / "ids").read_text(), end="")
else:
    with (home / "calls").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + chr(10))
sys.exit((home / "refuses").exists())
"""


class Runner:
    """A folder in which steps run, with their outputs as the values of expressions."""

    def __init__(self, folder: Path, **inputs: str) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        for name, text in {"flashproof": FLASHPROOF, "gh": GH}.items():
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
        defaults = {name: str(field.get("default", "")) for name, field in ACTION["inputs"].items()}
        self.values = {f"inputs.{name}": text for name, text in (defaults | inputs).items()} | GITHUB

    def filled(self, text: str) -> str:
        """Return a text with the values of its expressions; one that is not known fails the test."""
        return EXPRESSION.sub(lambda found: self.values[found[1]], text)

    def run(self, name: str) -> "subprocess.CompletedProcess[str]":
        """Run a step in the shell of GitHub's runners, and keep its outputs."""
        step = STEPS[name]
        outputs, summary = self.folder / "outputs", self.folder / "summary.md"
        variables = {key: self.filled(text) for key, text in step.get("env", {}).items()}
        outside = {
            key: text for key, text in os.environ.items() if not key.startswith(("PYTEST_", "GITHUB_"))
        }
        github = {
            "GITHUB_ACTIONS": "true",
            "GITHUB_WORKSPACE": str(self.folder),
            "GITHUB_OUTPUT": str(outputs),
            "GITHUB_STEP_SUMMARY": str(summary),
        }
        outputs.write_text("")
        (self.folder / "step.sh").write_text(step["run"])
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(self.folder / "step.sh")],
            cwd=self.folder / self.filled(step.get("working-directory", ".")),
            env=outside | github | variables | {"PATH": f"{self.bin}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        for line in outputs.read_text().splitlines():
            key, _, value = line.partition("=")
            self.values[f"steps.{step['id']}.outputs.{key}"] = value
        return done

    def calls(self) -> list[list[str]]:
        """Return how gh was called to write comments."""
        path = self.bin / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_bug_is_annotated_kept_and_told_in_one_comment_and_fails_the_job(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/toys.py").write_text(TOYS.read_text())
    options = "-k 'forward and float32' --examples 20 --hypothesis-seed 1 -n 0 --shrink-calls 50"
    inputs = {"kernels": "toys.py:sound\ntoys.py:wrong", "claims": "\nbackward=false\nlse=false\n"}
    runner = Runner(
        tmp_path, **inputs, budget="", device="cpu", options=options, **{"working-directory": "sub"}
    )

    verified = runner.run("verify")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert re.search(
        r"^::error file=sub/toys.py,line=\d+,title=toys.wrong%3A law `forward`", verified.stdout, re.M
    )
    kernels = json.loads(Path(runner.values["steps.verify.outputs.verdict"]).read_text())["kernels"]
    assert {name: kernel["status"] for name, kernel in kernels.items()} == {
        "toys.sound": "held",
        "toys.wrong": "broken",
    }
    kept = Path(runner.filled(STEPS["keep the page and the reports"]["with"]["path"]))
    assert {"index.html", "verdict.json", "comment.md", "toys.wrong"} <= {
        path.name for path in kept.iterdir()
    }
    assert (tmp_path / "summary.md").read_text() == (kept / "comment.md").read_text()

    (runner.bin / "ids").write_text("")
    for ids in ("", "31\n32\n"):
        (runner.bin / "ids").write_text(ids)
        assert runner.run("comment on the pull request").returncode == 0
    first, second = runner.calls()
    assert first[:5] == ["api", "--silent", "--method", "POST", "repos/me/mine/issues/7/comments"]
    assert second[:5] == ["api", "--silent", "--method", "PATCH", "repos/me/mine/issues/comments/31"]
    assert first[5:] == second[5:]
    body = first[-1].removeprefix("body=")
    assert body.startswith("<!-- flashproof: flashproof -->\n\n**Flashproof: broken**\n")
    assert "| `toys.wrong` | broken |" in body
    assert "[Page and reports](https://github.com/me/mine/actions/runs/99)" in body

    (runner.bin / "refuses").touch()
    refused = runner.run("comment on the pull request")
    assert (refused.returncode, refused.stdout[:11]) == (0, "::warning::")
    assert runner.run("keep the exit status").returncode == 1


def test_a_command_line_that_cannot_be_run_is_told_and_fails_the_job(tmp_path: Path) -> None:
    runner = Runner(tmp_path, kernels="absent.py:attention", budget="30s", device="cpu", options="-n 0")
    assert runner.run("verify").returncode == 0
    assert "absent.py" in (tmp_path / "summary.md").read_text()
    assert runner.run("keep the exit status").returncode == 4


def test_a_failed_installation_fails_the_job(tmp_path: Path) -> None:
    runner = Runner(tmp_path, kernels="mine.py:attention")
    runner.values["steps.verify.outputs.exit"] = ""
    assert runner.run("keep the exit status").returncode == 1


def test_actionlint_takes_the_steps_as_those_of_a_workflow(tmp_path: Path) -> None:
    if (actionlint := shutil.which("actionlint")) is None:
        pytest.skip("actionlint is not installed")
    inputs = {name: {"type": "string"} for name in ACTION["inputs"]}
    job = {"runs-on": "ubuntu-latest", "steps": ACTION["runs"]["steps"]}
    job["outputs"] = {name: output["value"] for name, output in ACTION["outputs"].items()}
    workflow = {"name": "action", "on": {"workflow_call": {"inputs": inputs}}, "jobs": {"action": job}}
    (tmp_path / "workflow.yml").write_text(yaml.safe_dump(workflow, sort_keys=False))
    command = [actionlint, "-no-color", str(tmp_path / "workflow.yml")]
    linted = subprocess.run(command, capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout + linted.stderr


def test_the_hook_of_pre_commit_runs_the_command() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    program, command = hook["entry"].split()
    assert program == "flashproof"
    assert COMMANDS[command].folder == "properties"
    assert not hook["pass_filenames"], "the names of changed files are no kernels"
