"""Summarizes runs for lists: state, progress and loss of each."""

from __future__ import annotations

from math import isfinite
from typing import Any

import msgspec

from gputrain_tui.history.lost_run import lost_text
from gputrain_tui.history.notes import Notes, read_notes
from gputrain_tui.history.record_tail import last_step, newest_loss_of, standing_findings
from gputrain_tui.history.run_folders import Run, UnreadableRun
from gputrain_tui.history.status_file import ENDED, PLANNED, elapsed_of
from gputrain_tui.state.finding_text import loss_is_nan, marking, run_mark
from trainer.contract.errors import RecordError

MAX_NAME_CHARS = 60
"""Keeps a row of the list on one line of a wide terminal."""
SUMMARY_KEYS = (
    "id", "state", "recipe", "world_size", "step", "loss", "valid", "best_valid", "lr", "tokens",
    "steps_per_s", "samples_per_s", "tokens_per_s", "mfu", "noise_scale", "started", "ended", "duration_s",
    "exit_code", "message", "failed_rank", "failed_host", "failed_step", "tested", "note", "tags", "run_dir",
    "metrics", "shares", "finding", "findings", "loss_is_nan", "restarts", "jobs",
)  # fmt: skip
"""Keys of a summary, as ``gputrain runs --json`` prints them."""
FINDING_KEYS = (
    "kind", "state", "severity", "rank", "ranks", "host", "step", "cause", "line", "message", "evidence", "advice",
)  # fmt: skip
UNREADABLE = "unreadable"


def summarize_unreadable(run: UnreadableRun) -> dict[str, Any]:
    """Return the summary of an unreadable run: its id, its directory and the reason."""
    entry = dict.fromkeys(SUMMARY_KEYS)
    return entry | {"id": run.id, "state": UNREADABLE, "message": run.problem, "run_dir": str(run.dir.path)}


def summarize(run: Run, *, now: float) -> dict[str, Any]:
    """Return the summary of a run; unknown values are None."""
    status = run.status
    step, loss, lr = status.step, status.loss, status.lr
    if status.status not in ENDED:  # the status has them at the end only
        newest = newest_loss_of(run.dir, status.world_size)
        step, loss = newest if newest[0] is not None else (step, loss)
        loss = loss if loss is None or isfinite(loss) else None
        last = last_step(run.dir)
        lr = lr if last is None else last.lr
    try:
        notes = read_notes(run.dir)
    except RecordError:
        notes = Notes()  # `gputrain note` has the reason
    findings = status.findings if status.status in ENDED else marking(standing_findings(run.dir))
    is_lost = run.state not in ENDED and run.state != status.status
    tested = status.tested
    # What has the status's name is the status's value; the order is that of the keys.
    return {name: getattr(status, name, None) for name in SUMMARY_KEYS} | {
        "id": run.id,
        "state": run.state,
        "step": step,
        "loss": loss,
        "valid": None if status.valid is None else float(status.valid),
        "best_valid": status.best_valid and msgspec.structs.asdict(status.best_valid),
        "lr": lr,
        "duration_s": None if is_lost or status.message == PLANNED else elapsed_of(status, now),
        "message": status.message or lost_text(run.dir, status) or None,
        "tested": tested and {name: getattr(tested, name) for name in ("split", "weights_step", "loss", "metrics")},
        "note": notes.note or None,
        "tags": list(notes.tags),
        "run_dir": str(run.dir.path),
        "metrics": {name: float(value) for name, value in status.metrics.items()},
        "finding": run_mark(findings) or None,
        "findings": [{name: getattr(finding, name) for name in FINDING_KEYS} for finding in findings],
        "loss_is_nan": loss is None and loss_is_nan(findings),
        "jobs": status.jobs or None,
    }
