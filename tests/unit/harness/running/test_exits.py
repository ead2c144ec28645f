"""Where a process was when it was ended."""

from tests.harness.running.exits import was_in_kernel

OF_KERNEL = """Thread 0x1 (most recent call first):
  File "mine.py", line 3 in attention
  File "tests/harness/trial/trial.py", line 440 in run_kernel
  File "tests/harness/trial/trial.py", line 300 in call
"""
OF_JUDGE = """Thread 0x1 (most recent call first):
  File "tests/harness/trial/compare.py", line 72 in <listcomp>
  File "tests/harness/trial/judge.py", line 160 in judge
"""


def test_a_process_that_judges_is_not_in_a_kernel() -> None:
    assert was_in_kernel(OF_KERNEL)
    assert not was_in_kernel(OF_JUDGE)
    assert was_in_kernel("it printed no stack")
