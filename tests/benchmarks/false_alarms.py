"""Disturbances that end no run: how often one does, over several runs at once that are only watched.

``python tests/benchmarks/false_alarms.py [--runs N] [--times N] [--only REGEX]`` prints a Markdown table. It needs
root, openssh-server, iproute2 and nft. The runs share three hosts; a disturbance meets all runs, and each counts.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "support"), str(HERE.parent / "cluster")]

from fault_places import NAMES, Place, Trial, start_run  # noqa: E402
from host_recipe import events, is_training  # noqa: E402
from network_namespaces import NamespaceHost  # noqa: E402
from ssh_lab import SshLab, ssh_lab, start_sshd  # noqa: E402

PATIENCE_S = 300.0
"""No start and no recovery is waited for longer."""
LIFE_MINUTES = 60.0
"""After which a run ends by itself."""
SLOW_S = 75
"""Longer than any hang may last by default."""


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """What is done to hosts or ranks, for ``seconds``, while all runs train."""

    name: str
    meet: Callable[[SshLab, Sequence[Trial]], ExitStack]
    """Begins it; what it returns ends it when it is closed."""
    seconds: float
    place: str = "ssh"
    """``ssh``, ``slow`` (hosts 200 ms away each way) or ``machine``."""
    task: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def _link_down(host: NamespaceHost) -> Iterator[None]:
    host.link("down")
    try:
        yield
    finally:
        host.link("up")


@contextmanager
def _lossy(host: NamespaceHost) -> Iterator[None]:
    """Drop a fifth of the packets that a host sends and gets."""
    host.run("nft", "add", "table", "inet", "lossy")
    for hook in ("input", "output"):
        chain = f"{{ type filter hook {hook} priority 0 ; }}"
        host.run("nft", "add", "chain", "inet", "lossy", hook, chain)
        rule = ["oifname" if hook == "output" else "iifname", host.interface, "numgen", "random", "mod", "100"]
        host.run("nft", "add", "rule", "inet", "lossy", hook, *rule, "<", "20", "drop")
    try:
        yield
    finally:
        host.run("nft", "delete", "table", "inet", "lossy")


@contextmanager
def _unreachable(*hosts: NamespaceHost) -> Iterator[None]:
    """Let two hosts get nothing from each other."""
    for host, other in (hosts, hosts[::-1]):
        host.run("ip", "route", "add", "blackhole", f"{other.address}/32")
    try:
        yield
    finally:
        for host, other in (hosts, hosts[::-1]):
            host.run("ip", "route", "delete", "blackhole", f"{other.address}/32")


@contextmanager
def _loaded(host: NamespaceHost, count: int) -> Iterator[None]:
    busy = [host.start(sys.executable, "-c", "while True: pass") for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@contextmanager
def _stopped(pids: Sequence[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def _debugged(pids: Sequence[int]) -> Iterator[None]:
    """Hold processes as a debugger does, by ptrace."""
    words = [sys.executable, "-c", DEBUGGER, *map(str, pids)]
    debugger = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert debugger.stdin is not None
    assert debugger.stdout is not None
    assert debugger.stdout.readline() == b"holds\n"
    try:
        yield
    finally:
        debugger.stdin.close()
        assert debugger.wait(30) == 0
        debugger.stdout.close()


DEBUGGER = """\
import ctypes, os, sys
libc, pids = ctypes.CDLL(None, use_errno=True), [int(word) for word in sys.argv[1:]]
attach, detach = 16, 17
for pid in pids:
    assert libc.ptrace(attach, pid, None, None) == 0, os.strerror(ctypes.get_errno())
    os.waitpid(pid, 0x40000000)  # __WALL
print("holds", flush=True)
sys.stdin.read()
for pid in pids:
    libc.ptrace(detach, pid, None, None)
