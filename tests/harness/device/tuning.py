"""Tuners of Triton kernels: each launch takes the configuration that a case names, and none is timed.

``take_over`` replaces ``Autotuner.run``. What Triton does before and after a launch stays: a configuration has to be
left by the kernel's own pruning, its ``pre_hook`` is called, and ``best_config`` says which it is.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kernels.contract.tuners import AT_WORK, configuration_text, setting_of, texts

MOST_TRIALS = 4
"""A tuner at work tries so many configurations: what their results leave behind shows with few as with many."""

TAKES_TURNS = "the tuner of {} was found in calls only: its {} configurations took turns in {{}}"
DOES_NOT_FIT = "{}: the configuration {} does not compile or fit here ({}), so that another was taken in {{}}"
NO_ARGUMENT = (
    "{}: the tuner's key has {!r}, which names no argument of the kernel, so that Triton ignores it, in {{}}"
)
"""Notes as ``Trial.note`` has them."""
LONGEST_REASON = 160
"""So many characters are told of why a configuration does not fit."""


@dataclass
class Chosen:
    """What a call of a kernel takes of its tuners, and what it took.

    Attributes:
        tuners: the known ones, by the launch settings that they follow.
        launch: the values of launch settings.
        turn: the number of the configuration that an unknown tuner takes, counted around.
        launched: the configurations that were run, by launch setting, each once.
        notes: what is to be told, each text once.
    """

    tuners: Mapping[str, Any] = field(default_factory=dict)
    launch: Mapping[str, Any] = field(default_factory=dict)
    turn: int = 0
    launched: dict[str, list[str]] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    @property
    def passed(self) -> dict[str, Any]:
        """The launch settings that the kernel's functions take."""
        return {name: value for name, value in self.launch.items() if name not in self.tuners}

    def setting(self, tuner: Any) -> str:
        """Return the launch setting that a tuner follows, "" if the tuner is not known."""
        return next((name for name, known in self.tuners.items() if known is tuner), "")

    def names(self, tuner: Any) -> tuple[str, ...]:
        """Return the names of a tuner's configurations, which are remembered of those that are known."""
        if not self.setting(tuner):
            return texts(tuner.configs)
        configs, names = _Process.names.get(id(tuner), ([], ()))
        if configs != tuner.configs:
            _Process.names[id(tuner)] = [*tuner.configs], (names := texts(tuner.configs))
        return names

    def wanted(self, tuner: Any) -> str:
        """Return the configuration that a tuner is to take."""
        names = self.names(tuner)
        if not (setting := self.setting(tuner)):
            self.notes[TAKES_TURNS.format(tuner.base_fn.__name__, len(names))] = None
            return names[self.turn % len(names)]
        return str(self.launch.get(setting, names[0]))

    def note_launched(self, tuner: Any, configuration: str) -> None:
        """Remember that a configuration was run."""
        setting = self.setting(tuner) or setting_of(tuner.base_fn.__name__)
        taken = self.launched.setdefault(setting, [])
        taken += [configuration] if configuration not in taken else []


class _Process:
    """State that all threads of this process share, because PyTorch computes gradients in a thread of its own."""

    chosen: ClassVar[Chosen] = Chosen()
    misfits: ClassVar[dict[Any, str]] = {}
    names: ClassVar[dict[int, tuple[list[Any], tuple[str, ...]]]] = {}


@contextmanager
def configured(tuners: Mapping[str, Any], launch: Mapping[str, Any], turn: int = 0) -> Iterator[Chosen]:
    """Meanwhile, have tuners take the configurations that the launch settings name. Yields what they take."""
    before, _Process.chosen = _Process.chosen, Chosen(tuners, launch, turn)
    try:
        yield _Process.chosen
    finally:
        _Process.chosen = before


def take_over() -> None:
    """Have the tuners of this process take configurations without timing any, if Triton is installed."""
    if not importlib.util.find_spec("triton"):
        return
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.run
    if original.__module__ == __name__:
        return

    def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        if len(tuner.configs) < 2:
            return original(tuner, *args, **kwargs)
        return _launch(tuner, lambda: original(tuner, *args, **kwargs), args, kwargs)

    Autotuner.run = run


