"""The server: each request has an answer of one line, and a socket in use is refused."""

import io
import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands import serve
from tests.harness.commands.serve import answer, listening


class Verdicts:
    """Takes the place of the pool: it keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def verify(self, words: list[str], folder: Path) -> dict[str, Any]:
        self.asked.append(words)
        return {"status": "held"}


def answers_to(*lines: str) -> tuple[list[Any], list[list[str]]]:
    """Return the answers to some requests, and what the pool was asked."""
    pool, told = Verdicts(), io.StringIO()
    answer(pool, lines, told)  # type: ignore[arg-type]  # what it uses of a pool
    return [json.loads(line) for line in told.getvalue().splitlines()], pool.asked


def test_each_request_is_answered_in_its_order_with_its_id() -> None:
    request = {
        "id": [1, "a"],
        "kernel": "mine.py:f",
        "claims": {"causal": True},
        "minutes": 0.05,
        "device": "cpu",
    }
    told, asked = answers_to(
        json.dumps(request), "\n", '{"kernel": "flash_v2", "options": ["-k", "forward"]}'
    )
    assert told == [{"id": [1, "a"], "status": "held"}, {"status": "held"}]
    assert asked[0][:6] == ["--kernel", "mine.py:f", "--budget", "3.0s", "--device", "cpu"]
    assert asked[0][-2:] == ["--json", "-"]
    assert "causal=true" in asked[0]
    assert asked[1][1] == "flash_v2"
    assert "-k" in asked[1]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", "request: got '{', expected an object of JSON in one line"),
        ("[1]", "request: got '[1]', expected an object with the text kernel"),
        ('{"claims": {}}', """request: got '{"claims": {}}', expected an object with the text kernel"""),
        ('{"kernel": "f", "minute": 3}', "request: got 'minute', expected some of id, kernel, claims, .*"),
        ('{"kernel": "f", "minutes": 0}', "minutes: got 0, expected a positive number"),
        ('{"kernel": "f", "seed": "x"}', "seed: got 'x', expected an integer"),
    ],
)
def test_a_wrong_request_is_answered_by_an_error_of_one_line(line: str, error: str) -> None:
    (told,), asked = answers_to(line)
    assert (told["status"], told["exit"]) == ("usage error", 4)
    if ".*" in error:
        assert told["error"].startswith(error.removesuffix(".*"))
    else:
        assert told["error"] == error
    assert not asked


def test_an_error_has_the_id_of_its_request() -> None:
    (told,), _ = answers_to('{"kernel": "f", "id": 7, "minutes": -1}')
    assert told["id"] == 7


def test_a_reader_that_goes_away_ends_the_conversation() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    pool = Verdicts()
    with os.fdopen(writer, "w") as told:
        answer(pool, ['{"kernel": "f"}'] * 3, told)  # type: ignore[arg-type]
    assert len(pool.asked) == 1


class TestSocket:
    @pytest.fixture(autouse=True)
    def in_a_folder_of_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Work in a folder, because the path of a socket has 107 characters at most."""
        monkeypatch.chdir(tmp_path)

    def test_one_in_use_is_refused_and_goes_on(self) -> None:
        with listening("s") as server:
            with pytest.raises(
                ValueError, match=r"\A--socket: got 's', expected one that no other server uses\Z"
            ):
                listening("s")
            server.accept()[0].close()
            assert Path("s").is_socket()

    def test_one_that_was_left_behind_is_replaced(self) -> None:
        listening("s").close()
        with listening("s"), socket.socket(socket.AF_UNIX) as client:
            client.connect("s")

    @pytest.mark.parametrize("path", ["absent/s", "file", "x" * 200])
    def test_any_other_path_is_refused_in_one_line(self, path: str) -> None:
        Path("file").write_text("kept")
        with pytest.raises(
            ValueError, match=rf"\A--socket: got '{path}', expected a path for a new socket \(.*\)\Z"
        ):
            listening(path)
        assert Path("file").read_text() == "kept"


class Process:
    """Takes the place of a process that is warm."""

    def __init__(self, text: str) -> None:
        self.stdin, self.stdout, self.returncode = io.StringIO(), io.StringIO(text), 3
        self.was_ended = False

    def wait(self) -> None:
        """Do nothing."""

    def communicate(self) -> None:
        """Remember that it was told to end."""
        self.was_ended = True


def test_a_process_that_has_got_a_kernel_is_replaced_and_the_last_one_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = [Process('ready\n{"status": "held"}'), Process("ready\n{"), Process("ready\n")]
    coming = iter(started)
    monkeypatch.setattr(serve, "start", lambda: next(coming))
    with serve.Pool() as pool:
        assert pool.verify(["--kernel", "f"], Path("r")) == {"status": "held"}
        assert json.loads(started[0].stdin.getvalue()) == {
            "folder": str(Path.cwd()),
            "words": ["--kernel", "f"],
        }
        with pytest.raises(ValueError, match=r"\Athe run ended with status 3 and without a verdict\Z"):
            pool.verify([], Path("r"))
    assert [one.was_ended for one in started] == [False, False, True]


def test_a_wrong_option_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ValueError, match=r"\Aunrecognized arguments: --port 3\Z"):
        serve.main(["--port", "3"])
