"""Where a process was when it was ended."""

from tests.harness.running.exits import was_judging

OF_KERNEL = """Thread 0x1 (most recent call first):
  File "mine.py", line 3 in attention
  File "tests/harness/trial/trial.py", line 440 in run_kernel
  File "tests/harness/trial/trial.py", line 300 in call
  File "tests/harness/law.py", line 80 in __call__
"""
OF_IMPORT = """Thread 0x1 (most recent call first):
  File "mine.py", line 1 in <module>
  File "kernels/registry.py", line 217 in _import_file
"""
OF_JUDGE = """Thread 0x1 (most recent call first):
  File "tests/harness/trial/compare.py", line 72 in <listcomp>
  File "tests/harness/trial/judge.py", line 160 in judge
  File "tests/harness/law.py", line 80 in __call__
"""
OF_JUDGE_CUT_OFF = """Thread 0x1 (most recent call first):
  File "tests/harness/trial/compare.py", line 72 in _maxima
"""


def test_a_process_judges_unless_a_kernel_runs_or_is_imported() -> None:
    assert was_judging(OF_JUDGE)
    assert was_judging(OF_JUDGE_CUT_OFF)
    assert not any(map(was_judging, (OF_KERNEL, OF_IMPORT, "it printed no stack")))
