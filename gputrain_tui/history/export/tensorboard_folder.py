"""Writes a folder of event files for TensorBoard, by the ``tensorboard`` package alone: neither torch nor tensorflow.

A rank is a run of TensorBoard with the same tags as the others, so that they share their charts; the folder itself is
the run of the mean over the ranks, of validations and hyper-parameters, beside ``lowest`` and ``highest``.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from gputrain_tui.history.export.steps import RecordedSteps, SingleStep
from gputrain_tui.history.recorded_recipe import recorded_recipe
from gputrain_tui.recipe.allow_list import AllowList
from trainer.contract.errors import MachineNotReadyError
from trainer.contract.record import SINGLE_VALUES, Metrics, RunDir, Step, Validation

COMMIT_BYTES = 1 << 20
"""Size of the pending values of a file from which they are written."""
PREFIX = "events.out.tfevents."
"""Beginning of the file names by which TensorBoard finds its files."""
TOTALS = ("samples", "tokens")
SCALARS = tuple(
    name for name in Step.__struct_fields__
    if name not in (
        *SINGLE_VALUES.values(), "time", "rank", "step", "steps", "core_wait_ms", "bucket_ms", "non_finite", "groups",
        "calls",
    )
)  # fmt: skip


TAGS = {
    name: f"{'sync' if name.startswith('sync_') else 'time' if name.endswith('_ms') else 'train'}/{name}"
    for name in SCALARS
}
"""By field of a step; TensorBoard groups tags by the part before the slash."""


class EventFile:
    """One event file, encoded by TensorBoard's own modules."""

    def __init__(self, file: BinaryIO, *, time: float) -> None:
        """Begin a file with a record of a time, Unix seconds.

        Raises:
            MachineNotReadyError: the package is not installed.
        """
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            raise MachineNotReadyError("tensorboard is not installed: pip install 'tensorboard>=2.14'") from None
        self._event, self._session, self._summary = event_pb2.Event, event_pb2.SessionLog, summary_pb2.Summary
        self._records = RecordWriter(file)
        self._attempt = 1
        self._write(self._event(wall_time=time, file_version="brain.Event:2"))

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def scalars(self, values: Mapping[str, float], *, step: int, time: float) -> None:
        if values:
            entries = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            self._write(self._event(wall_time=time, step=step, summary=self._summary(value=entries)))

    def single_step(self, values: Mapping[str, float], single: SingleStep) -> None:
        """Write a step; after a restart TensorBoard drops the values of this one and later ones written before."""
        step, time = single.step.step, single.step.time
        if single.attempt > self._attempt:
            self._attempt = single.attempt
            log = self._session(status=self._session.START)
            self._write(self._event(wall_time=time, step=step, session_log=log))
        self.scalars(values, step=step, time=time)

    def hyper_parameters(self, values: Mapping[str, bool | float | str], *, began: float, ended: float | None) -> None:
        """Write the values that TensorBoard lists and compares beside the results."""
        from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
        from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

        start = plugin_data_pb2.SessionStartInfo(start_time_secs=began)
        for name, value in values.items():
            if isinstance(value, bool):
                start.hparams[name].bool_value = value
            elif isinstance(value, str):
                start.hparams[name].string_value = value
            else:
                start.hparams[name].number_value = value
        infos = {"session_start_info": start}
        if ended is not None:
            infos["session_end_info"] = plugin_data_pb2.SessionEndInfo(
                status=api_pb2.Status.STATUS_SUCCESS, end_time_secs=ended
            )
        shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=0)])
        nothing = tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, tensor_shape=shape)
        for name, info in infos.items():
            content = plugin_data_pb2.HParamsPluginData(version=0, **{name: info}).SerializeToString()
            plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="hparams", content=content)
            metadata = summary_pb2.SummaryMetadata(plugin_data=plugin)
            value = self._summary.Value(tag=f"_hparams_/{name}", tensor=nothing, metadata=metadata)
            self._write(self._event(wall_time=began, summary=self._summary(value=[value])))


