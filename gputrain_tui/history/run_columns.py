"""Columns of the list of runs, for sorting and filtering in the command and in the console."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from gputrain_tui.history.summary import UNREADABLE
from gputrain_tui.row_filter import FilterColumn, RowFilter, Value
from gputrain_tui.state.finding_text import restarts_text
from gputrain_tui.state.job_queue import jobs_text
from gputrain_tui.tables import number
from trainer.contract.errors import RequestError, nearest
from trainer.contract.record import RunStatusName
from trainer.host.stop_request import STOP_REASONS

Entry = Mapping[str, Any]
BY_A_PERSON = (*STOP_REASONS.values(), "stopped by SIGINT")
"""Beginnings of the message of a run that a person has stopped."""


STATES = (*get_args(RunStatusName), "lost", UNREADABLE)
"""All states of a run in the list."""


def _column(key: str, name: str, *, is_number: bool = True, allowed: Sequence[str] = ()) -> FilterColumn[Entry]:
    def value(entry: Entry) -> Value:
        cell = entry[name]
        return " ".join(cell) if isinstance(cell, list | tuple) else cell

    return FilterColumn(key=key, is_number=is_number, value=value, allowed=allowed)


def cause(entry: Entry) -> str:
    """Return in how many jobs and after how many restarts it ran, and why it ended by itself or what stands of it."""
    message = message_text(entry)
    is_told = entry["state"] in ("failed", "lost", "starting") or (
        entry["state"] == "stopped" and not message.startswith(BY_A_PERSON)
    )
    why = (message if is_told else "") or entry["finding"] or ""
    starts = f"{jobs_text(entry['jobs'] or 0)}{restarts_text(entry['restarts'] or 0)}"
    return ": ".join(filter(None, [starts.lstrip(), why]))


def message_text(entry: Entry) -> str:
    """Return the message of a run, after the rank and host that failed where it does not name the rank, and the step.

    The step in which it failed is one more than the run has done.
    """
    message, rank, host, step = entry["message"] or "", entry["failed_rank"], entry["failed_host"], entry["failed_step"]
    if rank is None or re.search(rf"\branks? {rank}\b", message):
        return message
    in_step = "" if step is None or re.search(rf"\bstep {step}\b", message) else f" in step {step:,}"
    return f"rank {rank}{f' on {host}' if host else ''}{in_step}: {message}"


def loss_cell(entry: Entry) -> str:
    """Return a run's loss as text, ``nan`` where it is known not to be a number; empty where there is none."""
    loss = float("nan") if entry["loss_is_nan"] else entry["loss"]
    return number(loss, 4)


BEST = "best_valid"
"""Column of the best validation, by the metric with which a run chooses its best checkpoint."""


def best_cell(entry: Entry) -> str:
    """Return the best validation with its step, such as ``accuracy 0.9120 at 300``; empty if the newest is as good."""
    best = entry[BEST]
    if best is None or (best["metric"] == "loss" and best["value"] == entry["valid"]):
        return ""
    name = "" if best["metric"] == "loss" else f"{best['metric']} "
    return f"{name}{number(best['value'], 4)} at {best['step']:,}"


RUN_COLUMNS: Mapping[str, FilterColumn[Entry]] = {
    column.key: column
    for column in (
        _column("run", "id", is_number=False),
        _column("state", "state", is_number=False, allowed=STATES),
        _column("recipe", "recipe", is_number=False),
        _column("ranks", "world_size"),
        _column("step", "step"),
        _column("loss", "loss"),
        _column("valid", "valid"),
        FilterColumn(key=BEST, is_number=True, value=lambda entry: entry[BEST] and float(entry[BEST]["value"])),
        _column("lr", "lr"),
        _column("tokens", "tokens"),
        _column("started", "started"),
        _column("took", "duration_s"),
        _column("tags", "tags", is_number=False),
        FilterColumn(key="cause", is_number=False, value=cause),
        _column("note", "note", is_number=False),
    )
}
"""By title, which is also the name in a filter; ``started`` is in Unix seconds, ``took`` in seconds."""
METRIC = "metric:"
"""Before the name of a user's own metric: in a filter, as a column to sort by, in a condition of ``compare``."""


