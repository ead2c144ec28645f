"""Cases that outlast a run, in an example database of Hypothesis: those that failed, or came nearest to a bound."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase, InMemoryExampleDatabase

from strategies.tensors import check_case
from tests.harness.bugs.bug import Bug, Condition
from tests.harness.bugs.failure import Failure
from tests.harness.run import Run, read, run_of
from tests.harness.symptoms import wrong_tensors
from tests.harness.verdict import AFTER_OTHERS, INTERMITTENT, LEAK, SANITIZER, Finding

SECONDS = 5.0
"""Seconds after which a server that does not answer counts as lost."""
KEPT = timedelta(days=365)
"""How long a server keeps the cases of a kernel that nobody asks for."""
SCHEMES = ("redis", "rediss")
TRIES = 3
"""How often a value is saved: a folder loses one that is saved just as another process removes the last one."""

Answer = TypeVar("Answer")

Record = TypeVar("Record", "Kept", "Near")


@dataclass(frozen=True)
class Kept:
    """A case that has failed, with what was found on it and what the bug needs, as far as these are known."""

    run: Run
    finding: Finding | None = None
    needs: tuple[Condition, ...] = ()

    @classmethod
    def of(cls, bug: Bug) -> Self:
        """Return what is kept of a bug, without what differs from machine to machine."""
        f = bug.failure
        return cls(Run(f.kernel, (), f.law, f.case), f.finding, bug.needs)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Return what a case.json or a database holds. What another version has found counts as not known.

        Raises ValueError, in one line, if the record is none of a run.
        """
        run = run_of(dict(fields))
        with suppress(LookupError, TypeError):
            needs = (
                Condition(x["name"], tuple(x["fails"]), tuple(x["holds"])) for x in fields.get("needs", ())
            )
            return cls(run, Finding(**fields["finding"]), tuple(needs))
        return cls(run)

    @property
    def value(self) -> bytes:
        """Return the record that a database holds."""
        found = asdict(self.finding) if self.finding else None
        needs = [asdict(need) for need in self.needs]
        return _packed({**self.run.to_dict(), "finding": found, "needs": needs})

    @property
    def is_gone_if_it_holds(self) -> bool:
        """Whether the bug is known to be gone once its case holds.

        One that comes and goes, needs other calls, leaks memory, or is reported by a sanitizer is not.
        """
        return self.finding is not None and self.finding.kind not in (
            AFTER_OTHERS,
            INTERMITTENT,
            LEAK,
            SANITIZER,
        )

    def bug(self, kernel: str) -> Bug:
        """Return the bug of a kernel that the case has shown. Raises ValueError if nothing is known of it."""
        if self.finding is None:
            raise ValueError("got a case without a finding, expected one that has failed")
        failure = Failure(**vars(self.run), kernel=kernel, finding=self.finding, environment={})
        return Bug(failure, tuple(sorted(wrong_tensors(self.finding))), self.needs)


