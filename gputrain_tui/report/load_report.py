"""Reads a run's record into its state, and what the report says beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from gputrain_tui.history.comparison import DifferingValues, differences
from gputrain_tui.history.run_folders import RECENT_RUNS, Run, UnreadableRun, newest_runs
from gputrain_tui.history.status_file import PLANNED
from gputrain_tui.lifecycle.live_run import LiveRun
from gputrain_tui.lifecycle.recipe_to_run import recipe_of
from gputrain_tui.lifecycle.remote_nodes import path_with_host
from gputrain_tui.lifecycle.run_checkpoints import run_ids
from gputrain_tui.recipe.build import load
from gputrain_tui.recipe.model import Recipe
from gputrain_tui.report.report_fields import RecipeChange, RunFacts, SavedCheckpoint
from trainer.contract.checkpoint_trailer import owner_of
from trainer.contract.errors import RequestError, nearest, quoted
from trainer.contract.record import Step
from trainer.contract.record.checkpoints import BEST


def runs_in_turns(before: str, now: str, rounds: int) -> list[tuple[Run, Run]]:
    """Return the newest runs of two recipes, by their names, in pairs; the oldest round first.

    Raises:
        RequestError: a recipe has fewer runs, or they were not made in turns.
    """
    newest: dict[str, list[Run]] = {before: [], now: []}
    if before == now:
        raise RequestError(f"compare --rounds: {quoted(before)} twice; name two recipes")
    seen = set[str]()
    for run in newest_runs():
        if isinstance(run, UnreadableRun):
            continue
        seen.add(run.status.recipe)
        of_name = newest.get(run.status.recipe, [])
        if len(of_name) < rounds:
            of_name.append(run)
        if all(len(runs) == rounds for runs in newest.values()):
            break
    for name, runs in newest.items():
        if len(runs) < rounds:
            hint = "" if runs else nearest(name, seen)
            raise RequestError(f"compare --rounds {rounds}: the recipe {quoted(name)} has {len(runs)} runs{hint}")
    in_order = sorted((*newest[before], *newest[now]), key=lambda run: run.status.started)
    pairs = []
    for one, other in zip(in_order[::2], in_order[1::2], strict=True):
        if one.status.recipe == other.status.recipe:
            raise RequestError(
                f"compare --rounds: {one.id} and {other.id} follow each other; make the runs in turns, {before} and "
                f"{now} in each round"
            )
        pairs.append((one, other) if one.status.recipe == before else (other, one))
    return pairs


def read_run_record(run: Run, *, on_step: Callable[[Step], None] | None = None) -> LiveRun:
    """Return the run with its whole record read; that of one that goes on, as far as it is written.

    ``on_step`` is called with each step event.
    """
    live = LiveRun(run, on_step=on_step)
    while live.poll(budget_s=1.0):
        pass
    return live


def run_facts(live: LiveRun, *, known: RunFacts | None = None) -> RunFacts:
    """Return what status and recipes say of a run; of facts that are ``known``, the recipes' part stays."""
    run, status = live.run, live.run.status
    if known is None:
        previous = previous_run(run, islice(newest_runs(run.dir.path.parent), RECENT_RUNS))
        previous_id = None if previous is None else previous.id
        changes = () if previous is None else recipe_changes(previous, run)
    else:
        previous_id, changes = known.previous_run, known.changes
    return RunFacts(
        id=run.id,
        recipe=status.recipe,
        state=live.status,
        run_dir=str(run.dir.path),
        exit_code=status.exit_code,
        message=live.message,
        failed_rank=status.failed_rank,
        failed_host=status.failed_host,
        started=status.started or None,
        ended=status.ended,
        duration_s=live.elapsed_s,
        jobs=status.jobs or None,
        checkpoints=tuple(saved_checkpoints(live)),
        previous_run=previous_id,
        changes=changes,
        record_gap=live.record_gap or None,
    )


def saved_checkpoints(live: LiveRun) -> Iterator[SavedCheckpoint]:
    """Yield the run's checkpoints that are still there, newest first; of another host all of them."""
    run_dir, checkpoints = live.run.dir, live.state.checkpoints
    ids, host = run_ids(run_dir), path_with_host(run_dir, 0, "")
    best = next((event for event in reversed(checkpoints) if event.best), None)
    for event in reversed(checkpoints):
        path, is_best = Path(event.path), event is best
        if is_best and not host and not path.exists():
            path = path.with_name(BEST)
        if host or (path.is_file() and owner_of(path) in ("", *ids)):
            yield SavedCheckpoint(step=event.step, path=f"{host}{path}", bytes=event.bytes, best=is_best)


def previous_run(run: Run, others: Iterable[Run | UnreadableRun]) -> Run | None:
    """Return the newest run of the same recipe that started before; ``others``: newest first.

    One that was only planned is none.
    """
    for other in others:
        if isinstance(other, UnreadableRun) or other.status.recipe != run.status.recipe:
            continue
        if other.status.message == PLANNED:
            continue
        if other.status.started < run.status.started:
            return other
    return None


def recipe_changes(before: Run, now: Run) -> tuple[RecipeChange, ...]:
    """Return the keys whose values differ; none where a recipe cannot be read."""
    try:
        found = recipe_differences([before, now])
    except RequestError:
        return ()
    return tuple(RecipeChange(key=each.key, before=each.values[0], now=each.values[1]) for each in found)


def recipe_differences(runs: Sequence[Run]) -> list[DifferingValues]:
    """Return the keys in which the recipes of runs differ.

    Raises:
        RequestError: a recipe cannot be read.
    """
    return differences([read_recipe(run) for run in runs])


def read_recipe(run: Run) -> Recipe:
    """Return the recipe of a run.

    Raises:
        RequestError: it cannot be read.
    """
    try:
        return load(recipe_of(run))
    except RequestError as error:
        raise RequestError(f"the recipe of {run.id} cannot be read: {error}") from None
