"""Launch settings that are tuners: which configuration ``@triton.autotune`` takes, and what several have in common."""

import operator
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

CONFIG = ".config"
"""How the name of such a launch setting ends. No keyword has a dot, so that no other setting has such a name."""

AT_WORK = "tuned"
"""The value for a tuner that is at work as in a user's program: it tries configurations, and takes one of them."""

OF_COMPILER = ("num_warps", "num_stages", "num_ctas", "maxnreg")
"""Parameters that the compiler gets. All others are constants of the kernel, such as the rows of a tile."""

MOST_NAMED = 3
"""So many configurations are named one by one, if nothing that they have in common distinguishes them."""

Parameters = dict[str, str]
RELATIONS = {"other than": operator.ne, "equal to": operator.eq, "above": operator.gt, "below": operator.lt}
"""How the numbers of two parameters may compare, in words."""


def setting_of(function: str) -> str:
    """Return the name of the launch setting for the tuner of a kernel, by the name of the kernel's function."""
    return f"{function}{CONFIG}"


def is_tuner(name: str) -> bool:
    """Whether a launch setting says which configuration a tuner takes."""
    return name.endswith(CONFIG)


def parameters(configuration: str) -> Parameters:
    """Return the parameters of a configuration: those of "BLOCK_M=64 num_warps=4" are BLOCK_M and num_warps."""
    parts = (part.partition("=") for part in configuration.split())
    return {name: value for name, is_set, value in parts if is_set}


def has(configuration: str, wanted: str) -> bool:
    """Whether a configuration has all parameters that are wanted, as "BLOCK_M=64"; ``AT_WORK`` has only itself."""
    if AT_WORK in (configuration, wanted) or not parameters(wanted):
        return configuration == wanted
    return {*wanted.split()} <= {*configuration.split()}


def common(fails: Iterable[str], holds: Iterable[str]) -> Parameters | None:
    """Return the fewest parameters that all configurations which fail have, and none that holds; None if none do."""
    failing, holding = _read(fails), _read(holds)
    shared = [item for item in failing[0].items() if all(item in x.items() for x in failing)]
    for number in range(1, len(shared) + 1):
        for items in combinations(shared, number):
            if not any({*items} <= {*x.items()} for x in holding):
                return dict(items)
    return None


def told(fails: Sequence[str], holds: Sequence[str]) -> str:
    """Say what configurations that fail have in common, and those that hold do not.

    Examples: "BLOCK_N 128, num_stages 3", "BLOCK_M above 64", "BLOCK_M other than BLOCK_N". Where there is no such
    rule, the configurations are named.
    """
    if (found := common(fails, holds)) and len(found) <= 2:
        return _named(found)
    if len(fails) > 1 and (rule := _rule(_read(fails), _read(holds))):
        return rule
    if found:
        return _named(found)
    named = " or ".join(_named(parameters(x)) for x in fails[:MOST_NAMED])
    return named if len(fails) <= MOST_NAMED else f"{named} or {len(fails) - MOST_NAMED} others"


def wanted(fails: Sequence[str], holds: Sequence[str]) -> tuple[str, ...]:
    """Return texts as ``has`` takes them: each failing configuration has all parameters of one, and no other does."""
    found: list[str] = []
    for text in fails:
        if not any(has(text, known) for known in found):
            fewest = common(fails, holds) or common([text], holds)
            found.append(" ".join(f"{name}={value}" for name, value in (fewest or {}).items()) or text)
    return tuple(found)


def _read(configurations: Iterable[str]) -> list[Parameters]:
    return [parameters(x) for x in configurations]


def _named(found: Parameters) -> str:
    return ", ".join(f"{name} {value}" for name, value in found.items())


def _rule(failing: Sequence[Parameters], holding: Sequence[Parameters]) -> str:
    """Return a rule in words that all failing configurations meet, and no other: on one parameter, or on two.

    It is "" if there is none.
    """
    names = [name for name in failing[0] if all(x.get(name, "").isdigit() for x in (*failing, *holding))]
    for name in names:
        fails, holds = ({int(x[name]) for x in group} for group in (failing, holding))
        if holds and min(fails) > max(holds):
            return f"{name} above {max(holds)}"
        if holds and max(fails) < min(holds):
            return f"{name} below {min(holds)}"
        if len(holds) == 1 and not fails & holds:
            return f"{name} other than {holds.pop()}"
    for one, other in combinations((name for name in names if name not in OF_COMPILER), 2):
        for words, compares in RELATIONS.items():
            meet = [[compares(int(x[one]), int(x[other])) for x in group] for group in (failing, holding)]
            if all(meet[0]) and not any(meet[1]):
                return f"{one} {words} {other}"
    return ""


def configuration_text(configuration: Any) -> str:
    """Return the name of a ``triton.Config``: its parameters, such as "BLOCK_M=128 num_warps=4 num_stages=3"."""
    of_compiler = {name: getattr(configuration, name, None) for name in OF_COMPILER}
    if of_compiler["num_ctas"] == 1:
        del of_compiler["num_ctas"]
    known = {**configuration.kwargs, **{name: x for name, x in of_compiler.items() if x is not None}}
    return " ".join(f"{name}={''.join(str(value).split())}" for name, value in known.items())


def texts(configurations: Iterable[Any]) -> tuple[str, ...]:
    """Return the names of a tuner's configurations, in their order; a number follows those of equal parameters."""
    found: dict[str, None] = {}
    for text in map(configuration_text, configurations):
        alike = sum(known.partition(" #")[0] == text for known in found)
        found[f"{text} #{alike + 1}" if alike else text] = None
    return tuple(found)
