"""What a run with ``slurm.requeue`` types at the end of a job, with commands in place of Slurm's that write it down."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from gputrain_tui.history.plan_file import SlurmJob, SlurmSubmission, read_job
from gputrain_tui.lifecycle.launchers.slurm_successor import go_on, leave_out
from trainer.contract.record import Checkpoint, RunDir, encode_event

COMMAND = """#!/bin/sh
echo "$(basename "$0") $*" >> {folder}/typed
case "$(basename "$0") $*" in
  *"show job 4") echo "JobId=4 JobState=RUNNING Requeue={requeue} Reason=None" ;;
  *"show job 5") exit 1 ;;
  *"requeue 4") kill -TERM $$ ;;
  *--exclude=*) [ {fits} = yes ] || {{ echo "sbatch: error: too few nodes" >&2; exit 1; }}; echo 5 ;;
  sbatch*) env | grep -c ^SLURM_ >> {folder}/slurm_variables; echo 5 ;;
esac
"""


class Site:
    """A run directory, and what was typed and recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dir = RunDir(folder / "run")
        self.job = SlurmJob(number=4, partition="main", batch=True, earlier=[3], excluded=["n2"])
        self.notes: list[str] = []

    def typed(self) -> list[str]:
        lines = (self.folder / "typed").read_text().splitlines()
        return [line for line in lines if " show job " not in line]

    def go_on(self, *lost: str, saving_s: float | None = None) -> str:
        return go_on(self.dir, self.job, lost, saving_s=saving_s, record=self.notes.append)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path)
    made.dir.events.mkdir(parents=True)
    made.dir.recipe.write_text("[slurm]\nrequeue = true\n")
    made.dir.slurm.write_bytes(msgspec.json.encode(made.job))
    arguments = ["--requeue", "--signal=B:USR1@120", "--nodes=2", "-x", "n9"]
    submission = SlurmSubmission(arguments=arguments, script="#!/bin/sh\n")
    made.dir.submission.write_bytes(msgspec.json.encode(submission))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4")
    return made


def put_slurm(site: Site, *, requeue: bool, fits: str = "yes") -> None:
    (site.folder / "bin").mkdir()
    for name in ("scontrol", "sbatch"):
        path = site.folder / "bin" / name
        path.write_text(COMMAND.format(folder=site.folder, requeue=int(requeue), fits=fits))
        path.chmod(0o755)


def test_a_job_that_slurm_requeues_is_put_back_without_the_hosts_that_failed(site: Site) -> None:
    put_slurm(site, requeue=True)
    assert site.go_on("n3", saving_s=2.0) == ""
    assert site.typed() == ["scontrol requeue 4", "scontrol update JobId=4 ExcNodeList=n9,n2,n3"]
    assert site.notes == ["leaving out n3, which failed"]
    job = read_job(site.dir)
    assert job is not None
    assert (job.number, job.excluded) == (4, ["n2", "n3"])


@pytest.mark.parametrize(
    ("saving_s", "write_ms", "seconds"), [(100.0, 10.0, 230), (None, 200_000.0, 430), (1.0, 10.0, None)]
)
def test_a_job_whose_signal_came_too_late_for_what_saving_took_gets_a_successor_with_an_earlier_one(
    site: Site, saving_s: float | None, write_ms: float, seconds: int | None
) -> None:
    put_slurm(site, requeue=True)
    saved = Checkpoint(time=1.0, step=1, path="/c/1.pt", bytes=1, write_ms=write_ms)
    site.dir.rank_events(0).write_bytes(b"{}\n" + encode_event(saved))
    assert site.go_on(saving_s=saving_s) == ""
    if seconds is None:
        assert site.typed()[0] == "scontrol requeue 4"
        return
    words = f"--requeue --signal=B:USR1@{seconds} --nodes=2 -x n9 --dependency=afterany:4 --exclude=n9,n2"
    assert site.typed() == [f"sbatch --parsable {words}"]
    why = f"saving needs the signal {seconds} s before the limit"
    assert site.notes == [f"job 5 follows job 4; leaving out n2, which failed ({why})"]
    found = read_job(site.dir)
    assert found is not None
    assert (found.number, found.earlier, found.nodes, found.batch) == (5, [3, 4], [], True)


def test_a_successor_may_use_a_host_that_failed_where_too_few_others_are_left(site: Site) -> None:
    put_slurm(site, requeue=False, fits="no")
    assert site.go_on("n3") == ""
    assert [line.rpartition(" ")[2] for line in site.typed()] == ["--exclude=n9,n2,n3", "--dependency=afterany:4"]
    (note,) = site.notes
    assert note.startswith("job 5 follows job 4; it may use n2 and n3 again, because without: sbatch: too few nodes")
    assert (site.folder / "slurm_variables").read_text() == "0\n", "a job inherits nothing about the one before"


def test_a_host_that_the_recipe_names_is_not_left_out(site: Site) -> None:
    put_slurm(site, requeue=True)
    submission = SlurmSubmission(arguments=["--nodelist=n3,n4"], script="")
    site.dir.submission.write_bytes(msgspec.json.encode(submission))
    assert leave_out(site.dir, site.job, ["n3"]) == ""
    assert not (site.folder / "typed").exists()
