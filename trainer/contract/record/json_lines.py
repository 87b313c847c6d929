"""Events as lines of JSON: encoding, and decoding that tolerates damaged lines."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from trainer.contract.record.code_stacks import RankStacks
from trainer.contract.record.events import (
    Checkpoint,
    Checksum,
    CollectiveGroup,
    Doing,
    Event,
    Failure,
    Finding,
    Joining,
    Lost,
    Metrics,
    ModelFlops,
    NoiseScale,
    Queued,
    RankState,
    RunEnded,
    RunStarted,
    Sample,
    ShareChange,
    Step,
    TrainingPlan,
    Unheard,
    Validation,
    World,
)
from trainer.contract.record.machine_samples import NodeSample
from trainer.contract.record.numbers import MAX_RANKS

T = TypeVar("T")

AnyEvent = (
    RunStarted | World | Queued | RankState | Joining | Unheard | TrainingPlan | ShareChange | ModelFlops | Step | Doing
    | Metrics | Validation | Checkpoint | NoiseScale | Checksum | CollectiveGroup | Sample | NodeSample | Finding
    | Failure | RankStacks | Lost | RunEnded
)  # fmt: skip

_encode = msgspec.json.Encoder()
# Created on import: msgspec crashes if several threads decode a type for the first time.
_decode = msgspec.json.Decoder(AnyEvent)
_decode_any = msgspec.json.Decoder()
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of decoding damaged JSON; ``RecursionError`` for too deep a nesting."""


def encode_event(event: Event) -> bytes:
    """Return the event as one JSON line with its newline. Non-finite numbers become null."""
    try:
        return _encode.encode(event) + b"\n"
    except UnicodeEncodeError:  # such as a message with a file name that is not UTF-8
        return _encode.encode(_encodable(msgspec.to_builtins(event))) + b"\n"


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    return value


def decode_events(lines: bytes, world_size: int = MAX_RANKS) -> list[AnyEvent]:
    """Return the events of complete lines; skip torn lines, unknown types and ranks outside of the world size."""
    events = decode_lines(_decode, lines)
    if world_size >= MAX_RANKS:  # the bound of the schema itself
        return events
    return [
        event
        for event in events
        if (event.rank < world_size if type(event) is Step else is_within_world(event, world_size))
    ]


def decode_lines(decoder: msgspec.json.Decoder[T], lines: bytes) -> list[T]:
    """Decode lines of JSON; skip those that are torn or of another type."""
    try:
        return decoder.decode_lines(lines)
    except DECODE_ERRORS:
        decoded: list[T] = []
        for line in lines.splitlines():
            with suppress(*DECODE_ERRORS):
                decoded.append(decoder.decode(line))
        return decoded


def damaged_lines(lines: bytes) -> int:
    """Return how many lines are no JSON; one of an unknown type, as a newer version writes, is none of them."""
    damaged = 0
    for line in lines.split(b"\n"):
        try:
            if line.strip():
                _decode_any.decode(line)
        except DECODE_ERRORS:
            damaged += 1
    return damaged


def is_within_world(event: AnyEvent, world_size: int) -> bool:
    """Whether all ranks and nodes of an event are below the world size."""
    match event:
        case RunStarted() | TrainingPlan():
            return event.world_size <= world_size
        case Joining():
            return max((*event.joined, *event.missing), default=0) < world_size
        case NodeSample():
            named = [event.node, *(each.rank for each in event.ranks), *(gpu.rank or 0 for gpu in event.gpus)]
            return max(named) < world_size
        case RankState():
            return max(event.rank, event.node or 0) < world_size
    return (getattr(event, "rank", None) or 0) < world_size
