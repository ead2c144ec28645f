"""Options and Hypothesis profiles. The rest of the pytest plugin is ``tests.harness.session.plugin``."""

import gc
import os

# NumPy reads this as it is imported. It multiplies tiles, for which a second thread costs more than it brings.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.harness.accelerators.lookup import OF_CUDA
from tests.harness.interpreter.installation import repair_interpreter

pytest_plugins = ["tests.harness.session.plugin"]

# What has been imported by now stays to the end. pytest collects garbage twice as it ends, and would look through it.
gc.freeze()

if not OF_CUDA.is_available():
    # Unit tests call Triton kernels in this process; Triton reads this when a kernel is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    repair_interpreter()

# Under CI Hypothesis loads its "ci" profile, and a profile without a parent inherits derandomize=True and database=None
# from that: a nightly job would try the same cases every night. So the parent is "default". There is no deadline,
# because the child has time limits. The health check too_slow is off, because a busy machine is no fault of a strategy.
# The explain phase is left out, because it doubles the calls.
BASE = settings(
    settings.get_profile("default"),
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("dev", BASE, max_examples=200)
settings.register_profile("quick", BASE, max_examples=10)
settings.register_profile("thorough", BASE, max_examples=2000)
settings.register_profile("fuzz", BASE, max_examples=200, database=None)
settings.load_profile("dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add Flashproof's own options."""
    group = parser.getgroup("flashproof", "Flashproof: verify attention kernels")
    group.addoption(
        "--kernel",
        action="append",
        metavar="SPEC",
        help="kernel under test: a registered name, package.module:attribute or path/to/file.py:attribute; "
        "repeatable (default: every registered kernel that runs on the device); public stands for the kernels of "
        "other packages that run here",
    )
    group.addoption(
        "--claims",
        action="append",
        metavar="KEY=VALUE",
        default=[],
        help="override a claim, such as head_dims=64,128 or causal_alignment=top_left; repeatable",
    )
    group.addoption(
        "--device",
        default="auto",
        metavar="TYPE",
        help="where kernels run: cpu, cuda (ROCm too), xpu, npu, mps, or another type of accelerator that torch has "
        "here (default: the accelerator, or the CPU where there is none)",
    )
    group.addoption("--examples", type=int, metavar="N", help="examples for each kernel, law and dtype")
    group.addoption(
        "--minutes", type=float, metavar="M", help="fuzz: fresh random cases until the time is up"
    )
    group.addoption(
        "--time-limit",
        type=float,
        metavar="MINUTES",
        help="end after so many minutes, though not all examples are drawn (default: 4 for each kernel, none where "
        "--examples, --minutes or --hypothesis-profile is given)",
    )
    group.addoption(
        "--budget",
        metavar="TIME",
        help="end within this time, such as 20s or 2m, with all that comes before and after the examples",
    )
    group.addoption(
        "--shard",
        metavar="I/N",
        help="this run is number I of N that share a night: each draws other cases than the others",
    )
    group.addoption("--max-seqlen", type=int, metavar="N", help="largest length drawn (default: 512)")
    group.addoption(
        "--report-dir", default="reports", metavar="DIR", help="where reports go (default: reports)"
    )
    group.addoption(
        "--json",
        metavar="FILE|-",
        help="write the verdict as JSON into a file too or, as -, to stdout, which then has nothing else: see "
        "docs/verdict.md",
    )
    group.addoption("--sarif", metavar="FILE", help="write the bugs into a file for code scanning, as SARIF")
    group.addoption(
        "--comment",
        metavar="FILE",
        help="write the verdict into a file as Markdown, for a comment on a pull request",
    )
    group.addoption(
        "--shrink-seconds",
        type=float,
        metavar="S",
        help="time for the smallest case of each failure (default: 16)",
    )
    group.addoption(
        "--shrink-calls",
        type=int,
        metavar="N",
        help="runs of the kernel for the smallest case, after those of Hypothesis (default: 4000)",
    )
    group.addoption(
        "--corpus",
        metavar="DIR",
        help="run the cases below this folder first (case.json of reports), each kernel those that it claims",
    )
    group.addoption(
        "--sanitize",
        metavar="TOOLS",
        help="on a GPU, run some cases once more under tools that watch the kernel: of memcheck, racecheck, initcheck "
        "(compute-sanitizer), triton and consan (Triton's own checks) some, with commas between them, or all",
    )
    group.addoption(
        "--database",
        metavar="DIR|redis://HOST:PORT/N",
        help="where failing cases and those nearest to a bound are kept, to be run first by the next run, here or on "
        "another machine (default: the folder .hypothesis; none with --minutes or --hypothesis-seed)",
    )
    group.addoption("--replay", metavar="PATH", help="run the case of one report (its case.json) again")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Apply --examples and --minutes to the profile that is loaded."""
    if config.getoption("--minutes") and not config.getoption("--hypothesis-profile"):
        settings.load_profile("fuzz")
    examples = config.getoption("--examples")
    if examples is not None and examples > 0:  # any other number is refused by ``make_plan``
        profile = settings.get_current_profile_name()
        settings.register_profile(profile, settings(), max_examples=examples)
        settings.load_profile(profile)
