"""Functions that the ranks of test_node_agent.py run; the process of a rank imports this module by name."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from trainer.agent import end_signal
from trainer.agent.assignment import RankAssignment
from trainer.contract.errors import RequestError
from trainer.contract.record import EventWriter, Failure, RunDir, Step


def _mark(assignment: RankAssignment, text: str = "") -> None:
    """Write a mark into the run directory: this rank has reached this point."""
    assert assignment.run_dir is not None
    path = Path(assignment.run_dir) / f"mark-{assignment.rank}"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text or str(os.getpid()))
    temporary.replace(path)


def _await_marks(assignment: RankAssignment) -> None:
    """Wait for the marks of all ranks."""
    assert assignment.run_dir is not None
    folder = Path(assignment.run_dir)
    while not all((folder / f"mark-{rank}").exists() for rank in range(assignment.world_size)):
        time.sleep(0.005)


def _hang_with_gil() -> None:
    """Block with the GIL held, as in gloo's destructor: no Python thread runs, and only the kernel can end this."""
    libc = ctypes.PyDLL(None)
    while True:
        libc.pause()


def _hang_without_gil() -> None:
    """Block in C, as in a collective: Python's signal handlers do not run, only default actions work."""
    libc = ctypes.CDLL(None)
    while True:
        libc.pause()


def trains(assignment: RankAssignment) -> None:
    print(f"rank {assignment.rank} prints", flush=True)
    print("and complains", file=sys.stderr)
    assignment.finished()


def aborts_after_success(assignment: RankAssignment) -> None:
    assignment.finished()
    if assignment.rank == 1:
        os.abort()


def hangs_after_success(assignment: RankAssignment) -> None:
    assignment.finished()
    if assignment.rank == 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _hang_with_gil()


def leaves_early(assignment: RankAssignment) -> None:
    if assignment.rank != 1:
        _hang_without_gil()


def leaves_with_255(assignment: RankAssignment) -> int:
    if assignment.rank != 1:
        _hang_without_gil()
    return 255


def one_is_silent(assignment: RankAssignment) -> None:
    if assignment.rank == 0:
        all_lose_a_peer(assignment)
    _hang_without_gil()


def one_is_ended_by_the_watchdog_of_nccl(assignment: RankAssignment) -> None:
    if assignment.rank == 0:
        print(
            "  what():  [PG ID 0 Rank 0] Watchdog caught collective operation timeout: WorkNCCL(...)", file=sys.stderr
        )
        os.abort()
    _hang_without_gil()


def one_is_ended_by_the_heartbeat_monitor_of_nccl(assignment: RankAssignment) -> None:
    if assignment.rank == 0:
        print(
            "[rank0]:[F1123 04:00:00.000000000 ProcessGroupNCCL.cpp:1557] [PG ID 0 Rank 0] ProcessGroupNCCL's watchdog "
            "got stuck for 480 seconds without making progress",
            file=sys.stderr,
        )
        os.abort()
    _hang_without_gil()