class TensorBoardSink:
    """Writes the event files of a run; after ``finish`` they are on the disk."""

    def __init__(
        self, run: RunDir, world_size: int, folder: Path, *, began: float, ended: float | None = None, ranks: int = 0
    ) -> None:
        """Begin the files of a folder anew; the run's start, in Unix seconds, is part of their names.

        ``ranks`` is the number of ranks that are written; by default all.

        Raises:
            MachineNotReadyError: the package is not installed.
        """
        self._folder = folder
        self._began = began
        self._files: dict[str, tuple[Path, io.BytesIO, EventFile]] = {}
        """By folder within the folder: file, pending bytes, and their encoder."""
        self._parts = (".", "lowest", "highest") if (ranks or world_size) > 1 else (".",)
        self._file(".").hyper_parameters(hyper_parameters(run, world_size), began=began, ended=ended)

    def rank(self, rank: int, single: SingleStep) -> None:
        self._write(f"rank_{rank}", rank_scalars(single), single)

    def over_ranks(self, row: list[SingleStep]) -> None:
        for part, values in zip(self._parts, over_ranks(row), strict=False):
            self._write(part, values, row[-1])

    def validation(self, event: Validation) -> None:
        self._file(".").scalars(validation_scalars(event), step=event.step, time=event.time)

    def metrics(self, event: Metrics) -> None:
        self._file(f"rank_{event.rank}").scalars(metric_scalars(event), step=event.step, time=event.time)

    def commit(self) -> None:
        for part in self._files:
            self._append(part)

    def finish(self) -> None:
        self.commit()
        for path, _, _ in self._files.values():
            with path.open("ab") as file:
                os.fsync(file.fileno())

    def _write(self, part: str, values: dict[str, float], single: SingleStep) -> None:
        self._file(part).single_step(values, single)
        if self._files[part][1].tell() > COMMIT_BYTES:
            self._append(part)

    def _append(self, part: str) -> None:
        path, pending, _ = self._files[part]
        if pending.tell():
            with path.open("ab") as file:
                file.write(pending.getbuffer())
            pending.seek(0)
            pending.truncate()

    def _file(self, part: str) -> EventFile:
        if part not in self._files:
            path = self._folder / part / f"{PREFIX}{int(self._began):010d}.gputrain"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
            pending = io.BytesIO()
            self._files[part] = path, pending, EventFile(pending, time=self._began)
        return self._files[part][2]


def write_tensorboard(record: RecordedSteps, folder: Path) -> None:
    """Write the event files of the wanted ranks, of all of them together and of the validations.

    Raises:
        MachineNotReadyError: the package is not installed.
    """
    run, ranks = record.run, record.ranks
    sink = TensorBoardSink(
        run.dir, run.status.world_size, folder, began=record.began, ended=run.status.ended, ranks=len(ranks)
    )
    for rank in ranks:
        for single in record.of(rank):
            sink.rank(rank, single)
        for _, metrics in record.metrics(rank):
            sink.metrics(metrics)
        sink.commit()
    for row in record.over_ranks():
        sink.over_ranks(row)
    for event in record.notes(["0"]):  # last: a restart that follows in this file would make TensorBoard drop them
        if isinstance(event, Validation):
            sink.validation(event)
    sink.finish()


def rank_scalars(single: SingleStep) -> dict[str, float]:
    """Return the values of a step of one rank by tag; a mean over several steps only at the last of them."""
    step, own = single.step, SCALARS if single.is_last else SINGLE_VALUES
    values = {TAGS[name]: value for name in own if (value := getattr(step, name)) is not None}
    if single.is_last and step.core_wait_ms is not None:
        values |= {f"core_wait/{phase}_ms": waited for phase, waited in step.core_wait_ms.items()}
    if single.is_last:
        values |= group_scalars(step)
    return values


def group_scalars(step: Step) -> dict[str, float]:
    """Return the exposed time of the collectives in each process group by tag, ms."""
    return {f"sync/{each.group}_ms": each.exposed_ms for each in step.groups or () if each.exposed_ms is not None}


def validation_scalars(event: Validation) -> dict[str, float]:
    """Return loss and metrics of an evaluation by tag."""
    return {f"{event.split}/loss": event.loss} | {
        f"{event.split}/{name}": value for name, value in event.metrics.items()
    }


def metric_scalars(event: Metrics) -> dict[str, float]:
    """Return the user's own metrics by tag."""
    return {f"metric/{name}": value for name, value in event.values.items()}


def over_ranks(row: list[SingleStep]) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Return mean (or total), minimum and maximum over the ranks by tag; a mean over steps only at the last of them."""
    means: dict[str, float] = {}
    lows: dict[str, float] = {}
    highs: dict[str, float] = {}
    for name in SCALARS if row[0].is_last else SINGLE_VALUES:
        values = [value for single in row if (value := getattr(single.step, name)) is not None]
        if values and (name not in TOTALS or len(values) == len(row)):  # a part of the ranks has no total
            tag = TAGS[name]
            means[tag] = sum(values) if name in TOTALS else sum(values) / len(values)
            lows[tag], highs[tag] = min(values), max(values)
    of_ranks = [group_scalars(single.step) for single in row] if row[0].is_last else []
    for tag in dict.fromkeys(tag for values in of_ranks for tag in values):
        waits = [values[tag] for values in of_ranks if tag in values]
        means[tag], lows[tag], highs[tag] = sum(waits) / len(waits), min(waits), max(waits)
    return means, lows, highs


def hyper_parameters(run: RunDir, world_size: int) -> dict[str, bool | float | str]:
    """Return the world size and, if the recipe can be read, its options by name."""
    parameters: dict[str, bool | float | str] = {"world_size": world_size}
    shown = AllowList({}, Path.cwd()).recipe(recorded_recipe(run) or {})
    for table in ("train", "task"):
        options = shown.get(table)
        for name, value in options.items() if isinstance(options, dict) else ():
            parameters[f"{table}.{name}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return parameters
