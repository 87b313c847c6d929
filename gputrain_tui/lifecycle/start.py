"""Starts runs, for commands and console alike: plan, check, write the run directory, start the supervisor.

Errors of the request are raised before there is a run directory.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from gputrain_tui.history.runs import Run, create, find, open_run
from gputrain_tui.history.status_file import ENDED, read_status
from gputrain_tui.hosts.host_names import LocalFacts, is_local
from gputrain_tui.hosts.local_facts import local_facts
from gputrain_tui.hosts.open_connections import CONNECTIONS, OpenConnections
from gputrain_tui.lifecycle import checkpoints
from gputrain_tui.lifecycle.inventories import inventories_for
from gputrain_tui.lifecycle.leftovers import SUPERVISOR
from gputrain_tui.lifecycle.remote_nodes import remote_node
from gputrain_tui.plan.planner import Plan, plan, with_run_dir
from gputrain_tui.preflight import CheckResult, NotReadyError, collect_facts, errors, run_checks
from gputrain_tui.recipe.build import load as load_recipe
from gputrain_tui.recipe.model import Recipe
from trainer.contract.builtin_tasks import options_schema
from trainer.contract.errors import RecordError, RequestError
from trainer.contract.option_rules import RESETS, require_end
from trainer.contract.record import RunDir
from trainer.contract.record.regular_file import open_regular, open_to_append
from trainer.contract.schema import check
from trainer.host.proc_environ import RUN
from trainer.host.process_identity import ProcessIdentity
from trainer.host.stop_request import STOP_SIGNALS

if TYPE_CHECKING:
    from gputrain_tui.hosts.inventory import Inventory
    from gputrain_tui.hosts.slurm import Job
    from gputrain_tui.preflight.host_facts import HostAnswer


GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Environment variables with the network interface of a backend; after ``=`` NCCL takes a name, not a prefix."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Recipe that passed the preflight, and its plan."""

    recipe: Recipe
    plan: Plan
    results: tuple[CheckResult, ...] = ()
    """Results of the preflight, none of which is an error."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Plan, and the facts that it was made from."""

    plan: Plan
    local: LocalFacts
    inventories: Mapping[str, Inventory]
    """Inventories that the plan needed, by host; ``localhost`` is this machine."""
    warnings: tuple[str, ...] = ()
    """A line for each host whose list of GPUs was accepted because it did not answer."""


def load(source: str | None, *, overrides: Sequence[str], resume: str | None, stdin: IO[str] | None) -> Recipe:
    """Read the recipe of a new run, or of one that continues another.

    Args:
        source: file, ``-``, or None for the recipe of the run that is continued.
        overrides: ``KEY=VALUE`` settings.
        resume: the run to continue: an id, a prefix of one, or ``last``.
        stdin: stream that ``-`` reads.

    Raises:
        RequestError: the recipe is wrong, or the run has nothing to continue from.
    """
    settings = list(overrides)
    if resume is not None:
        run = find(resume)
        if run.status.archived is not None:
            raise RequestError(f"--resume {resume}: {run.id} is an archive, which holds no checkpoints")
        if run.state in ("queued", "starting", "running", "stopping"):
            raise RequestError(
                f"--resume {resume}: {run.id} is still {run.state}; stop it with `gputrain stop {run.id}`"
            )
        found = checkpoints.resumable_checkpoint(run.dir)
        if found is None:
            raise RequestError(f"--resume {resume}: {checkpoints.describe_missing_checkpoint(run)}")
        if run.state == "finished" and source is None and not overrides:
            raise RequestError(
                f"--resume {resume}: {run.id} has finished: nothing is left to train; "
                "to train further, raise the limit that ended it, such as --set train.max_updates=N"
            )
        settings += [f"train.resume={found}", f"train.checkpoint_run={checkpoints.run_named_by(run.dir, found)}"]
        source = source or recipe_of(run)
        recipe = load_recipe(source, overrides=settings, stdin=stdin)
        # The resets of the run's own recipe are done; only overrides reset again.
        done = [f"train.{name}=false" for name in RESETS if getattr(recipe.train, name)]
        if done and source != "-":
            recipe = load_recipe(source, overrides=[*done, *settings], stdin=stdin)
        remote, first = remote_node(run.dir, 0), recipe.cluster.nodes[0].host
        if remote is not None and first != remote.host:
            raise RequestError(
                f"--resume {resume}: the checkpoints of {run.id} are on {remote.host}, in {found}, where rank 0 reads "
                f"them, but the first node is {first or 'this machine'}; keep {remote.host} as the first node"
            )
        return recipe
    if source is None:
        raise RequestError(
            "no recipe is named; `gputrain run RECIPE` takes a TOML or JSON file, or - for standard input"
        )
    return load_recipe(source, overrides=settings, stdin=stdin)