def _launch(tuner: Any, launch: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Launch a kernel with the chosen configuration of its tuner, or with another if pruning or the device excludes it.

    Raises what the launch raises. If no configuration fits, that is what the first one raises.
    """
    chosen = _Process.chosen
    for name in (x for x in tuner.keys if x not in tuner.arg_names):
        chosen.notes[NO_ARGUMENT.format(tuner.base_fn.__name__, name)] = None
    names = dict(zip(map(id, tuner.configs), chosen.names(tuner), strict=True))
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    left = {names.get(id(x)) or configuration_text(x): x for x in tuner.prune_configs(kwargs)}
    if not left:
        return launch()  # Triton raises what it raises then
    trial, wanted = _Trials(tuner, chosen, _kind(tuner, kwargs)), chosen.wanted(tuner)
    if wanted == AT_WORK:
        chosen.note_launched(tuner, AT_WORK)
        return trial.at_work(left, launch)
    for name in sorted(left, key=lambda name: name != wanted):
        if trial.fits(name, done := lambda config=left[name]: _with(tuner, launch, configs=[config])):
            chosen.note_launched(tuner, name)
            return None
    return done()


def _with(tuner: Any, launch: Callable[[], Any], **attributes: Any) -> Any:
    """Launch a kernel while its tuner has other attributes."""
    before = {name: vars(tuner)[name] for name in attributes if name in vars(tuner)}
    vars(tuner).update(attributes)
    try:
        return launch()
    finally:
        for name in attributes:
            del vars(tuner)[name]
        vars(tuner).update(before)


@dataclass
class _Trials:
    """Launches of one tuner, some of whose configurations may not fit; ``kind`` is what decides whether they do."""

    tuner: Any
    chosen: Chosen
    kind: Any
    left: int = MOST_TRIALS

    def fits(self, name: str, launch: Callable[[], object]) -> bool:
        """Launch the kernel with a configuration, unless that is known not to fit, and return whether it does fit."""
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import OutOfResources, PTXASError

        key = (self.tuner.base_fn, name, self.kind)
        if key not in _Process.misfits:
            try:
                launch()
                return True
            except (CompilationError, OutOfResources, PTXASError) as error:
                _Process.misfits[key] = _in_a_line(error)
        told = DOES_NOT_FIT.format(self.tuner.base_fn.__name__, name, _Process.misfits[key])
        self.chosen.notes[told] = None
        return False

    def at_work(self, left: Mapping[str, Any], launch: Callable[[], Any]) -> Any:
        """Let the tuner try a few configurations as it does for users, and take the first of them that fits.

        Each is run once into the memory of the call, between the hooks of the tuner and of the configuration.
        """
        first = [*left][:: max(1, len(left) // MOST_TRIALS)]
        order = [*first, *(name for name in left if name not in first)]
        names = iter(order)

        def tried(call: Callable[[], object], quantiles: object = None) -> list[float]:
            name = next(names)
            is_run = self.left > 0 and self.fits(name, call)
            self.left -= is_run
            return [0.0 if is_run else float("inf")] * 3

        return _with(
            self.tuner,
            launch,
            cache={},
            cache_results=False,
            do_bench=tried,
            prune_configs=lambda kwargs: [left[name] for name in order],
        )


def _kind(tuner: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return what decides whether a configuration compiles: constants of the kernel, and dtypes of its tensors."""
    function = tuner.fn
    while not hasattr(function, "params"):
        function = function.fn
    constants = {x.name for x in function.params if x.is_constexpr}
    given = {**tuner.nargs, **kwargs}
    return tuple(
        (name, str(getattr(given[name], "dtype", given[name] if name in constants else "")))
        for name in tuner.arg_names
        if name in given
    )


def _in_a_line(error: Exception) -> str:
    """Return the type of an exception and the last line of its message that has words, which says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if any(map(str.isalpha, line))]
    told = ": ".join((type(error).__name__, *lines[-1:]))[:LONGEST_REASON]
    return told.replace("{", "(").replace("}", ")")  # a note has braces of its own