def one_ends_as_its_peer_is_gone(assignment: RankAssignment) -> None:
    """End as a script does, which reports no failure."""
    if assignment.rank == 0:
        print("Traceback (most recent call last):\n  File x\nRuntimeError: Connection closed by peer", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    _hang_without_gil()


def one_has_left(assignment: RankAssignment) -> None:
    if assignment.rank == 1:
        assignment.finished()
        _mark(assignment)
        return
    assert assignment.run_dir is not None
    while not (Path(assignment.run_dir) / "mark-1").exists():
        time.sleep(0.005)
    all_lose_a_peer(assignment)


def one_raises(assignment: RankAssignment) -> None:
    _mark(assignment)
    if assignment.rank == 1:
        _await_marks(assignment)
        raise ZeroDivisionError("one over nothing\nand more")
    _hang_without_gil()


def one_raises_before_the_record_of_the_other_is_written(assignment: RankAssignment) -> None:
    """Fail before a measured step is written, as in the first steps of a training."""
    assert assignment.run_dir is not None
    if assignment.rank == 0:
        writer = EventWriter(RunDir(assignment.run_dir).rank_events(0), rank=0)
        measured = [Step(time=time.time(), rank=0, step=1, epoch=1, steps=1, samples=8, loss=2.0)]
        writer.before_each_write(lambda last: writer.write(measured.pop()) if last and measured else None)
        end_signal.write_before_end(writer.write_now)
        if not assignment.is_script:
            assignment.stoppable()
    _mark(assignment)
    _await_marks(assignment)
    if assignment.rank == 1:
        raise ZeroDivisionError("one over nothing")
    _hang_without_gil()


def one_finds_the_request_wrong(assignment: RankAssignment) -> None:
    if assignment.rank == 0:
        raise RequestError("/data is missing")
    _hang_without_gil()


def one_is_killed_and_the_other_loses_its_peer(assignment: RankAssignment) -> None:
    _mark(assignment)
    _await_marks(assignment)
    if assignment.rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    assignment.failed(
        Failure(time=time.time(), kind="exception", message="RuntimeError: Connection closed by peer [10.0.0.2]:4711")
    )
    _hang_without_gil()


def all_lose_a_peer(assignment: RankAssignment) -> None:
    assignment.failed(Failure(time=time.time(), kind="lost_peer", message="Connection reset by peer"))


def all_hang(assignment: RankAssignment) -> None:
    _mark(assignment)
    _hang_without_gil()


def all_hang_with_the_gil(assignment: RankAssignment) -> None:
    _mark(assignment)
    _hang_with_gil()


def all_hang_and_ignore_sigterm(assignment: RankAssignment) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _mark(assignment)
    _hang_without_gil()


def has_children(assignment: RankAssignment) -> None:
    """Leave a child, and a daemon in a session of its own, then hang."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    daemon = subprocess.Popen(
        ["/bin/sh", "-c", "setsid sleep 600 & echo $!"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert daemon.stdout is not None
    _mark(assignment, f"{os.getpid()} {child.pid} {daemon.stdout.readline().strip()}")
    if assignment.rank == 0:
        _hang_without_gil()
    _await_marks(assignment)
    raise ZeroDivisionError


def makes_orphans(assignment: RankAssignment) -> None:
    """Start processes whose parents end before them, more than the cgroup in TEST_CGROUP allows at a time."""
    if group := os.environ.get("TEST_CGROUP"):
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    count = 300
    failed = sum(os.system("true &") != 0 for _ in range(count))
    _mark(assignment, f"{failed} of {count} failed")
    assert assignment.run_dir is not None
    while not Path(assignment.run_dir, "go").exists():
        time.sleep(0.005)
    assignment.finished()


def leaves_children_that_fork(assignment: RankAssignment) -> None:
    """Fail, and leave children that fork and exit in a loop: each process lives for a moment only."""
    for name in (b"forks-1", b"forks-2"):
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(15, name)  # PR_SET_NAME, which forked children keep
            while True:
                if os.fork():
                    os._exit(0)
    _mark(assignment)
    _await_marks(assignment)
    if assignment.rank == 1:
        raise ZeroDivisionError("one over nothing")
    _hang_without_gil()


def records_its_context(assignment: RankAssignment) -> None:
    """Record the modules, threads and environment that a rank has inherited."""
    import tempfile
    import threading

    loaded = "torch.nn.parallel.distributed" in sys.modules
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    _mark(
        assignment,
        f"{loaded} {threads} {threading.active_count()} {os.environ.get('OMP_NUM_THREADS')} {tempfile.gettempdir()}",
    )
    assignment.finished()


def all_reduces_for_ever(assignment: RankAssignment) -> None:
    """Wait in a real collective in which rank 1 does not take part."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=assignment.init_method, world_size=assignment.world_size, rank=assignment.rank
    )
    dist.all_reduce(torch.ones(1))
    _mark(assignment)
    if assignment.rank == 0:
        dist.all_reduce(torch.ones(1))
    _hang_without_gil()