def recipe_of(run: Run) -> str:
    """Return the path of a run's recipe, which must be a regular file.

    Raises:
        RecordError: it cannot be read.
    """
    try:
        os.close(open_regular(run.dir.recipe))
    except OSError as error:
        raise RecordError(f"{run.dir.recipe} cannot be read: {error.strerror}") from None
    return str(run.dir.recipe)


def prepare(recipe: Recipe, *, connections: OpenConnections | None = None) -> Prepared:
    """Plan a run and check its machines.

    Args:
        recipe: the recipe.
        connections: receives the connections to other hosts, which the launch continues to use.

    Raises:
        NotReadyError: the recipe is right, but the machines are not ready for it.
        RequestError: the recipe contradicts itself, or would never end.
    """
    return check_planned(recipe, plan_recipe(recipe), connections=connections)


def plan_recipe(recipe: Recipe) -> Planned:
    """Plan a run with the inventories of its machines.

    Raises:
        NotReadyError: a machine does not have the devices.
        RequestError: the recipe contradicts itself.
    """
    from gputrain_tui.hosts.devices import DeviceUnavailableError

    facts, warnings = local_facts(node.host for node in recipe.cluster.nodes), list[str]()
    try:
        inventories = inventories_for(recipe, facts, warn=warnings.append)
        found = plan(recipe, inventories, local=facts)
    except DeviceUnavailableError as error:
        what, _, fix = error.reason.partition("; ")
        key = error.where.rpartition(" ")[2]
        raise NotReadyError(
            [CheckResult(status="error", check="GPUs", what=what, fix=fix, key=key, where=error.where)]
        ) from None
    return Planned(plan=found, local=facts, inventories=inventories, warnings=tuple(warnings))


def check_planned(
    recipe: Recipe, planned: Planned, *, max_age_s: float = 0.0, connections: OpenConnections | None = None
) -> Prepared:
    """Run the preflight checks of a planned run.

    Args:
        recipe: the recipe.
        planned: its plan.
        max_age_s: maximum age of cached answers of other hosts.
        connections: receives the connections to other hosts, which the launch continues to use.

    Raises:
        NotReadyError: a check failed.
        RequestError: the training would make no step, or never end.
    """
    if problem := endless_reason(recipe):
        raise RequestError(problem)
    results: list[CheckResult] = []
    if planned.plan.launcher == "slurm":
        from gputrain_tui.lifecycle import slurm_jobs

        results.append(slurm_jobs.check(recipe, planned.plan))
    answers = collect_answers(recipe, planned, max_age_s=max_age_s, connections=connections)
    asked = {
        answer.host: answer.facts.inventory for answer in answers if answer.facts is not None and not answer.is_local
    }
    found = collect_facts(recipe, planned.plan, planned.local, inventories={**asked, **planned.inventories})
    results += run_checks(recipe, planned.plan, found, local=planned.local)
    if answers:
        from gputrain_tui.preflight.host_checks import check_hosts

        results += check_hosts(recipe, planned.plan, answers)
    results += [CheckResult(status="warning", check="other hosts", what=warning) for warning in planned.warnings]
    if errors(results):
        raise NotReadyError(results, plan=planned.plan)
    return Prepared(recipe=recipe, plan=with_interfaces(planned.plan, answers), results=tuple(results))


