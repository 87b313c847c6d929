"""Table of faults: what each costs a run on one machine, on three hosts over ssh and on three nodes of Slurm.

``python tests/benchmarks/fault_table.py [--times N] [--only REGEX] [--torchrun]`` prints it as Markdown. It needs root,
openssh-server, iproute2 and, for its rows, Slurm. Each row is the median of its runs: seconds from the fault to the
first finding or failure in the record, runs with the right cause, seconds until all processes are gone or all ranks
train again, processes left, exit code, and steps that are lost. ``--torchrun`` runs the faults that it can meet with a
script under torchrun too, on the same hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "support"), str(HERE.parent / "cluster")]

from fault_places import NAMES, SAVE_EVERY, Place, Trial, kill, slurm_place, ssh_places, start_run  # noqa: E402
from host_recipe import PAUSE_S, TRAIN, check_epoch, events, is_training  # noqa: E402
from network_namespaces import wait_until  # noqa: E402
from torchrun_faults import TORCHRUN_FAULTS, TorchrunFault, TorchrunResult, torchrun_trial  # noqa: E402

PATIENCE_S = 200.0
"""No fault is waited for longer; what is not over then is written as more than this."""
SAMPLES = 12_000
"""Of an epoch that is to be finished: 1000 steps of three ranks."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault: where it can be met, how it is made, and what a person must be told."""

    name: str
    make: Callable[[Trial], None]
    cause: str
    """Regular expression for the last output or the status."""
    places: Sequence[str] = ("machine", "ssh", "Slurm")
    mend: Callable[[Trial], None] | None = None
    """Undoes it when the run is over."""
    table: Sequence[str] = ()
    slurm_table: Sequence[str] = ()
    goes_on: bool = False
    """Whether all ranks are to train again."""
    silent: str = ""
    """Host that stays silent: it ends its ranks by itself, so only what is left there is counted."""
    finishes_on: Sequence[str] = ()
    """Hosts of the ranks on which an epoch is to be finished; the fault then is at a random step of it."""


def supervisor(trial: Trial) -> int:
    return int(trial.status()["supervisor"]["pid"])


def job(trial: Trial) -> str:
    return str(json.loads((trial.record / "slurm.json").read_text())["number"])


def cut(trial: Trial, action: str) -> None:
    """Add or delete a route on the last host, with which it reaches the second one no more."""
    second, last = trial.host(1), trial.host(2)
    last.run("ip", "route", action, "blackhole", f"{second.address}/32")


def lose(trial: Trial, back_s: float = 0.0) -> None:
    """Cut the last host off, for good or until ``back_s`` have passed."""
    trial.host(2).link("down")
    if back_s:
        timer = threading.Timer(back_s, trial.host(2).link, ["up"])
        timer.daemon = True
        timer.start()


def in_slurm(*words: str) -> Callable[[Trial], None]:
    def act(trial: Trial) -> None:
        assert trial.place.slurm is not None
        trial.place.slurm.run(*(job(trial) if word == "JOB" else word for word in words))

    return act


