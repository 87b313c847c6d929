"""Short events, and the events of a file."""

from __future__ import annotations

from pathlib import Path

from trainer.contract.record import AnyEvent, Sample, decode_events


def sample(number: int, size: int = 0) -> Sample:
    return Sample(time=0.0, step=number, text="x" * size)


def events_of(path: Path) -> list[AnyEvent]:
    return list(decode_events(path.read_bytes()))


def numbers_of(events: list[AnyEvent]) -> list[int]:
    return [event.step for event in events if isinstance(event, Sample)]
