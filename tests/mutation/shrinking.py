"""What a failure costs up to its smallest case: a property test, run as a user runs it."""

import tempfile
import time
from pathlib import Path

import hypothesis
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.journal import Journal
from tests.harness.plugin import search
from tests.harness.subject import KernelInfo, Subject
from tests.mutation.campaign import Campaign
from tests.mutation.schedule import module_of


def shrink(campaign: Campaign, spec: str, law: str, dtype: str, seed: int, limit: int) -> float:
    """Seconds until Hypothesis is done and the report written, the first failure included.

    Raises AssertionError where the law's test does not find the failure by itself, in ``limit`` examples.
    """
    # Without a database: it would remember the failures of one mutant for the next.
    inner = getattr(module_of(law), f"test_{law}").hypothesis.inner_test
    test = settings(database=None, max_examples=limit)(given(data=st.data())(inner))
    with tempfile.TemporaryDirectory() as folder:
        subject = Subject(
            KernelInfo.ask(campaign.child, spec, ()),
            dtype,
            child=campaign.child,
            environment=campaign.child.ask({"do": "environment"}),
            report_dir=Path(folder),
            journal=Journal(Path(folder) / "journal.json"),
        )
        start = time.perf_counter()
        failures = search(hypothesis.seed(seed)(test), subject)
        seconds = time.perf_counter() - start
        subject.journal.close()
    assert failures, f"{law} on {dtype} does not find {spec} by itself"
    return seconds