FAULTS = (
    Fault(name="rank killed", make=lambda trial: kill(trial.pid_of(2)), cause=r"rank 2.*SIGKILL"),
    Fault(
        name="rank killed, max_restarts = 1",
        make=lambda trial: kill(trial.pid_of(2)),
        cause="",
        table=("max_restarts = 1",),
        goes_on=True,
    ),
    Fault(
        name="rank stopped (hangs), stall_timeout = 10",
        make=lambda trial: kill(trial.pid_of(2), signal.SIGSTOP),
        cause=r"rank 2.*hangs after step \d+: the process is stopped",
        table=("stall_timeout = 10",),
    ),
    Fault(
        name="rank stopped (hangs), default settings",
        make=lambda trial: kill(trial.pid_of(2), signal.SIGSTOP),
        cause=r"rank 2.*hangs after step \d+: the process is stopped",
    ),
    Fault(
        name="rank stopped, on_stall = restart",
        make=lambda trial: kill(trial.pid_of(2), signal.SIGSTOP),
        cause="",
        table=("stall_timeout = 10", 'on_stall = "restart"', "max_restarts = 1"),
        goes_on=True,
    ),
    Fault(name="node agent killed", make=lambda trial: kill(trial.agent(2)), cause=r"node agent|agent of|SIGKILL"),
    Fault(
        name="supervisor killed",
        make=lambda trial: kill(supervisor(trial)),
        cause="supervisor was killed, and its ranks ended with it",
        places=("machine",),
    ),
    Fault(
        name="supervisor killed",
        make=lambda trial: kill(supervisor(trial)),
        cause="",
        places=("ssh",),
        goes_on=True,
    ),
    Fault(name="Ctrl-C", make=lambda trial: kill(trial.command.pid, signal.SIGINT), cause=r"stopped .*saved|saved "),
    Fault(name="command killed by -9", make=lambda trial: kill(trial.command.pid), cause=r"saved |lost contact with"),
    Fault(
        name="host silent (default settings)",
        make=lambda trial: trial.host(2).link("down"),
        mend=lambda trial: trial.host(2).link("up"),
        cause=r"h3 with rank 2 lost",
        places=("ssh",),
        silent="h3",
    ),
    Fault(
        name="host silent, spare = h4",
        make=lambda trial: trial.host(2).link("down"),
        mend=lambda trial: trial.host(2).link("up"),
        cause="",
        places=("ssh",),
        table=("max_restarts = 1", "restart_wait = 5", 'spare = ["h4"]'),
        goes_on=True,
    ),
    Fault(
        name="network between two hosts cut",
        make=lambda trial: cut(trial, "add"),
        mend=lambda trial: cut(trial, "delete"),
        cause=r"h2 and h3 cannot reach each other on tcp",
        places=("ssh",),
    ),
    *(
        Fault(
            name=f"host lost at a random step, {name}",
            make=partial(lose, back_s=back_s),
            mend=lambda trial: trial.host(2).link("up"),
            cause="attempt 1 ended: h3 lost",
            places=("ssh",),
            table=("max_restarts = 1", *table),
            silent="" if back_s else "h3",
            finishes_on=hosts,
        )
        for name, back_s, table, hosts in (
            ("back after 60 s", 60.0, (), NAMES),
            ("spare = h4", 0.0, ("restart_wait = 5", 'spare = ["h4"]'), ("h1", "h2", "h4")),
            ("min_ranks = 2", 0.0, ("restart_wait = 5", "min_ranks = 2"), ("h1", "h2")),
        )
    ),
    Fault(name="scancel", make=in_slurm("scancel", "JOB"), cause=r"cancelled in Slurm.*saved", places=("Slurm",)),
    Fault(
        name="time limit, requeue = true",
        make=in_slurm("scancel", "--batch", "--signal=USR1", "JOB"),
        cause="",
        places=("Slurm",),
        slurm_table=("requeue = true",),
        goes_on=True,
    ),
)


@dataclass
class Result:
    """What one run with a fault showed."""

    noticed_s: float | None = None
    is_right: bool = False
    over_s: float | None = None
    """Until all is gone, or all ranks train again."""
    left: int = 0
    exit_code: int | None = None
    lost_steps: int | None = None
    load: float = 0.0
    """Of the machine over the last minute, when all was over."""
    said: str = ""


