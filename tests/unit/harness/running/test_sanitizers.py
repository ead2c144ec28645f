"""What sanitizers print is read as the kernel's error, and nothing else is."""

import re
from pathlib import Path

import pytest

from tests.harness.run import SANITIZERS
from tests.harness.running.sanitizers import command, failure, finding, reports, sanitizers, why_not

MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at _write+0xec0 in mine.py:43
=========     by thread (18,0,0) in block (0,0,0)
=========     Access to 0x74505bcccca0 is out of bounds
=========     and is 161 bytes after the nearest allocation at 0x74505bccc800 of size 1,024 bytes
=========
========= Invalid __global__ write of size 2 bytes
=========     at _write+0xec0 in mine.py:43
=========     by thread (19,0,0) in block (0,0,0)
=========     Access to 0x74505bcccca4 is out of bounds
=========
========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch failure" on CUDA API call
========= ERROR SUMMARY: 2 errors
"""
OLDER = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at 0xda0 in /home/user/fused_moe.py:175:fused_moe_kernel
=========     by thread (96,0,0) in block (44,0,0)
=========     Address 0x763995f9f000 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========     Host Frame: [0x2f26f0]
=========                in /usr/lib/x86_64-linux-gnu/libcuda.so.1
========= ERROR SUMMARY: 1 error
"""
INITCHECK = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at vectorAdd(int *)+0x70 in /home/cuda/memset_error.cu:41
=========     by thread (31,0,0) in block (1,0,0)
=========     Address 0x7f3c7ec000fc
=========
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(T3)+0x270
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f3c7ec00000
=========
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at _exchange+0x140 in mine.py:46
=========     and Read access at _exchange+0xe0 in mine.py:55 [4 hazards]
=========     and Read access at _exchange+0xf0 in mine.py:55 [5 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
OF_ONE_WRITE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at _forward+0x1a0 in mine.py:32
=========     and Write access at _forward+0x1a0 in mine.py:32 [252 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
WARNING = RACECHECK.replace("Error: Race", "Warning: Race").replace("(1 error, 0 warn", "(0 errors, 1 warn")
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
UNSUPPORTED = (
    "========= COMPUTE-SANITIZER\n========= Error: Device not supported. Please refer to the documentation\n"
)
OF_A_HAND_OVER = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at _forward_kernel+0x160 in {file}:2
=========     and Write access at _forward_kernel+0x14310 in {file}:2 [8 hazards]
=========     and Write access at _forward_kernel+0x158a0 in {file}:3 [8 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
ASSERTIONS = """\
/home/user/mine.py:19: _multiply: block: [0,0,0], thread: [0,0,0] Assertion `int32 overflow detected` failed.
/home/user/mine.py:19: _multiply: block: [0,0,0], thread: [1,0,0] Assertion `int32 overflow detected` failed.
Traceback (most recent call last):
"""


@pytest.mark.parametrize(
    ("sanitizer", "log", "expected"),
    [
        ("memcheck", MEMCHECK, ["Invalid __global__ write in _write (mine.py:43)"] * 2),
        ("memcheck", OLDER, ["Invalid __global__ read in fused_moe_kernel (fused_moe.py:175)"]),
        ("initcheck", INITCHECK, ["Uninitialized __global__ memory read in vectorAdd (memset_error.cu:41)"]),
        (
            "racecheck",
            RACECHECK,
            ["race between write in _exchange (mine.py:46) and read in _exchange (mine.py:55)"],
        ),
        ("racecheck", OF_ONE_WRITE, []),
        ("racecheck", WARNING, []),
        ("initcheck", CLEAN, []),
        ("memcheck", UNSUPPORTED, []),
        ("memcheck", "", []),
    ],
)
def test_errors_of_a_log(sanitizer: str, log: str, expected: list[str]) -> None:
    assert [report.what for report in reports(sanitizer, log, ASSERTIONS)] == expected


@pytest.mark.parametrize("line", ["gl.warp_specialize([(loader, ())], [1], [24])", "def f(x):"])
def test_how_triton_hands_over_to_other_warps_is_no_race(tmp_path: Path, line: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"@gluon.jit\n    words.load(layout)\n    {line}\n")
    assert reports("racecheck", OF_A_HAND_OVER.format(file=path), "") == []
    path = tmp_path / "other.py"
    path.write_text("@gluon.jit\n    words.load(layout)\n    words.store(x)\n")
    assert len(reports("racecheck", OF_A_HAND_OVER.format(file=path), "")) == 1


def test_a_library_that_writes_outside_counts() -> None:
    log = OLDER.replace("/home/user/fused_moe.py:175:fused_moe_kernel", "at::native::copy_kernel<float>(int)")
    (report,) = reports("memcheck", log, "")
    assert report.what == "Invalid __global__ read in at::native::copy_kernel"


def test_the_lines_of_an_error_are_kept_and_no_others() -> None:
    (report,) = reports("memcheck", OLDER, "")
    assert [line.partition(" ")[0] for line in report.lines] == ["Invalid", "at", "by", "Address"]
    told = finding("memcheck", report)
    assert told.kind == "sanitizer"
    assert told.claim == f"memcheck finds nothing wrong in a claimed case, but it reports: {report.what}"
    assert told.detail.splitlines() == [*report.lines]


def test_findings_are_one_if_the_same_instruction_is_wrong_in_the_same_way() -> None:
    one, other = (finding("memcheck", report) for report in reports("memcheck", MEMCHECK, ""))
    (third,) = (finding("memcheck", report) for report in reports("memcheck", OLDER, ""))
    assert one.detail != other.detail
    assert one.origin == other.origin != ""
    assert one.is_akin(other)
    assert not one.is_akin(third)


def test_assertions_of_triton() -> None:
    found = reports("triton", "", ASSERTIONS)
    assert {report.what for report in found} == {"int32 overflow detected in _multiply (mine.py:19)"}
    unknown = ASSERTIONS.replace("_multiply", "unknown")
    assert reports("triton", "", unknown)[0].what == "int32 overflow detected in mine.py:19"
    assert reports("consan", "", "Traceback (most recent call last):\n") == []


@pytest.mark.parametrize(
    ("sanitizer", "log", "told"),
    [
        ("memcheck", CLEAN, None),
        ("racecheck", RACECHECK, None),
        ("triton", "", None),
        (
            "memcheck",
            UNSUPPORTED,
            "sanitizer memcheck did not come to its end: Error: Device not supported.*",
        ),
        ("memcheck", "", "sanitizer memcheck did not come to its end: its log is empty"),
    ],
)
def test_a_tool_that_fails_is_told(sanitizer: str, log: str, told: str | None) -> None:
    found = failure(sanitizer, log)
    assert (found is None) == (told is None)
    assert told is None or (found is not None and re.fullmatch(told, found))


def test_names_of_sanitizers() -> None:
    assert sanitizers("racecheck,memcheck,racecheck") == ("racecheck", "memcheck")
    assert sanitizers("all") == SANITIZERS
    for text in ("", "valgrind", "memcheck, racecheck"):
        with pytest.raises(ValueError, match=r"got '.*', expected some of memcheck,racecheck,.*, or all"):
            sanitizers(text)


def test_what_is_not_here_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for device in ("cpu", "xpu:0"):
        assert why_not("memcheck", device) == "sanitizer memcheck: needs a GPU with CUDA"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_not("memcheck", "cuda:1") == "sanitizer memcheck: there is no compute-sanitizer on PATH"
    assert why_not("triton", "cuda:1") is None
    (tmp_path / "compute-sanitizer").touch(mode=0o755)
    assert why_not("memcheck", "cuda:1") is None


def test_a_tool_is_asked_for_and_triton_is_not_a_program() -> None:
    assert command("racecheck", Path("log"))[:5] == [
        *("compute-sanitizer", "--target-processes", "application-only", "--tool", "racecheck")
    ]
    assert command("consan", Path("log")) == []