def metric_column(name: str) -> FilterColumn[Entry]:
    """Return the column of a user's own metric; None in runs that have no number of it."""

    def value(entry: Entry) -> Value:
        number: float | None = (entry["metrics"] or {}).get(name)
        return number

    return FilterColumn(key=METRIC + name, is_number=True, value=value)


def metric_names(entries: Iterable[Entry]) -> list[str]:
    """Return the names of the metrics that any run has."""
    return list(dict.fromkeys(name for entry in entries for name in entry["metrics"] or ()))


def metrics_text(entry: Entry) -> str:
    """Return a run's metrics in one line, such as ``accuracy 0.9120  f1 0.8800``."""
    return "  ".join(f"{name} {number(value, 4)}" for name, value in (entry["metrics"] or {}).items())


NEWEST_FIRST = "started"
ANYWHERE = ("id", "state", "recipe", "note")
"""Keys of a summary in which a filter word without a column is searched, besides the tags."""


def run_filter(text: str) -> RowFilter[Entry]:
    """Return the filter of a line such as ``state:failed loss<2 tags:baseline``.

    Raises:
        RequestError: a word is not understood.
    """
    return RowFilter(text, RUN_COLUMNS, _anywhere, {METRIC.rstrip(":"): metric_column})


def with_metric(error: RequestError, text: str, entries: Iterable[Entry]) -> RequestError:
    """Return the error about a filter, with a metric of the runs as its hint if a word begins with its name."""
    names = [name for name in metric_names(entries) if any(word.startswith(name) for word in text.split())]
    if not names or "no column" not in str(error):
        return error
    return RequestError(f"{str(error).partition(';')[0]}; did you mean {METRIC + max(names, key=len)!r}?")


def _anywhere(word: str, entry: Entry) -> bool:
    part = word.casefold()
    texts = [*(entry[name] or "" for name in ANYWHERE), *(entry["tags"] or ())]
    return any(part in text.casefold() for text in texts)


def sorted_runs(entries: Sequence[Entry], key: str, *, reverse: bool = False) -> list[Entry]:
    """Return runs by a column: text, losses and learning rates upwards, other numbers from the greatest.

    By ``best_valid`` the better ones come first, those of one metric together. A metric with ``loss`` in its name, such
    as ``metric:val_loss``, is a loss. Those without a value come last in either direction. Runs of equal values stay in
    their order.

    Raises:
        RequestError: there is no such column.
    """
    is_metric = key.startswith(METRIC) and len(key) > len(METRIC)
    column = metric_column(key.removeprefix(METRIC)) if is_metric else RUN_COLUMNS.get(key)
    if column is None:
        guess = nearest(key, RUN_COLUMNS) or "; one of " + ", ".join([*RUN_COLUMNS, f"{METRIC}NAME"])
        raise RequestError(f"no column {key!r} to sort by{guess}")
    ascending = not column.is_number or key in ("valid", BEST, "lr") or "loss" in key.casefold()
    values = [(column.value(entry), entry) for entry in entries]
    known = [
        (value, entry)
        for value, entry in values
        if value not in (None, "") and value == value and entry["state"] != UNREADABLE  # NaN has no place in an order
    ]
    known.sort(key=lambda pair: _best_key(pair[1]) if key == BEST else _sort_key(pair[0]), reverse=ascending == reverse)
    shown = {id(entry) for _, entry in known}
    return [entry for _, entry in known] + [entry for entry in entries if id(entry) not in shown]


def _best_key(entry: Entry) -> tuple[Any, ...]:
    best = entry[BEST]
    return best["metric"] != "loss", best["metric"], -best["value"] if best["maximize"] else best["value"]


def _sort_key(value: Value) -> tuple[float, str]:
    return (0.0, value.casefold()) if isinstance(value, str) else (value or 0.0, "")
