"""The plan of a run: a wrong option is refused in one line before anything is written."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.harness.run import Run
from tests.harness.running.child import Child
from tests.harness.session import plan as planning
from tests.unit.support.running import CASE, TOYS


class TestUsageErrors:
    @pytest.fixture
    def plan_of(self, child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
        """Return a function that makes the plan for some options; the others have their defaults."""
        children = SimpleNamespace(device="cpu", of=lambda spec: child)
        monkeypatch.setattr(planning, "Children", lambda device: children)
        defaults = {"device": "cpu", "claims": [], "report_dir": str(tmp_path / "reports")}

        def make(**options: Any) -> planning.Plan:
            given = defaults | options
            config = SimpleNamespace(
                getoption=lambda name, _=None: given.get(name.strip("-").replace("-", "_"))
            )
            return planning.make_plan(config)  # type: ignore[arg-type]  # what it uses of it

        return make

    def test_a_budget_starts_the_clock_of_all_workers_at_once(self, plan_of: Callable[..., Any]) -> None:
        plan = plan_of(kernel=[f"{TOYS}:sound"], budget="1h")
        assert plan.minutes == 60.0
        assert 0 < plan.clock.remaining < plan.clock.seconds < 3600.0
        assert plan.clock.grace == plan.budget.grace

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"kernel": ["nonsense"]}, "kernel 'nonsense': expected flash_v1, flash_v2, .*"),
            ({"kernel": [f"{TOYS}:nothing"]}, "kernel '.*toys.py:nothing': no 'nothing' in .*; it has .*"),
            ({"kernel": ["sdpa_cudnn"]}, "kernel 'sdpa_cudnn': runs on CUDA only"),
            ({"kernel": [f"{TOYS}:sound"] * 2}, "--kernel .*: got a second kernel called toys.sound, .*"),
            ({"claims": ["head_dims=0"]}, "claim head_dims: got '0', expected integers .*"),
            ({"numprocesses": -1}, "-n: got -1, expected auto, 0 or a positive number"),
            ({"examples": 0}, "--examples: got 0, expected a positive number"),
            ({"minutes": math.nan}, "--minutes: got nan, expected a positive number"),
            ({"time_limit": -1.0}, "--time-limit: got -1.0, expected a positive number"),
            ({"time_limit": 4.0, "minutes": 4.0}, "--time-limit: got 4.0, expected none with --minutes"),
            ({"budget": "0"}, "--budget: got '0', expected a time above 0, such as 20s, 2m or 1h"),
            ({"budget": "20s", "minutes": 4.0}, "--minutes: got 4.0, expected none with --budget"),
            ({"budget": "20s", "time_limit": 4.0}, "--time-limit: got 4.0, expected none with --budget"),
            ({"budget": "20s", "examples": 5}, "--examples: got 5, expected none with --budget"),
            ({"max_seqlen": -1}, "--max-seqlen: got -1, expected a positive number"),
            ({"sanitize": "valgrind"}, "--sanitize: got 'valgrind', expected some of memcheck,.*, or all"),
            ({"sanitize": ""}, "--sanitize: got '', expected some of memcheck,.*, or all"),
            ({"shard": "0/8"}, "--shard: got '0/8', expected i/n with 1 <= i <= n, such as 3/8"),
            ({"database": "http://host"}, "--database: got 'http://host', expected a folder or .*"),
            ({"replay": "missing.json"}, "--replay missing.json: can't be read .*"),
        ],
    )
    def test_each_is_one_line_and_writes_nothing(
        self, plan_of: Callable[..., Any], tmp_path: Path, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(pytest.UsageError) as refused:
            plan_of(**options)
        assert re.fullmatch(message, str(refused.value)), refused.value
        assert not (tmp_path / "reports").exists()

    def test_a_report_folder_that_cannot_be_made(self, plan_of: Callable[..., Any], tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(
            pytest.UsageError, match=r"--report-dir: got .*, expected a folder .*\(Not a directory\)"
        ):
            plan_of(kernel=[f"{TOYS}:sound"], report_dir=str(tmp_path / "file" / "reports"))

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_no_gpu(self, plan_of: Callable[..., Any]) -> None:
        with pytest.raises(pytest.UsageError, match="--device: got cuda, expected cpu or auto"):
            plan_of(device="cuda")

    def test_a_replay_of_what_is_not_claimed(self, plan_of: Callable[..., Any], tmp_path: Path) -> None:
        path = tmp_path / "case.json"
        for case in (
            replace(CASE, dropout_p=0.1),
            replace(CASE, key_padding="left"),
            replace(CASE, head_dim=17),
            replace(CASE, launch=(("block_q", 16),)),
        ):
            path.write_text(json.dumps(Run(f"{TOYS}:sound", (), "forward", case).to_dict()))
            with pytest.raises(pytest.UsageError) as refused:
                plan_of(replay=str(path))
            assert f"--replay: got {case!r}, but {TOYS}:sound claims dtypes=" in str(refused.value)
        path.write_text(json.dumps(Run(f"{TOYS}:sound", (), "forward", CASE).to_dict()))
        with pytest.raises(pytest.UsageError, match=r"got Case\(.*\), but .* claims dtypes=float16; "):
            plan_of(replay=str(path), claims=["dtypes=float16"])

    def test_an_empty_path_is_no_path(self, plan_of: Callable[..., Any]) -> None:
        for option in ("replay", "corpus"):
            with pytest.raises(pytest.UsageError, match=f"--{option}.* expected "):
                plan_of(**{option: ""})

    def test_a_corpus_that_cannot_be_read(self, plan_of: Callable[..., Any], tmp_path: Path) -> None:
        told = "--corpus: got .*, expected a folder with the case.json of reports"
        with pytest.raises(pytest.UsageError, match=told):
            plan_of(corpus=str(tmp_path))
        (tmp_path / "case.json").write_text("{")
        with pytest.raises(pytest.UsageError, match=r"--corpus .*/case\.json: is not JSON"):
            plan_of(corpus=str(tmp_path))

    def test_a_run_that_can_be_repeated_begins_with_no_find(
        self, plan_of: Callable[..., Any], tmp_path: Path
    ) -> None:
        kernel, given = [f"{TOYS}:sound"], str(tmp_path / "finds")
        assert plan_of(kernel=kernel).finds.databases
        assert not plan_of(kernel=kernel, hypothesis_seed=1).finds.databases
        assert plan_of(kernel=kernel, hypothesis_seed=1, database=given).finds.databases

    def test_kernels_that_cannot_run_here_are_named(self, plan_of: Callable[..., Any]) -> None:
        plan = plan_of()
        assert "kernel 'sdpa_cudnn': runs on CUDA only" in plan.unavailable
        assert "sdpa_math" in [info.name for info in plan.kernels]
