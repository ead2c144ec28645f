"""How many processes a run takes by itself, and what limits a machine sets."""

import math
from pathlib import Path

import pytest

from tests.harness.machine import GB, Machine, most_memory, processes, quota, this_machine


@pytest.mark.parametrize(
    ("machine", "number"),
    [
        (Machine(16, 120 * GB, (140 * GB,)), 16),
        (Machine(32, 250 * GB, (140 * GB,) * 2), 32),
        (Machine(4, 15 * GB), 4),
        (Machine(3.5, 15 * GB), 3),
        (Machine(16, 13 * GB), 6),
        (Machine(16, 120 * GB, (12 * GB,)), 4),
        (Machine(16, 120 * GB, (12 * GB, 9 * GB)), 6),
        (Machine(16, 30 * GB, (140 * GB,)), 7),
        (Machine(16, 120 * GB, sharers=4), 4),
        (Machine(16, 24 * GB, sharers=4), 3),
        (Machine(1, 15 * GB), 0),
        (Machine(0.5, 15 * GB), 0),
        (Machine(16, GB), 0),
        (Machine(2, 15 * GB, sharers=8), 0),
    ],
)
def test_what_there_is_least_of_decides(machine: Machine, number: int) -> None:
    assert processes(machine)[0] == number


def test_the_reason_names_what_decides_and_the_cores() -> None:
    assert processes(Machine(16, 120 * GB))[1] == "-n 16 (16 cores)"
    assert processes(Machine(1, 120 * GB))[1] == "-n 0 (1 core)"
    memory = "-n 6 (13.0 GB of memory, 2.0 GB for each process, 16 cores)"
    assert processes(Machine(16, 13 * GB))[1] == memory
    gpu = "-n 4 (12.0 GB of memory of the GPU, 2.7 GB for each process, 16 cores)"
    assert processes(Machine(16, 120 * GB, (12 * GB,)))[1] == gpu
    gpus = "-n 8 (12.0 GB of memory on each of 2 GPUs, 2.7 GB for each process, 16 cores)"
    assert processes(Machine(16, 120 * GB, (12 * GB,) * 2))[1] == gpus
    shared = "-n 4 (16 cores, shared by 4 workers of pytest-xdist)"
    assert processes(Machine(16, 120 * GB, sharers=4))[1] == shared


def test_each_further_kernel_needs_memory() -> None:
    assert [processes(Machine(16, 13 * GB), kernels)[0] for kernels in (1, 2, 8)] == [6, 5, 3]
    assert [processes(Machine(16, 120 * GB, (24 * GB,)), kernels)[0] for kernels in (1, 2, 6)] == [8, 6, 3]
    assert processes(Machine(16, 120 * GB, (140 * GB,)), 6)[0] == 16


def test_the_user_may_allow_fewer() -> None:
    assert processes(Machine(16, 120 * GB), most=3) == (3, "-n 3 (--maxprocesses 3, 16 cores)")
    assert processes(Machine(2, 120 * GB), most=3)[0] == 2


@pytest.mark.parametrize(
    ("cores", "seconds", "number"), [(2, 15.9, 0), (2, 16, 2), (16, 4.4, 0), (16, 4.5, 16)]
)
def test_one_process_alone_tries_most_in_a_short_time(cores: int, seconds: float, number: int) -> None:
    assert processes(Machine(cores, 120 * GB), seconds=seconds)[0] == number
    assert processes(Machine(cores, 120 * GB), seconds=seconds, age=2.0)[0] == number


def test_workers_that_use_a_gpu_start_later() -> None:
    seconds = {20: 0, 21: 0, 23: 16}
    found = {x: processes(Machine(16, 120 * GB, (140 * GB,)), seconds=x, age=2.0)[0] for x in seconds}
    assert found == seconds


def test_where_others_have_the_cores_workers_start_late() -> None:
    assert [processes(Machine(2, 120 * GB), seconds=20, age=age)[0] for age in (1, 3, 4, 9)] == [2, 2, 0, 0]
    assert processes(Machine(2, 120 * GB), age=9)[0] == 2, (
        "without a budget, the time begins with the first case"
    )


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_second_version_of_control_groups_is_read(tmp_path: Path) -> None:
    root = written(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
            "sys/fs/cgroup/job/memory.max": "max\n",
            "sys/fs/cgroup/job/step/memory.max": "5000000000\n",
            "sys/fs/cgroup/other/cpu.max": "100000 100000\n",
        },
    )
    assert (quota(root), most_memory(root)) == (2.5, 5 * GB)


def test_the_first_version_of_control_groups_is_read(tmp_path: Path) -> None:
    root = written(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/1\n4:cpu,cpuacct:/docker/1\n3:cpuset:/\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",  # a container sees its own group at the top
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000000000\n",
        },
    )
    assert (quota(root), most_memory(root)) == (1.5, 3 * GB)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/\n"},
        {
            "proc/self/cgroup": "1:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    ],
)
def test_without_a_limit_none_is_found(tmp_path: Path, files: dict[str, str]) -> None:
    root = written(tmp_path, files)
    assert (quota(root), most_memory(root)) == (math.inf, math.inf)


def test_this_machine_has_cores_and_memory() -> None:
    assert this_machine((), {}).cores > 0
    assert this_machine((), {}).memory > 0
    assert this_machine((), {"PYTEST_XDIST_WORKER_COUNT": "4"}).sharers == 4
    assert this_machine((), {"PYTEST_XDIST_WORKER_COUNT": "many"}).sharers == 1
