"""Children that crash, hang, print or lose their device: the verdict on the case, and the case after it."""

import pytest

from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from tests.harness.device.sync import LOOK_SECONDS, WAIT_SECONDS
from tests.harness.law import law_named
from tests.harness.running.child import RUN_SECONDS
from tests.harness.running.runs import LEAST_CASE
from tests.harness.session.plan import MINUTES_PER_KERNEL
from tests.harness.trial import trial
from tests.harness.trial.trial import LawBroken, Trial
from tests.unit.support.running import CASE, TOYS


class TestChild:
    @pytest.mark.parametrize(
        ("answers", "kind"), [(True, "exception"), (False, "fault")], ids=["alive", "lost"]
    )
    def test_an_exception_that_ends_the_device_is_a_fault(
        self, monkeypatch: pytest.MonkeyPatch, answers: bool, kind: str
    ) -> None:
        monkeypatch.setattr(trial, "device_answers", lambda device: answers)
        with pytest.raises(LawBroken) as broken:
            law_named("forward")(Trial(load(f"{TOYS}:faulting", ()), CASE, "cpu", SAFETY))
        assert broken.value.finding.kind == kind

    def test_a_hang_is_told_before_a_run_cuts_its_case_off(self) -> None:
        assert RUN_SECONDS["cpu"] < 60 * MINUTES_PER_KERNEL / 2
        assert WAIT_SECONDS + LOOK_SECONDS < LEAST_CASE