def run_trial(fault: Fault, place: Place) -> Result:
    """Make a run, let it train past a checkpoint, make the fault, and see what becomes of it."""
    trial = None
    try:
        epoch: dict[str, Any] = {"max_epochs": 1, "max_updates": 0, "stop_time": 60.0} if fault.finishes_on else {}
        task = {"samples": SAMPLES, "pause_s": PAUSE_S} if fault.finishes_on else None
        trial = start_run(place, fault.table, fault.slurm_table, task=task, **epoch)
        record, count = trial.record, sum(place.ranks)
        wait_until(lambda: all(is_training(record, rank) for rank in range(count)), "all ranks train")
        steps = SAVE_EVERY * 3 // 2
        if fault.finishes_on:
            steps = random.randint(steps, SAMPLES // count // TRAIN["batch_size"] - SAVE_EVERY)
        wait_until(lambda: last_step(record) > steps, "a checkpoint")
        before = last_step(record)
        trial.struck = time.time()
        fault.make(trial)
        result = watch(fault, trial, count, before)
    except AssertionError as error:
        result = Result(said=f"{error}: {(place.folder / 'output').read_text()}")
    finally:
        if trial is not None and fault.mend is not None:
            fault.mend(trial)
        end(place, trial)
    return result


def watch(fault: Fault, trial: Trial, ranks: int, before: int) -> Result:
    result = Result()
    place, deadline = trial.place, time.time() + PATIENCE_S * (2 if fault.finishes_on else 1)
    while time.time() < deadline and result.over_s is None:
        if fault.goes_on and trains_again(trial, ranks):
            result.over_s = time.time() - trial.struck
        is_over = not fault.goes_on and trial.command.poll() is not None
        if is_over and not place.processes(without=fault.silent):
            result.over_s = time.time() - trial.struck
        time.sleep(0.05)
    if fault.silent:
        with suppress(AssertionError):  # they are counted below
            wait_until(lambda: not trainers(place.processes()), "the silent host has ended its ranks")
        print(f"no rank on {fault.silent} after {time.time() - trial.struck:.1f} s", file=sys.stderr)
    noticed = [
        float(event["time"])
        for name in ("run", *(path.stem for path in (trial.record / "events").glob("node-*.ndjson")))
        for event in events(trial.record, name)
        if event["type"] in ("finding", "failure") and event["time"] >= trial.struck and event.get("state") != "cleared"
    ]
    result.noticed_s = min(noticed) - trial.struck if noticed else None
    result.load = os.getloadavg()[0]
    left = {} if fault.goes_on else place.processes()
    left = trainers(left) if fault.silent else left
    result.left = len(left)
    result.said = "".join(f"left: {words}\n" for words in left.values())
    result.exit_code = None if fault.goes_on else trial.status().get("exit_code")
    if fault.goes_on:
        starts = [event.get("first_update", 0) for event in events(trial.record, 0) if event["type"] == "training_plan"]
        result.lost_steps = before - starts[-1] if len(starts) > 1 else 0
        result.is_right = result.over_s is not None
    elif fault.finishes_on:
        result.said += (place.folder / "output").read_text()
        interfaces = dict.fromkeys(fault.finishes_on, "eth0")
        result.lost_steps = check_epoch(
            trial.record, fault.finishes_on, interfaces, samples=SAMPLES, save_every=SAVE_EVERY, before=ranks
        )
        result.is_right = re.search(fault.cause, result.said) is not None
    else:
        saved = sorted(
            int(path.stem.removeprefix("step_"))
            for folder in [trial.record, *place.folder.glob(f"disk.*/home/runs/{trial.record.name}")]
            for path in folder.glob("checkpoints/step_*.pt")
        )
        result.lost_steps = last_step(trial.record) - (saved[-1] if saved else 0)
        result.said += f"{trial.status().get('message')}\n{(place.folder / 'output').read_text()}"
        result.is_right = result.over_s is not None and re.search(fault.cause, result.said) is not None
    return result


def trainers(processes: dict[int, str]) -> dict[int, str]:
    """Return those that are not of a host's connection, which ends when the host can be reached."""
    return {pid: words for pid, words in processes.items() if not words.startswith(("python3 -I -c", "sshd"))}


def trains_again(trial: Trial, ranks: int) -> bool:
    """Whether each rank has done a step of a later attempt, or has simply gone on, with a supervisor."""
    with suppress(KeyError, TypeError, OSError, ValueError):
        kill(supervisor(trial), 0)
        return all(
            any(
                event["type"] == "step" and event["time"] > trial.struck + 2
                for event in events(trial.record, rank)[-200:]
            )
            for rank in range(ranks)
        )
    return False


def last_step(record: Path) -> int:
    steps = [event["step"] for event in events(record, 0)[-20:] if event["type"] == "step"]
    return max(steps, default=0)


def end(place: Place, trial: Trial | None) -> None:
    """End what a trial has left."""
    if place.slurm is not None:
        place.slurm.run("scancel", "--user=root")
    for _ in range(3):
        for pid in place.processes():
            with suppress(ProcessLookupError):
                kill(pid)
        time.sleep(0.3)
    if trial is not None:
        with suppress(subprocess.TimeoutExpired):
            trial.command.wait(10)
    if place.slurm is not None:
        place.slurm.wait_idle()


def median(values: Sequence[float | None]) -> str:
    if not values or any(value is None for value in values):
        return f"> {PATIENCE_S:.0f} s" if values and None in values else "–"
    return f"{statistics.median([value for value in values if value is not None]):.1f} s"


def row(fault: str, place: str, results: Sequence[Result]) -> str:
    noticed = [result.noticed_s for result in results if result.noticed_s is not None]
    codes = sorted({"–" if result.exit_code is None else str(result.exit_code) for result in results})
    lost = [result.lost_steps for result in results if result.lost_steps is not None]
    cells = [
        fault, place, median(noticed), f"{sum(result.is_right for result in results)} of {len(results)}",
        median([result.over_s for result in results]), str(max(result.left for result in results)),
        ", ".join(codes), str(round(statistics.median(lost))) if lost else "–",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def torchrun_row(fault: TorchrunFault, results: Sequence[TorchrunResult]) -> str:
    left = max(result.left for result in results)
    silent = f" and {max(result.left_silent for result in results)} on {fault.silent}" if fault.silent else ""
    codes = sorted({"/".join(map(_code, result.exit_codes)) for result in results})
    cells = [
        fault.name, "torchrun, 3 hosts", median([result.noticed_s for result in results]),
        f"{sum(result.is_right for result in results)} of {len(results)}" if fault.cause or fault.goes_on else "–",
        median([result.over_s for result in results]), f"{left}{silent}", ", ".join(codes), "–",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _code(code: int | None) -> str:
    return "runs" if code is None else str(code)


@dataclass
class Table:
    times: int
    only: str
    rows: list[str] = field(default_factory=list)

    def fill(self, place: Place) -> None:
        for fault in FAULTS:
            is_met = place.name.partition(",")[0] in fault.places
            if place.script is not None:
                is_met &= fault.name in [torchrun.name for torchrun in TORCHRUN_FAULTS]
            if is_met and re.search(self.only, f"{fault.name} {place.name}"):
                results = []
                for _ in range(self.times):
                    results.append(result := run_trial(fault, place))
                    print(fault.name, place.name, replace(result, said=""), file=sys.stderr, flush=True)
                self.print(row(fault.name, place.name, results))
                for result in results:
                    if not result.is_right or result.left:
                        print(f"said: {result.said[:300]} … {result.said[-1200:]}", file=sys.stderr)

    def print(self, line: str) -> None:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1, help="runs of each row")
    parser.add_argument("--only", default="", help="rows whose fault and place match this regular expression")
    parser.add_argument("--torchrun", action="store_true", help="torchrun on the same hosts as well")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in its background without it
    table = Table(arguments.times, arguments.only)
    table.print(
        "| fault | where | noticed after | cause right | over after | processes left | exit code | steps lost |"
    )
    table.print("|---|---|---|---|---|---|---|---|")
    with ssh_places() as (lab, places):
        for place in places:
            if place.script is None or arguments.torchrun:
                table.fill(place)
        for fault in TORCHRUN_FAULTS if arguments.torchrun else ():
            if re.search(arguments.only, f"{fault.name} torchrun"):
                results = []
                for _ in range(arguments.times):
                    results.append(result := torchrun_trial(lab, fault, PATIENCE_S))
                    print(fault.name, "torchrun", replace(result, said=""), file=sys.stderr, flush=True)
                    print(f"said: {result.said}", file=sys.stderr, flush=True)
                table.print(torchrun_row(fault, results))
    for proctrack in ("linuxproc", "cgroup") if shutil.which("sbatch") else ():
        name = f"Slurm, {proctrack}"
        if any("Slurm" in fault.places and re.search(arguments.only, f"{fault.name} {name}") for fault in FAULTS):
            with slurm_place(name, proctrack) as place:
                table.fill(place)


if __name__ == "__main__":
    main()
