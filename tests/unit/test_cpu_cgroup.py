"""CPU limits read from files laid out as the kernel's: cgroups of version 1 and 2, and masks of cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.agent.node_sampler import NodeSampler
from trainer.contract.record import EventWriter
from trainer.host.cores import Cpus
from trainer.host.cpu_cgroup import CpuQuota, affinity, cpu_cgroup, cpu_quota, parse_cores

V1 = ("cpu,cpuacct", "cgroup cgroup rw,cpu,cpuacct"), ("cpuset", "cgroup cgroup rw,cpuset")
V2 = (("", "cgroup2 cgroup2 rw,nsdelegate"),)


def lay_out(folder: Path, entries: str, files: dict[str, str], *, root: str = "/", pid: str = "self") -> Path:
    """Write the files of cgroups, named below ``folder/cgroup``, and of a process in them; return its procfs."""
    proc, top = folder / "proc", folder / "cgroup fs"
    for each in (proc / "self", proc / pid):
        each.mkdir(parents=True, exist_ok=True)
    (proc / pid / "cgroup").write_text(entries)
    lines = ["22 1 0:21 / /proc rw - proc proc rw"]
    for name, kind in V2 if "0::" in entries else V1:
        point = str(top / name).rstrip("/").replace(" ", "\\040")
        lines.append(f"31 22 0:28 {root} {point} rw,nosuid shared:9 - {kind}")
    (proc / "self" / "mountinfo").write_text("\n".join(lines) + "\n")
    top.mkdir(exist_ok=True)
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)
    return proc


QUOTAS = [
    pytest.param("0::/\n", {}, "/", None, id="no files"),
    pytest.param("0::/\n", {"cpu.max": "max 100000\n"}, "/", None, id="no limit"),
    pytest.param("0::/\n", {"cpu.max": "250000 100000\n"}, "/", 2.5, id="a container"),
    pytest.param(
        "0::/job/step\n", {"job/cpu.max": "150000 100000\n", "job/step/cpu.max": "max 100000\n"}, "/", 1.5, id="around"
    ),
    pytest.param(
        "0::/job/step\n",
        {"job/cpu.max": "400000 100000\n", "job/step/cpu.max": "50000 100000\n"},
        "/",
        0.5,
        id="within",
    ),
    pytest.param("0::/of/the/host\n", {"cpu.max": "50000 100000\n"}, "/", 0.5, id="a path of the host"),
    pytest.param("0::/../other\n", {"cpu.max": "50000 100000\n"}, "/", 0.5, id="outside of the namespace"),
    pytest.param("0::/pods/a/b\n", {"b/cpu.max": "50000 100000\n"}, "/pods/a", 0.5, id="a mount of a part"),
    pytest.param("0::/pods/ab\n", {"b/cpu.max": "50000 100000\n"}, "/pods/a", None, id="a mount of another part"),
    pytest.param("1:cpu,cpuacct:/job\n", {"cpu,cpuacct/job/cpu.cfs_quota_us": "-1\n"}, "/", None, id="v1, none"),
    pytest.param(
        "3:cpuset:/\n1:cpu,cpuacct:/job\n",
        {"cpu,cpuacct/job/cpu.cfs_quota_us": "300000\n", "cpu,cpuacct/job/cpu.cfs_period_us": "100000\n"},
        "/",
        3.0,
        id="v1",
    ),
]


@pytest.mark.parametrize(("entries", "files", "root", "quota"), QUOTAS)
def test_the_quota_is_the_least_of_the_cgroup_and_those_around_it(
    tmp_path: Path, entries: str, files: dict[str, str], root: str, quota: float | None
) -> None:
    assert cpu_quota(lay_out(tmp_path, entries, files, root=root)) == quota


@pytest.mark.parametrize(
    ("entries", "files", "cores"),
    [
        ("0::/\n", {}, None),
        ("0::/job/step\n", {"job/cpuset.cpus.effective": "0-3,8\n", "job/step/cpu.max": "max 100000"}, 5),
        ("0::/job\n", {"cpuset.cpus.effective": "0-63\n", "job/cpuset.cpus.effective": "2\n"}, 1),
        ("3:cpuset:/a\n", {"cpuset/a/cpuset.cpus": "0-1\n", "cpuset/a/cpuset.effective_cpus": "1\n"}, 1),
        ("3:cpuset:/a\n1:cpu,cpuacct:/\n", {"cpuset/a/cpuset.cpus": "4-7\n"}, 4),
    ],
)  # fmt: skip
def test_the_cpuset_is_the_nearest_that_names_its_cores(
    tmp_path: Path, entries: str, files: dict[str, str], cores: int | None
) -> None:
    assert cpu_cgroup(proc=lay_out(tmp_path, entries, files)).cpuset_cores() == cores


def test_a_process_without_visible_cgroups_has_no_limits(tmp_path: Path) -> None:
    assert cpu_cgroup(7, tmp_path).quotas() == {}
    assert cpu_cgroup(7, tmp_path).cpuset_cores() is None
    assert affinity(7, tmp_path) == parse_cores("") == frozenset()
    assert parse_cores("0-2,5\n") == {0, 1, 2, 5}


@pytest.mark.parametrize(
    ("cores", "throttled_s", "share"),
    [
        pytest.param(0.25, 0.75, 0.75, id="a busy thread"),
        pytest.param(0.5, 1.5, 0.75, id="two of them on two cores"),
        pytest.param(2.0, 62.0, 62 / 64, id="64 of them"),
        pytest.param(0.5, 0.1, 0.1, id="now and then"),
        pytest.param(0.5, 0.0, 0.0, id="not"),
        pytest.param(0.5, -3.0, 0.0, id="a cgroup made anew"),
    ],
)
def test_time_held_back_is_that_of_one_thread_however_many_are_busy(
    cores: float, throttled_s: float, share: float
) -> None:
    before, seconds = CpuQuota(cores=cores, throttled_ns=5 * 10**9), 2.0
    after = CpuQuota(cores=cores, throttled_ns=5 * 10**9 + int(throttled_s * seconds * 1e9))
    assert after.held_back_share(before, seconds) == pytest.approx(share)


@pytest.mark.parametrize(
    ("entries", "folder", "names", "counter"),
    [
        ("0::/job\n", "job", {"cpu.max": "50000 100000"}, "usage_usec 9\nthrottled_usec {us}\n"),
        (
            "2:cpuset:/\n1:cpu,cpuacct:/job\n",
            "cpu,cpuacct/job",
            {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"},
            "nr_throttled 4\nthrottled_time {us}000\n",
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_a_ranks_quota_and_the_time_for_which_it_holds_it_back_are_sampled(
    tmp_path: Path, entries: str, folder: str, names: dict[str, str], counter: str
) -> None:
    files = {f"{folder}/{name}": text for name, text in names.items()}
    writer = EventWriter(tmp_path / "events")
    proc = tmp_path / "proc"
    sampler = NodeSampler(0, "here", {3: 77}, writer=writer, proc=proc)
    found = []
    for us in (0, 600_000, 600_000):
        lay_out(tmp_path, entries, {**files, f"{folder}/cpu.stat": counter.format(us=us)}, pid="77")
        (proc / "77" / "stat").write_text(f"77 (py) R 1 {'0 ' * 48}")
        (proc / "77" / "status").write_text("Name:\tpy\nCpus_allowed_list:\t0-3\n")
        sample = sampler.poll(1000.0 + len(found))
        assert sample is not None
        (rank,) = sample.ranks
        found.append((sample.cores, rank.cpu_quota_cores, rank.cpu_throttled_percent))
    writer.close()
    assert found == [(1, None, None), (1, 0.5, pytest.approx(54.5)), (1, 0.5, 0.0)]


@pytest.mark.parametrize(
    ("cpus", "text"),
    [
        (Cpus(logical=8, usable=8), ""),
        (Cpus(logical=8, usable=8, quota_cores=8.0, cpuset_cores=8), ""),
        (Cpus(logical=8, usable=2, quota_cores=2.5, cpuset_cores=8), "cpu quota of 2.5 cores"),
        (Cpus(logical=1, usable=1, quota_cores=0.5), "cpu quota of 0.5 cores"),
        (Cpus(logical=8, usable=1, quota_cores=1.0), "cpu quota of 1 core"),
        (Cpus(logical=8, usable=2, quota_cores=6.0, cpuset_cores=2), "cpuset"),
        (Cpus(logical=8, usable=2, cpuset_cores=4), "CPU affinity"),
    ],
)
def test_the_limit_that_binds_is_named(cpus: Cpus, text: str) -> None:
    assert cpus.limit == text