def collect_answers(
    recipe: Recipe, planned: Planned, *, max_age_s: float, connections: OpenConnections | None
) -> tuple[HostAnswer, ...]:
    """Return the facts of the hosts of a run over ssh; none for runs with another launcher or on this machine alone."""
    if planned.plan.launcher != "ssh" or all(is_local(node.host, planned.local) for node in planned.plan.nodes):
        return ()
    from gputrain_tui.lifecycle.launchers.ssh import forwarded_environment
    from gputrain_tui.preflight.collect_hosts import collect_hosts

    return collect_hosts(
        recipe,
        planned.plan,
        planned.local,
        env=forwarded_environment(os.environ),
        max_age_s=max_age_s,
        connections=connections,
    )


def with_interfaces(plan: Plan, answers: Sequence[HostAnswer]) -> Plan:
    """Return the plan with the network interface of each host that leads to the other hosts, in its environment.

    A variable that the user has set is not changed.
    """
    interfaces = {answer.host: answer.interface for answer in answers if answer.interface}
    if not interfaces:
        return plan
    names = {GLOO_INTERFACE: "{}", **({NCCL_INTERFACE: "={}"} if plan.backend == "nccl" else {})}
    nodes = []
    for node in plan.nodes:
        found = interfaces.get(node.host)
        own = {name: form.format(found) for name, form in names.items() if found and name not in os.environ}
        nodes.append(msgspec.structs.replace(node, env={**own, **node.env}))
    return msgspec.structs.replace(plan, nodes=nodes)


def endless_reason(recipe: Recipe) -> str:
    """Return in one line why a training would make no step or never end; empty if it does both, and for a script."""
    if recipe.script is not None:
        return ""
    schema = options_schema(recipe.train.task)
    task_options = None if schema is None else check(schema, recipe.task_options, where=str)
    try:
        require_end(
            recipe.train,
            task_options,
            where=lambda name: recipe.where("train", name),
            named=lambda name: f"train.{name}",
        )
    except RequestError as error:
        return str(error)
    return ""


def launch(
    prepared: Prepared, *, leased: bool, connections: OpenConnections | None = None
) -> tuple[Run, subprocess.Popen[bytes]]:
    """Write the run directory and start its supervisor in a session of its own.

    Args:
        prepared: recipe and plan.
        leased: whether closing the supervisor's standard input, a pipe, ends the run.
        connections: connections of the preflight to the hosts, which the supervisor takes over.

    Raises:
        NotReadyError: the run directory cannot be written.
    """
    if is_submitted(prepared):
        from gputrain_tui.lifecycle import slurm_jobs

        run = _submit(prepared)[0]
        return run, slurm_jobs.watch(run.dir, leased=leased)
    run = _create(prepared)
    return run, start_supervisor(run.dir, leased=leased, connections=connections)


def is_submitted(prepared: Prepared) -> bool:
    """Whether a run is submitted as a job: its launcher is Slurm, and this process is in no job."""
    return prepared.plan.launcher == "slurm" and "SLURM_JOB_ID" not in os.environ


def submit(prepared: Prepared) -> Run:
    """Write the run directory and submit the run to Slurm, without following it.

    Raises:
        NotReadyError: the run directory cannot be written, or Slurm refuses the job.
    """
    from gputrain_tui.lifecycle import slurm_jobs

    run, job = _submit(prepared)
    slurm_jobs.record_queued(run.dir, job)
    return run


def _submit(prepared: Prepared) -> tuple[Run, Job | None]:
    from gputrain_tui.lifecycle import slurm_jobs

    run = _create(prepared)
    try:
        return run, slurm_jobs.submit(run, prepared.recipe, prepared.plan)
    except RequestError as error:
        shutil.rmtree(run.dir.path, ignore_errors=True)
        raise NotReadyError([CheckResult(status="error", check="Slurm", what=str(error))]) from None


def _create(prepared: Prepared) -> Run:
    recipe = prepared.recipe

    def planned(run_dir: RunDir) -> bytes:
        return msgspec.json.encode(with_run_dir(prepared.plan, str(run_dir.path)))

    try:
        return create(recipe.name, world_size=prepared.plan.world_size, recipe_toml=recipe_text(recipe), plan=planned)
    except RequestError as error:
        what, _, fix = str(error).partition("; ")
        raise NotReadyError([CheckResult(status="error", check="run folder", what=what, fix=fix)]) from None


