"""Speeds of devices, as earlier runs with balanced shares measured them: a start for the next run on such devices.

A file of the cache holds them by the device's model, for one task and the options on which the compute of a sample
depends. It only saves the first steps with equal shares: what it lacks, and what is wrong in it, the run measures.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from trainer.contract.balanced_shares import ComputeTime, shares
from trainer.contract.home_folder import cache_folder
from trainer.contract.options import Training
from trainer.contract.record.regular_file import open_regular
from trainer.contract.schema import Option

_Speeds = dict[str, tuple[Annotated[float, Meta(ge=0, le=1e9)], Annotated[float, Meta(gt=0, le=1e9)]]]
"""Fixed and per-sample time, ms, by the model of a device."""


class LearnedSpeeds:
    """The speeds for a task with some options."""

    def __init__(self, training: Training, options: Sequence[Option], values: Mapping[str, Any]) -> None:
        """Take the training's options, those that the task has, and the values of some of these."""
        # By their defaults: a recipe holds only what it gives.
        given = {each.name: value for each in options if (value := values.get(each.name, each.default)) != each.default}
        names = ("precision", "compile", "activation_checkpointing")
        file, colon, task = training.task.rpartition(":")
        if file.endswith(".py"):  # files of equal name in two folders have other models
            file = os.path.realpath(os.path.expanduser(file))  # noqa: PTH111 - fails on an unknown user
        inputs = [
            given,
            bool(training.max_tokens),
            f"{file}{colon}{task}",
            *(getattr(training, each) for each in names),
        ]
        digest = hashlib.sha256(msgspec.json.encode(inputs, order="sorted")).hexdigest()[:24]
        self._file = cache_folder() / "speeds" / f"{digest}.json"

    def shares(self, models: Sequence[str], global_batch_size: int, *, least: int = 1) -> list[int] | None:
        """Return the shares of ranks on devices of these models; None if one is not known, or all are the same."""
        known = self._read()
        if len(set(models)) < 2 or not all(model in known for model in models):
            return None
        times = [ComputeTime(*known[model]) for model in models]
        return list(shares(times, [0] * len(models), global_batch_size, least=least))

    def learn(self, models: Sequence[str], times: Sequence[ComputeTime]) -> None:
        """Keep the speeds of several models beside those that are known; nothing if the file cannot be written."""
        if len(set(models)) < 2:
            return
        speeds = self._read()
        for model in sorted(set(models)):
            own = [time for time, each in zip(times, models, strict=True) if each == model]
            speeds.pop(model, None)  # the newest last
            speeds[model] = median(time.fixed_ms for time in own), median(time.per_sample_ms for time in own)
        most = 100  # models in a file, and files
        folder = self._file.parent
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            draft = self._file.with_suffix(f".{os.urandom(4).hex()}.tmp")
            draft.write_bytes(msgspec.json.encode(dict(list(speeds.items())[-most:])))
            draft.replace(self._file)
            by_age = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns)
            for file in by_age[:-most]:
                file.unlink()

    def _read(self) -> _Speeds:
        most_bytes = 1 << 16
        try:
            with os.fdopen(open_regular(self._file), "rb") as file:
                return msgspec.json.decode(file.read(most_bytes), type=_Speeds)
        except (OSError, msgspec.DecodeError):
            return {}  # not known, or not as this version writes it