"""


def while_(*contexts: Any) -> ExitStack:
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack


def restart_sshd(lab: SshLab, runs: Sequence[Trial]) -> ExitStack:
    """End sshd with all its connections, and start it again 3 s later."""
    host = lab.hosts[3]
    for pid, words in host.processes().items():
        if "sshd" in words.split()[0]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    time.sleep(3)  # without a sshd
    start_sshd(lab, host)
    return ExitStack()


def await_slow(what: str) -> Callable[[SshLab, Sequence[Trial]], ExitStack]:
    """Return a wait until the tasks of all runs are at what they do slowly."""

    def meet(lab: SshLab, runs: Sequence[Trial]) -> ExitStack:
        logs = [run.record / "logs" / "0.log" for run in runs]
        _await(lambda: all(f"a slow {what}" in log.read_text() for log in logs), PATIENCE_S)
        return ExitStack()

    return meet


def cut_off_while_slow(what: str) -> Callable[[SshLab, Sequence[Trial]], ExitStack]:
    def meet(lab: SshLab, runs: Sequence[Trial]) -> ExitStack:
        await_slow(what)(lab, runs)
        return while_(_unreachable(lab.hosts[0], lab.hosts[1]))

    return meet


def nothing(lab: SshLab, runs: Sequence[Trial]) -> ExitStack:
    return ExitStack()


SLOW = {"distributed_timeout": 600}
"""Of rows in which ranks wait longer for one than the lab's recipe lets a collective take."""
SLOW_TASKS = {
    "validation": {"task": {"slow": "validation"}, "train": SLOW | {"valid_every_updates": 50}},
    "checkpoint": {"task": {"slow": "checkpoint"}, "train": SLOW},
}

DISTURBANCES = (
    Disturbance(name="host silent for 10 s", meet=lambda lab, runs: while_(_link_down(lab.hosts[3])), seconds=10),
    Disturbance(
        name="20 % of a host's packets lost for 60 s", meet=lambda lab, runs: while_(_lossy(lab.hosts[3])), seconds=60
    ),
    Disturbance(
        name="launcher's link down for 40 s", meet=lambda lab, runs: while_(_link_down(lab.hosts[0])), seconds=40
    ),
    Disturbance(
        name="launcher and one host cut for 40 s",
        meet=lambda lab, runs: while_(_unreachable(lab.hosts[0], lab.hosts[3])),
        seconds=40,
    ),
    Disturbance(name="sshd restarted", meet=restart_sshd, seconds=10),
    Disturbance(
        name="node agents of a host stopped for 10 s",
        meet=lambda lab, runs: while_(_stopped([run.agent(2) for run in runs])),
        seconds=10,
    ),
    Disturbance(name="load of 20 for 60 s", meet=lambda lab, runs: while_(_loaded(lab.hosts[3], 20)), seconds=60),
    Disturbance(name="200 ms delay each way", meet=nothing, seconds=60, place="slow"),
    *(
        Disturbance(name=f"{what} of {SLOW_S} s", meet=await_slow(what), seconds=SLOW_S, place=place, **words)
        for what, words in SLOW_TASKS.items()
        for place in ("machine", "ssh")
    ),
    *(
        Disturbance(
            name=f"launcher and one host cut for 60 s, {what} of {SLOW_S} s",
            meet=cut_off_while_slow(what),
            seconds=60,
            **words,
        )
        for what, words in SLOW_TASKS.items()
    ),
    Disturbance(
        name=f"debugger attached for {SLOW_S} s",
        meet=lambda lab, runs: while_(_debugged([run.pid_of(1) for run in runs])),
        seconds=SLOW_S,
        place="machine",
        train=SLOW,
    ),
)  # fmt: skip


class Watched:
    """Runs that train side by side, and how often one of them ended or started again."""

    def __init__(self, lab: SshLab, runs: Sequence[Trial]) -> None:
        self.lab, self.runs = lab, list(runs)

    def meet(self, disturbance: Disturbance) -> list[str]:
        """Disturb all runs; return what went wrong, a text for each run that did not simply go on."""
        with disturbance.meet(self.lab, self.runs):
            time.sleep(disturbance.seconds)  # the disturbance itself
        struck = time.time()
        _await(lambda: all(_is_over(run) or _goes_on(run, struck) for run in self.runs), PATIENCE_S)
        wrong = [run for run in self.runs if not _goes_on(run, struck)]
        self.runs = [run for run in self.runs if run not in wrong]
        return [f"{run.status()} {[e for e in events(run.record, 'run') if e['type'] == 'finding']}" for run in wrong]


