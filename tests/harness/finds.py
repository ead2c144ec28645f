"""Failing cases that outlast a run: kept in one of Hypothesis's example databases, which several machines may share."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase, InMemoryExampleDatabase

from strategies.tensors import check_case
from tests.harness.report import Failure
from tests.harness.run import Run, run_of

SECONDS = 5.0
"""Seconds after which a server that does not answer counts as lost."""
KEPT = timedelta(days=365)
"""How long a server keeps the cases of a kernel that nobody asks for."""
SCHEMES = ("redis", "rediss")

Answer = TypeVar("Answer")


@dataclass
class Finds:
    """The failing cases of earlier runs and of other machines, to which those of this run are added.

    Of several ``databases`` the first is used, by the name that it is told by. If it is lost, the next takes its place,
    and ``notices`` has a line that says so. Without any, nothing is kept.
    """

    databases: dict[str, ExampleDatabase] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    kept: dict[Path, bytes] = field(default_factory=dict)

    def of(self, kernel: str) -> tuple[Run, ...]:
        """Return the failing cases of the kernel of this name, the shortest first, without those that can't be read."""
        values = self._ask(lambda database: {*database.fetch(_key(kernel))}) or set()
        runs = (_read(value) for value in sorted(values, key=lambda value: (len(value), value)))
        return tuple(run for run in runs if run is not None)

    def keep(self, failure: Failure) -> None:
        """Keep the case of a failure, in place of a larger one that this process has kept of the same failure."""
        key, value = _key(failure.kernel), _value(failure)
        before = self.kept.get(failure.folder, value)

        def save(database: ExampleDatabase) -> None:
            _save(database, key, value)
            if before != value:
                database.delete(key, before)

        self._ask(save)
        self.kept[failure.folder] = value

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
        return None


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
            _save(database, b"flashproof", b"a check")
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


def _save(database: ExampleDatabase, key: bytes, value: bytes) -> None:
    """Save a value. Raises OSError if it is not there afterwards, as a folder that can't be written says nothing."""
    database.save(key, value)
    if value not in {*database.fetch(key)}:
        raise OSError("it can't be written")


def _key(kernel: str) -> bytes:
    """Return the key of a kernel's failing cases, which is the same on all machines, wherever the kernel's file is."""
    return f"flashproof {kernel}".encode()


def _value(failure: Failure) -> bytes:
    """Return what is kept of a failure: the record of a run, without what differs from machine to machine."""
    return json.dumps(Run(failure.kernel, (), failure.law, failure.case).to_dict(), sort_keys=True).encode()


def _read(value: bytes) -> Run | None:
    """Return the run that was kept; None for one that a newer version of Flashproof has written."""
    with suppress(ValueError, AttributeError):
        run = run_of(json.loads(value))
        check_case(run.case)
        return run
    return None


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())
