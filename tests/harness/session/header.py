"""The header of a run: device, versions, seed, time limit, and how each kernel's claims differ from the default."""

import math

import pytest
from hypothesis import settings

from kernels.contract import Capabilities
from kernels.contract.parsing import PLAIN_FUNCTION, describe
from tests.harness.accelerators.lookup import accelerator_of
from tests.harness.law import LAWS, law_named
from tests.harness.report.screen import wrapped
from tests.harness.running.kernel_info import KernelInfo
from tests.harness.session.plan import Plan

DEFAULTS = {"default claims": Capabilities(), "default claims of a plain function": PLAIN_FUNCTION}
"""Claims that a kernel's own claims are compared with, each with the words for it."""
OLDEST_HYPOTHESIS = "6.170"
"""The release of Hypothesis from which on examples are drawn independently; earlier ones copy parts of another one."""
ARITHMETIC = "arithmetic "
"""The beginning of those keys of ``describe`` that are about rounding; the rest of such a key is a dtype."""


def header(plan: Plan, config: pytest.Config) -> list[str]:
    """Return the lines that Flashproof adds to pytest's header."""
    env = plan.environment
    versions = ", ".join(f"{name} {env[name]}" for name in ("torch", "triton", "hypothesis"))
    width = config.get_terminal_writer().fullwidth
    device_type = plan.device.partition(":")[0]
    seed = "random" if plan.seed is None else plan.seed
    shard = f", shard {plan.shard}" if plan.shard else ""
    lines = [
        f"flashproof: {plan.device} ({env['device_name']}), {versions}",
        f"profile: {settings.get_current_profile_name()}, "
        f"{settings().max_examples} examples, seed: {seed}{shard}, {time_told(plan)}",
    ]
    lines += too_old(env["hypothesis"])
    for info in plan.kernels:
        told = all_claims(info) if config.get_verbosity() > 0 else claims(info, device_type)
        lines += wrapped(f"kernel {info.name}: {told}", width)
    if plan.sanitizers:
        lines.append(f"sanitizers: {', '.join(plan.sanitizers)}")
    specs = {info.spec for info in plan.kernels}
    unfinished = [path for path, run in plan.unfinished.items() if run.spec in specs]
    if config.getoption("--database"):
        lines.append(f"failing cases are kept in {next(iter(plan.finds.databases))}")
    lines += [f"not run: {reason}" for reason in plan.unavailable]
    if plan.left_out:
        told = ", ".join(plan.left_out)
        lines += wrapped(f"not run on {device_type}, where PyTorch lacks what they need: {told}", width)
    if accelerator_of(plan.device).device_count() == 1:
        lines.append("not run: calls beside another current device, as there is one GPU")
    elsewhere = (name for name in LAWS if not law_named(name).is_tried_on(plan.device))
    lines += [
        f"not run: law `{name}`, which is tried on {law_named(name).only_on} alone" for name in elsewhere
    ]
    lines += [f"an earlier run was cut off in a case, which comes first now: {path}" for path in unfinished]
    return lines


def too_old(hypothesis: str) -> list[str]:
    """Return a line that warns of a release of Hypothesis whose cases repeat one another, or none."""
    oldest, here = (tuple(map(int, x.split(".")[:2])) for x in (OLDEST_HYPOTHESIS, hypothesis))
    warning = (
        f"hypothesis {hypothesis} is older than {OLDEST_HYPOTHESIS}: many of its cases repeat parts of others"
    )
    return [warning] if here < oldest else []


def time_told(plan: Plan) -> str:
    """Say how long the run may take."""
    if plan.budget is not None:
        return f"a budget of {plan.budget.seconds:g} s"
    if plan.minutes is not None:
        return f"for {plan.minutes:g} minutes"
    if math.isinf(plan.clock.seconds):
        return "no time limit"
    return f"at most {plan.clock.seconds / 60:g} minutes (--time-limit)"


def all_claims(info: KernelInfo) -> str:
    """Return every claim of a kernel, as ``--claims`` takes it."""
    return "; ".join(f"{key}={value}" for key, value in info.printed.items())


def claims(info: KernelInfo, device_type: str) -> str:
    """Say how a kernel's claims differ from those of ``DEFAULTS`` that differ least."""
    found = {name: _differences(info, describe(base, device_type)) for name, base in DEFAULTS.items()}
    nearest = min(found, key=lambda name: len(found[name]))
    told = "; ".join(f"{key}={value}" for key, value in found[nearest].items())
    return f"{nearest}, but {told}" if told else nearest


def _differences(info: KernelInfo, default: dict[str, str]) -> dict[str, str]:
    """Return the claims that differ from the default; arithmetic that differs alike in all dtypes is one claim."""
    changed = {key: value for key, value in info.printed.items() if value != default.get(key)}
    rounded = {key: changed.pop(key) for key in [*changed] if key.startswith(ARITHMETIC)}
    own = {key: _without(text, default.get(key, "")) for key, text in rounded.items()}
    if len(rounded) == len(info.capabilities.dtypes) and len({*own.values()}) == 1:
        return {**changed, ARITHMETIC.strip(): next(iter(own.values()))}
    return {**changed, **own}


def _without(text: str, default: str) -> str:
    """Return the parts of ``text`` that ``default`` does not have; commas separate the parts of both."""
    return ", ".join(part for part in text.split(", ") if part not in default.split(", "))