def _is_over(run: Trial) -> bool:
    return run.command.poll() is not None


def _goes_on(run: Trial, since: float) -> bool:
    """Whether each rank has made a step, and no attempt has followed the first."""
    plans = [event for event in events(run.record, 0) if event["type"] == "training_plan"]
    return len(plans) == 1 and all(
        any(event["type"] == "step" and event["time"] > since for event in events(run.record, rank)[-50:])
        for rank in range(sum(run.place.ranks))
    )


def _await(happened: Callable[[], bool], limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError):
            if happened():
                return True
        time.sleep(0.5)
    return False


def watched(stack: ExitStack, lab: SshLab, disturbance: Disturbance, count: int) -> Watched:
    """Start runs and await their first steps, one after the other."""
    runs = []
    for number in range(count):
        nodes: tuple[Any, Any] = ([None], [2]) if disturbance.place == "machine" else (NAMES, [1, 1, 1])
        folder = lab.folder / f"run{number}"
        folder.mkdir()
        home = lab.disk_of(lab.hosts[0]) / "home"
        place = Place(disturbance.place, lab.hosts, lab.hosts[0], folder, lab.environ, home, *nodes)
        train = {"stop_time": LIFE_MINUTES, "save_every_updates": 25} | disturbance.train
        run = start_run(place, task={"pause_s": 0.3} | disturbance.task, **train)
        stack.callback(run.command.kill)
        runs.append(run)
    for run in runs:
        total = sum(run.place.ranks)
        assert _await(lambda run=run, total=total: all(is_training(run.record, r) for r in range(total)), PATIENCE_S), (
            run.place.folder / "output"
        ).read_text()
    return Watched(lab, runs)


@contextmanager
def lab_of(place: str) -> Iterator[SshLab]:
    folder = Path(tempfile.mkdtemp(prefix="gt-", dir="/tmp"))
    delays = dict.fromkeys(NAMES, 0.4) if place == "slow" else None
    with ssh_lab(folder, dict.fromkeys(["h0", *NAMES], "eth0"), round_trip_s=delays) as lab:
        yield lab
    shutil.rmtree(folder, ignore_errors=True)


def fill(only: str, runs: int, times: int, print_row: Callable[[str], None]) -> None:
    """Meet all disturbances; runs with the same recipe in the same place meet them one after the other."""
    chosen = [each for each in DISTURBANCES if re.search(only, f"{each.name} {each.place}")]
    groups: dict[tuple[str, str], list[Disturbance]] = {}
    for each in chosen:
        groups.setdefault((each.place, str((each.task, each.train))), []).append(each)
    for (place, _), group in groups.items():
        for each in group if group[0].task or group[0].train else [None]:
            wanted = group if each is None else [each]
            counts = {disturbance.name: [0, 0] for disturbance in wanted}
            for _ in range(1 if each is None else times):
                with lab_of(place) as lab, ExitStack() as stack:
                    under_test = watched(stack, lab, wanted[0], runs)
                    for disturbance in wanted:
                        for _ in range(times if each is None else 1):
                            met = len(under_test.runs)
                            wrong = under_test.meet(disturbance)
                            counts[disturbance.name][0] += len(wrong)
                            counts[disturbance.name][1] += met
                            for text in wrong:
                                print(f"{disturbance.name}: {text[-3000:]}", file=sys.stderr, flush=True)
                        print(disturbance.name, counts[disturbance.name], file=sys.stderr, flush=True)
            for name, (ended, met) in counts.items():
                print_row(f"| {name} | {place} | {ended} of {met} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs at the same time")
    parser.add_argument("--times", type=int, default=4, help="how often each disturbance meets all runs")
    parser.add_argument("--only", default="", help="rows whose disturbance and place match this regular expression")
    arguments = parser.parse_args()
    print("| disturbance | where | runs ended |\n|---|---|---|", flush=True)
    fill(arguments.only, arguments.runs, arguments.times, partial(print, flush=True))


if __name__ == "__main__":
    main()