@dataclass(frozen=True)
class Near:
    """A case that held, and the largest ``ratio`` of error to bound that it had in ``tensor``."""

    run: Run
    tensor: str
    ratio: float

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Return what a database holds. Raises ValueError, LookupError or TypeError for anything else."""
        near = fields["near"]
        return cls(run_of(dict(fields)), str(near["tensor"]), float(near["ratio"]))

    @property
    def place(self) -> tuple[str, str, str]:
        """Return law, dtype and tensor: of each place one case is kept."""
        return self.run.law, self.run.case.dtype, self.tensor

    @property
    def value(self) -> bytes:
        """Return the record that a database holds."""
        return _packed({**self.run.to_dict(), "near": {"tensor": self.tensor, "ratio": self.ratio}})


def nearest(values: Iterable[Near]) -> dict[tuple[str, str, str], Near]:
    """Return the case of each place that is nearest to its bound: the same one in every process."""
    return {near.place: near for near in sorted(values, key=lambda near: (near.ratio, near.value))}


def read_as(make: Callable[[Any], Record], value: bytes) -> Record | None:
    """Return what a database holds as a value; None for one that a newer version of Flashproof has written."""
    with suppress(ValueError, AttributeError, LookupError, TypeError):
        record = make(json.loads(value))
        check_case(record.run.case)
        return record
    return None


def read_report(path: Path) -> Kept:
    """Read the case.json of a report, or a journal. Raises ValueError, in one line, for anything else."""
    read(path)
    return Kept.from_dict(json.loads(path.read_text()))


def _packed(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()


@dataclass
class Finds:
    """The failing cases of earlier runs and of other machines, and those nearest to a bound; this run adds its own.

    Several processes may use a database at once. Each saves before it deletes, and deletes only what its own value
    replaces and what it saw before, or what all processes would delete, so that no two delete each other's.

    Of several ``databases`` the first is used, by the name that it is told by. If it is lost, the next takes its place
    and gets the failing cases that this process has ``kept`` so far, and ``notices`` has a line that says so. Without
    any, nothing is kept.
    """

    databases: dict[str, ExampleDatabase] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    kept: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)
    ratios: dict[tuple[str, ...], float] = field(default_factory=dict)

    def of(self, kernel: str) -> tuple[Kept, ...]:
        """Return the failing cases of the kernel of this name, each once, the shortest first.

        Those that can't be read are left out.
        """
        values = self._ask(lambda database: {*database.fetch(_key(kernel))}) or set()
        kept = (read_as(Kept.from_dict, value) for value in sorted(values))
        cases = {each.run: each for each in kept if each is not None}
        return tuple(sorted(cases.values(), key=lambda each: (len(repr(each.run)), repr(each.run))))

    def keep(self, bug: Bug) -> None:
        """Keep the case of a bug, in place of a larger one of it, and of what was known of the same case before."""
        key, kept = _key(bug.failure.kernel), Kept.of(bug)
        _, before = self.kept.get(bug.key, (key, kept.value))

        def save(database: ExampleDatabase) -> None:
            old = {*_of_case(database, key, kept), before}
            _save(database, key, kept.value, lambda: _of_case(database, key, kept))
            for value in old - {kept.value}:
                database.delete(key, value)

        self._ask(save)
        self.kept[bug.key] = key, kept.value

    def withdraw(self, bug: str) -> None:
        """Remove the case that this process has kept of a bug, by its key."""
        if entry := self.kept.pop(bug, None):
            self._ask(lambda database: database.delete(*entry))

    def forget(self, bugs: Iterable[Bug]) -> None:
        """Remove the cases of bugs that are gone."""
        for bug in bugs:
            self._ask(partial(_forget, key=_key(bug.failure.kernel), kept=Kept.of(bug)))

    def near(self, kernel: str) -> tuple[Near, ...]:
        """Return the cases that came nearest to a bound, one for each law, dtype and tensor."""
        values = self._ask(lambda database: {*database.fetch(_near_key(kernel))}) or set()
        found = nearest(near for value in values if (near := read_as(Near.from_dict, value)))
        self.ratios |= {(kernel, *place): near.ratio for place, near in found.items()}
        return tuple(found.values())

    def keep_nearest(self, kernel: str, found: Iterable[Near], changed: Collection[Near] = ()) -> None:
        """Keep cases that came nearer to a bound than those that are kept, in their place.

        ``changed`` are kept cases that have another ratio today, or fail: they go.
        """
        key = _near_key(kernel)
        for near in changed:
            self.ratios.pop((kernel, *near.place), None)
        nearer = [near for near in found if near.ratio > self.ratios.get((kernel, *near.place), 0.0)]
        if not nearer and not changed:
            return

        def save(database: ExampleDatabase) -> None:
            for near in nearer:
                database.save(key, near.value)
            read = {value: read_as(Near.from_dict, value) for value in database.fetch(key)}
            known = {value: near for value, near in read.items() if near is not None}
            best = nearest(near for near in known.values() if near not in changed)
            for value, near in known.items():
                if near not in best.values():
                    database.delete(key, value)

        self._ask(save)
        self.ratios |= {(kernel, *near.place): near.ratio for near in nearer}

    def _ask(self, question: Callable[[ExampleDatabase], Answer]) -> Answer | None:
        """Ask the first database that answers; None if there is none."""
        while self.databases:
            name, database = next(iter(self.databases.items()))
            try:
                return question(database)
            except Exception as e:  # whatever is wrong with a database must not end the night
                del self.databases[name]
                instead = f"finds go on to {next(iter(self.databases), 'the reports alone')}"
                self.notices.append(f"the database {name} was lost ({_in_one_line(e)}): {instead}")
                self.ratios.clear()  # of cases that are nearest to a bound in another database
                self._ask(self._save_again)
        return None

    def _save_again(self, database: ExampleDatabase) -> None:
        """Save all failing cases that this process has kept."""
        for key, value in self.kept.values():
            database.save(key, value)


def local_database() -> ExampleDatabase:
    """Return Hypothesis's own database: a folder, or the memory of the process if the folder can't be written."""
    return settings.get_profile("default").database or InMemoryExampleDatabase()


def finds_at(place: str | None, *, check: bool) -> Finds:
    """Return the finds in the database that ``--database`` names, or else in that of the Hypothesis profile.

    With ``check``, something is written there and read. Raises ValueError, in one line, for a place that can't be used.
    """
    local = local_database()
    name = str(getattr(local, "path", "memory"))
    if place is None:
        return Finds({} if settings().database is None else {name: local})
    told, database = _server(place) if "://" in place else _folder(place)
    if check:
        try:
            _save(database, b"flashproof", b"a check", lambda: {*database.fetch(b"flashproof")})
            database.delete(b"flashproof", b"a check")
        except Exception as e:  # of the server's own kinds
            raise ValueError(
                f"got {told!r}, expected a database that can be reached ({_in_one_line(e)})"
            ) from e
    return Finds({told: database, name: local})


def _folder(place: str) -> tuple[str, ExampleDatabase]:
    if not place:
        raise ValueError("got '', expected a folder or redis://host:port/number")
    return place, DirectoryBasedExampleDatabase(place)


def _server(place: str) -> tuple[str, ExampleDatabase]:
    """Return a Redis server by its URL, and the URL without a user's name and password."""
    url = urlsplit(place)
    told = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"
    if url.scheme not in SCHEMES:
        raise ValueError(f"got {told!r}, expected a folder or redis://host:port/number")
    try:
        from hypothesis.extra.redis import RedisExampleDatabase
        from redis import Redis
        from redis.backoff import ConstantBackoff
        from redis.retry import Retry

        retry: Any = Retry(ConstantBackoff(SECONDS / 10), 2)
        server = Redis.from_url(place, socket_timeout=SECONDS, socket_connect_timeout=SECONDS, retry=retry)
    except ImportError:
        raise ValueError(f"got {told!r}, expected the package redis to be installed") from None
    except ValueError as e:
        raise ValueError(f"got {told!r}, expected redis://host:port/number ({_in_one_line(e)})") from None
    return told, RedisExampleDatabase(server, expire_after=KEPT)


def _save(
    database: ExampleDatabase, key: bytes, value: bytes, there: Callable[[], Collection[bytes]]
) -> None:
    """Save a value, so that it, or what another process has put in its place, is among what is ``there``.

    Raises OSError if there is nothing afterwards, as a folder that can't be written says nothing.
    """
    for _ in range(TRIES):
        database.save(key, value)
        if there():
            return
    raise OSError("it can't be written")


def _of_case(database: ExampleDatabase, key: bytes, kept: Kept) -> list[bytes]:
    """Return the values in which the same law has failed on the same case."""
    read = ((value, read_as(Kept.from_dict, value)) for value in database.fetch(key))
    return [value for value, other in read if other is not None and other.run == kept.run]


def _forget(database: ExampleDatabase, key: bytes, kept: Kept) -> None:
    for value in _of_case(database, key, kept):
        database.delete(key, value)


def _key(kernel: str) -> bytes:
    """Return the key of a kernel's failing cases, which is the same on all machines, wherever the kernel's file is."""
    return f"flashproof {kernel}".encode()


def _near_key(kernel: str) -> bytes:
    """Return the key of a kernel's cases that came nearest to a bound."""
    return f"flashproof near {kernel}".encode()


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())
