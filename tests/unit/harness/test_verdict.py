"""A verdict says which case was run, where a tuner took another configuration than that of the case."""

from strategies.case import Case
from tests.harness.verdict import Verdict

CASE = Case(launch=(("block_m", 64), ("f.config", "SIZE=64"), ("g.config", "tuned")))


def test_the_case_that_was_run_has_its_configurations() -> None:
    as_chosen = Verdict(status="held", launched={"f.config": ["SIZE=64", "SIZE=16"], "g.config": ["tuned"]})
    assert as_chosen.case_of(CASE) is CASE
    assert as_chosen.counted(CASE) is CASE
    pruned = Verdict.from_dict(Verdict(status="held", launched={"f.config": ["SIZE=16"]}).to_dict())
    assert pruned.case_of(CASE).launch == (("block_m", 64), ("f.config", "SIZE=16"), ("g.config", "tuned"))
    assert pruned.counted(CASE).launch == (("block_m", 64), ("f.config", "SIZE=16"))
    assert pruned.case_of(Case()) == pruned.counted(Case()) == Case()