def start_supervisor(
    run_dir: RunDir,
    *,
    leased: bool,
    adopting: bool = False,
    connections: OpenConnections | None = None,
) -> subprocess.Popen[bytes]:
    """Start the supervisor of a run.

    Args:
        run_dir: run directory.
        leased: whether closing the supervisor's standard input, a pipe, ends the run.
        adopting: whether it takes over the run of a supervisor that was killed.
        connections: connections to the hosts of the run, which the supervisor takes over.
    """
    words = [str(run_dir.path), *(["--lease"] if leased else []), *(["--adopt"] if adopting else [])]
    by_node = {} if connections is None else connections.by_node
    if by_node:
        words.append(f"{CONNECTIONS}{msgspec.json.encode(by_node).decode()}")
    # The supervisor inherits the signal mask and unblocks the signals once it has handlers: a Ctrl-C while its modules
    # load stays pending.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        with _supervisor_log(run_dir) as log:
            supervisor = subprocess.Popen(
                [sys.executable, "-P", "-m", "gputrain_tui.lifecycle.supervisor", *words],
                env={**_outside_of_runs(os.environ), SUPERVISOR: str(run_dir.path.absolute())},
                stdin=subprocess.PIPE if leased else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[descriptor for opened in by_node.values() for descriptor in opened.descriptors],
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if connections is not None:
        connections.hand_over()
    return supervisor


def _outside_of_runs(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the mark of the run whose script has started this command, which ends with it."""
    return {name: value for name, value in environ.items() if name != RUN}


def _supervisor_log(run_dir: RunDir) -> IO[bytes]:
    """Open the supervisor's log; the null device if the log cannot be opened, so that the run starts all the same."""
    try:
        return os.fdopen(open_to_append(run_dir.logs / "supervisor.log"), "ab")
    except OSError:
        return Path(os.devnull).open("ab")


def take_over(run: Run, prepared: Prepared) -> subprocess.Popen[bytes]:
    """Start a new supervisor, or follower of a Slurm job, for a leased run whose previous one was killed."""
    if is_submitted(prepared):
        from gputrain_tui.lifecycle import slurm_jobs

        return slurm_jobs.watch(run.dir, leased=True)
    return start_supervisor(run.dir, leased=True, adopting=True)


def adopt(run: Run) -> Run:
    """Start a new supervisor for a run whose supervisor was killed; return once it has taken over or ended the run.

    Raises:
        RequestError: the new supervisor did not start.
    """
    status = read_status(run.dir) or run.status
    supervisor = start_supervisor(run.dir, leased=False, adopting=True)
    await_supervisor(run, supervisor, previous=status.supervisor)
    return open_run(run.dir.path) or run


def await_supervisor(
    run: Run, supervisor: subprocess.Popen[bytes], *, previous: ProcessIdentity | None, patience_s: float = 30.0
) -> None:
    """Wait until a new supervisor is in the status of its run, which other commands take for lost until then.

    Args:
        run: the run.
        supervisor: the new supervisor.
        previous: the supervisor before, as in the status.
        patience_s: time limit.

    Raises:
        RequestError: the new supervisor did not start.
    """
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        status = read_status(run.dir)
        if status is not None and (status.supervisor != previous or status.status in ENDED):
            return
        try:
            supervisor.wait(0.01)
        except subprocess.TimeoutExpired:
            continue
        break
    status = read_status(run.dir)
    if status is None or (status.supervisor == previous and status.status not in ENDED):
        raise RequestError(f"the supervisor of {run.id} did not start; see {run.dir.logs / 'supervisor.log'}")


def recipe_text(recipe: Recipe) -> str:
    """Return the recipe as TOML for the run directory; as written by the user if nothing was overridden or derived."""
    source = recipe.origin
    as_written = source.format == "toml" and not source.overridden and not source.origins and "name" in source.data
    if as_written:
        return recipe.text
    from gputrain_tui.recipe.toml_writer import dump_toml  # a slow import (tomlkit) that few runs need

    return dump_toml(recipe)
