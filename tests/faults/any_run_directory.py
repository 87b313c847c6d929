"""Stops, deletes and adopts runs whose directories hold anything; ends with 0 if that signals and deletes nothing else.

Run in a PID namespace: what is tried here may kill every process that it can see.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from hypothesis import HealthCheck, example, given, settings, strategies as st

from gputrain_tui.history.run_folders import create, open_run
from gputrain_tui.history.status_file import Status
from gputrain_tui.lifecycle.delete import delete_run
from gputrain_tui.lifecycle.stop_run import stop, stop_by_name
from gputrain_tui.lifecycle.supervisor_process import adopt
from gputrain_tui.plan.planner import Plan, PlannedNode
from trainer.contract.errors import RequestError
from trainer.contract.record import RunDir
from trainer.host.process_identity import ProcessIdentity, identify

HOME = Path(tempfile.mkdtemp(dir=sys.argv[2]))
FOREIGN = HOME / "gputrain-foreign"
"""A foreign folder, by its name a temporary folder of a run."""
OTHER_RUN = HOME / "runs" / "other"
ENVIRONMENTS: list[dict[str, str]] = [
    {},
    {"GPUTRAIN_RUN": ""},
    {"GPUTRAIN_RUN": str(OTHER_RUN)},
    {"GPUTRAIN_SUPERVISOR": ""},
    {"GPUTRAIN_SUPERVISOR": str(OTHER_RUN)},
]


def start_bystanders() -> list[subprocess.Popen[bytes]]:
    return [
        subprocess.Popen(["/bin/sleep", "1000"], env={"LANG": "C", **environment}, start_new_session=True)
        for environment in ENVIRONMENTS
    ]


BYSTANDERS = start_bystanders()
VICTIMS = [1, os.getpid(), os.getppid(), *(process.pid for process in BYSTANDERS)]

identities = st.sampled_from(VICTIMS).map(identify)
marks = st.one_of(
    st.sampled_from(["", "=", "\0", "GPUTRAIN_RUN=", "LANG=C", "GPUTRAIN_RUN"]),
    st.sampled_from([f"{name}={value}" for each in ENVIRONMENTS for name, value in each.items()]),
    st.text(max_size=20),
).map(lambda text: text.encode(errors="surrogatepass"))
attempts = st.fixed_dictionaries(
    {
        "since": st.dictionaries(st.sampled_from(["0.ndjson", "run.ndjson"]), st.integers(), max_size=2),
        "processes": st.dictionaries(st.sampled_from(["0", "1"]), identities.map(msgspec.to_builtins), max_size=2),
        "tmp": st.sampled_from([str(FOREIGN), str(OTHER_RUN), str(FOREIGN / ".." / FOREIGN.name), "", "."]),
    }
).map(msgspec.json.encode)
results = st.sampled_from([b"", b"{}", b'{"node":0,"host":"localhost","exit_code":0}', b"\xff"])
states = st.sampled_from(["starting", "running", "stopping", "finished"])


@contextlib.contextmanager
def run_directory(state: str, supervisor: ProcessIdentity | None, files: dict[str, bytes]) -> Iterator[RunDir]:
    """Make the directory of a run of one node, with these files in it."""
    node = PlannedNode(
        node=0, host="localhost", first_rank=0, ranks=[0], devices=["cpu"], argv=["sleep", "1000"], env={}
    )
    plan = Plan(world_size=1, init_method=None, backend="gloo", launcher="local", nodes=[node])
    run = create("any", world_size=1, recipe_toml="", plan=lambda _: msgspec.json.encode(plan), root=HOME / "runs")
    status = Status(run=run.id, recipe="any", world_size=1, status=state, supervisor=supervisor)  # type: ignore[arg-type]
    run.dir.status.write_bytes(msgspec.json.encode(status))
    for name, content in files.items():
        (run.dir.path / name).write_bytes(content)
    try:
        yield run.dir
    finally:
        shutil.rmtree(run.dir.path, ignore_errors=True)


def assert_untouched(what: str) -> None:
    signalled = [
        (environment, process.returncode)
        for environment, process in zip(ENVIRONMENTS, BYSTANDERS, strict=True)
        if process.poll() is not None
    ]
    assert not signalled, f"{what} ended processes of others: {signalled}"
    assert (FOREIGN / "work").read_text() == "of somebody else", f"{what} deleted what belongs to somebody else"
    assert (OTHER_RUN / "work").read_text() == "of somebody else", f"{what} deleted what belongs to somebody else"


bounded = settings(
    max_examples=int(sys.argv[1]),
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@bounded
@given(
    action=st.sampled_from(["stop", "delete", "adopt"]),
    state=states,
    supervisor=st.none() | identities,
    files=st.fixed_dictionaries(
        {},
        optional={
            "mark": marks,
            "attempt.json": attempts | st.binary(max_size=20),
            "nodes/0.json": results,
            "status.json": st.binary(max_size=20),
            "plan.json": st.binary(max_size=20),
        },
    ),
)
@example(action="stop", state="finished", supervisor=None, files={"mark": b""})
@example(action="delete", state="finished", supervisor=None, files={"mark": b""})
@example(action="stop", state="running", supervisor=identify(BYSTANDERS[0].pid), files={})
@example(action="stop", state="running", supervisor=identify(), files={})
@example(
    action="adopt",
    state="running",
    supervisor=None,
    files={
        "attempt.json": msgspec.json.encode(
            {"since": {}, "processes": {"0": identify(BYSTANDERS[0].pid)}, "tmp": str(FOREIGN)}
        )
    },
)
def nothing_in_a_run_directory_leads_to_others(
    action: str, state: str, supervisor: ProcessIdentity | None, files: dict[str, bytes]
) -> None:
    with run_directory(state, supervisor, files) as run_dir:
        run = open_run(run_dir.path)
        with contextlib.suppress(RequestError):
            if action == "stop" or run is None:
                stop_by_name(run_dir.path.name)
            elif action == "delete":
                delete_run(run)
            else:
                stop(adopt(run))
        assert_untouched(f"{action} of {files}")


def main() -> None:
    for folder in (FOREIGN, OTHER_RUN):
        folder.mkdir(parents=True)
        (folder / "work").write_text("of somebody else")
    os.chdir(FOREIGN)  # what a relative path leads to
    os.environ["GPUTRAIN_HOME"] = str(HOME)
    try:
        nothing_in_a_run_directory_leads_to_others()
    finally:
        for process in BYSTANDERS:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
