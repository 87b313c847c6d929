"""Writes a folder of event files for TensorBoard, by the ``tensorboard`` package alone: neither torch nor tensorflow.

A rank is a run of TensorBoard with the same tags as the others, so that they share their charts; the folder itself is
the run of the mean over the ranks, of validations and hyper-parameters, beside ``lowest`` and ``highest``.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from gputrain_tui.history.export.steps import RecordedSteps, SingleStep
from gputrain_tui.recipe.allow_list import AllowList
from gputrain_tui.recipe.source import MAX_RECIPE_BYTES
from trainer.contract.errors import MachineNotReadyError
from trainer.contract.record import SINGLE_VALUES, RunDir, Step, Validation
from trainer.contract.record.regular_file import read_whole

PREFIX = "events.out.tfevents."
"""Beginning of the file names by which TensorBoard finds its files."""
TOTALS = ("samples", "tokens")
"""Fields that add up over the ranks."""
SCALARS = tuple(
    name for name in Step.__struct_fields__
    if name not in (*SINGLE_VALUES.values(), "time", "rank", "step", "steps", "core_wait_ms", "bucket_ms", "non_finite")
)  # fmt: skip


def tag_of(field: str) -> str:
    """Return the tag of a field of a step; TensorBoard groups tags by the part before the slash."""
    group = "sync" if field.startswith("sync_") else "time" if field.endswith("_ms") else "train"
    return f"{group}/{field}"


TAGS = {name: tag_of(name) for name in SCALARS}


class EventFile:
    """One event file, encoded by TensorBoard's own modules."""

    def __init__(self, file: BinaryIO, *, time: float | None) -> None:
        """Begin a file.

        Args:
            file: file to append to.
            time: Unix seconds of its first record; None to continue a file that has one.

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
        if time is not None:
            self._write(self._event(wall_time=time, file_version="brain.Event:2"))

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def scalars(self, values: Mapping[str, float], *, step: int, time: float) -> None:
        """Write values by tag."""
        if values:
            found = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            self._write(self._event(wall_time=time, step=step, summary=self._summary(value=found)))

    def restarted(self, *, step: int, time: float) -> None:
        """Write a restart: TensorBoard drops the values of this step and later ones that were written before it."""
        log = self._session(status=self._session.START)
        self._write(self._event(wall_time=time, step=step, session_log=log))

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


def write_tensorboard(record: RecordedSteps, folder: Path) -> None:
    """Write the event files of the wanted ranks, of all of them together and of the validations.

    Raises:
        MachineNotReadyError: the package is not installed.
    """
    began = record.began
    with _event_file(folder, began) as mean:
        parameters = hyper_parameters(record.run.dir, record.run.status.world_size)
        mean.hyper_parameters(parameters, began=began, ended=record.run.status.ended)
        for rank in record.ranks:
            with _event_file(folder / f"rank_{rank}", began) as file:
                _write_rank(record, rank, file)
        with ExitStack() as stack:
            several = len(record.ranks) > 1
            lowest, highest = (
                stack.enter_context(_event_file(folder / name, began)) if several else None
                for name in ("lowest", "highest")
            )
            _write_over_ranks(record, mean, lowest, highest)
        for event in record.notes(["0"]):  # last: a restart that follows in this file would make TensorBoard drop them
            if isinstance(event, Validation):
                mean.scalars(validation_scalars(event), step=event.step, time=event.time)


@contextmanager
def _event_file(folder: Path, began: float) -> Iterator[EventFile]:
    folder.mkdir(exist_ok=True)
    with (folder / f"{PREFIX}{int(began):010d}.gputrain").open("wb") as file:
        yield EventFile(file, time=began)
        file.flush()
        os.fsync(file.fileno())


def _write_rank(record: RecordedSteps, rank: int, file: EventFile) -> None:
    attempt = 1
    for single in record.of(rank):
        step = single.step
        if single.attempt > attempt:
            attempt = single.attempt
            file.restarted(step=step.step, time=step.time)
        file.scalars(rank_scalars(single), step=step.step, time=step.time)


def rank_scalars(single: SingleStep) -> dict[str, float]:
    """Return the values of a step of one rank by tag; a mean over several steps only at the last of them."""
    step, own = single.step, SCALARS if single.is_last else SINGLE_VALUES
    values = {TAGS[name]: value for name in own if (value := getattr(step, name)) is not None}
    if single.is_last and step.core_wait_ms is not None:
        values |= {f"core_wait/{phase}_ms": waited for phase, waited in step.core_wait_ms.items()}
    return values


def validation_scalars(event: Validation) -> dict[str, float]:
    """Return loss and metrics of an evaluation by tag."""
    return {f"{event.split}/loss": event.loss} | {
        f"{event.split}/{name}": value for name, value in event.metrics.items()
    }


def _write_over_ranks(
    record: RecordedSteps, mean: EventFile, lowest: EventFile | None, highest: EventFile | None
) -> None:
    attempt = 1
    for row in record.over_ranks():
        step, time = row[0].step.step, row[-1].step.time
        if row[0].attempt > attempt:
            attempt = row[0].attempt
            for file in filter(None, (mean, lowest, highest)):
                file.restarted(step=step, time=time)
        means, lows, highs = over_ranks(row)
        mean.scalars(means, step=step, time=time)
        if lowest is not None and highest is not None:
            lowest.scalars(lows, step=step, time=time)
            highest.scalars(highs, step=step, time=time)


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
    return means, lows, highs


def hyper_parameters(run: RunDir, world_size: int) -> dict[str, bool | float | str]:
    """Return the world size and, if the recipe can be read, its options by name."""
    found: dict[str, bool | float | str] = {"world_size": world_size}
    try:
        recipe = tomllib.loads(read_whole(run.recipe, MAX_RECIPE_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return found
    shown = AllowList({}, Path.cwd()).recipe(recipe)
    for table in ("train", "task"):
        options = shown.get(table)
        for name, value in options.items() if isinstance(options, dict) else ():
            found[f"{table}.{name}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return found
