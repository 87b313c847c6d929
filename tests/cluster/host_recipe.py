"""A recipe for CPU ranks on several hosts, small enough to train within a second."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]

ENVIRON = os.environ | {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": f"{TESTS / 'support'}:{TESTS / 'cluster'}",
}
"""With it ``python`` and ``gputrain`` are those that run the tests, and the task can be imported."""

TRAIN = {
    "task": "host_task:HostTask",
    "batch_size": 4,
    "max_updates": 5,
    "threads": 1,
    "save_every_epochs": 0,
    "valid_every_epochs": 0,
    "distributed_timeout": 60,
    "join_timeout": 60,
}
TASK = {"samples": 200}
ENDLESS = {"max_updates": 100_000_000, "stop_time": 5.0}
"""Of the training: longer than any test waits, and ended also where no test is left to end it."""
PAUSE_S = 0.02
"""Of a step of such a training, which would take all cores from the tests beside, while its own waits."""


def recipe(
    hosts: Sequence[str | None], ranks: Sequence[int], *, task: Mapping[str, Any] | None = None, **train: Any
) -> str:
    """Return the recipe's text.

    Args:
        hosts: names or addresses; None for a node without one.
        ranks: of each host.
        task: options of the task.
        train: options of the training.
    """
    lines = ['name = "several hosts"']
    paced = {"pause_s": PAUSE_S} if train.get("max_updates") == ENDLESS["max_updates"] else {}
    for table, values in (("train", TRAIN | train), ("task", TASK | paced | dict(task or {}))):
        lines += [f"[{table}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    return "\n".join([*lines, *_nodes(hosts, ranks)]) + "\n"


def as_process(command: str) -> str:
    """Return a command of ``gputrain plan --shell`` for a shell that it replaces: a signal to that reaches it."""
    folder, _, words = command.removeprefix("(").removesuffix(")").partition(" && ")
    return f"{folder} && exec {words}"


def torch_free_recipe(hosts: Sequence[str | None], ranks: Sequence[int], *lines: str, steps: int = 0) -> str:
    """Return a recipe of ranks without torch, for a test of what is around a training; lines of its ``[cluster]``.

    Args:
        hosts: names or addresses; None for a node without one.
        ranks: of each host.
        lines: of ``[cluster]``.
        steps: of each rank; 0: until a signal ends it.
    """
    script = json.dumps(str(TESTS / "support" / "torch_free_rank.py"))
    args = f'\nargs = ["{steps}"]' if steps else ""
    return script_recipe(hosts, ranks, f"[train]\nscript = {script}{args}", *lines)


def script_recipe(hosts: Sequence[str | None], ranks: Sequence[int], train: str, *lines: str) -> str:
    """Return a recipe with this table of a script and lines of its ``[cluster]``."""
    text = ['name = "several hosts"', train, *(["[cluster]", *lines] if lines else [])]
    return "\n".join([*text, *_nodes(hosts, ranks)]) + "\n"


def _nodes(hosts: Sequence[str | None], ranks: Sequence[int]) -> list[str]:
    lines = []
    for host, count in zip(hosts, ranks, strict=True):
        lines += ["[[cluster.nodes]]", *([f"host = {json.dumps(host)}"] if host else []), f"cpu_ranks = {count}"]
    return lines


def flags(**train: Any) -> list[str]:
    """Return the same as words for ``python -m trainer``."""
    values = TRAIN | TASK | train
    return [word for name, value in values.items() for word in ("--" + name.replace("_", "-"), str(value))]


def events(record: Path, rank: int | str) -> list[dict[str, Any]]:
    """What a rank has recorded, or the ``run`` itself."""
    path = record / "events" / f"{rank}.ndjson"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def is_training(record: Path, rank: int) -> bool:
    path = record / "events" / f"{rank}.ndjson"
    return path.exists() and b'"type":"step"' in path.read_bytes()


def check_rank(record: Path, rank: int, *, host: str, node: int, local_rank: int, interface: str) -> str:
    """Hold a rank's record against what it was to do, to the end; return the checksum of its parameters."""
    found = events(record, rank)
    states = [event for event in found if event["type"] == "rank_state"]
    assert states[-1]["state"] == "finished"
    assert {(state["host"], state["node"], state["local_rank"]) for state in states} == {(host, node, local_rank)}
    assert sum(event.get("steps", 1) for event in found if event["type"] == "step") == TRAIN["max_updates"]
    assert f"rank {rank} on {host} takes {interface}\n" in (record / "logs" / f"{rank}.log").read_text()
    return str([event["parameters"] for event in found if event["type"] == "checksum"][-1])


def check_epoch(
    record: Path,
    hosts: Sequence[str],
    interfaces: Mapping[str, str],
    *,
    samples: int,
    save_every: int,
    before: int = 0,
) -> int:
    """Since its last start each rank is on its host; all samples after the checkpoint are trained once, equally.

    ``before``: the number of ranks until then, if there were more. Return how many steps were made again.
    """
    checksums, trained, before, again = set(), 0, before or len(hosts), 0
    batch = TRAIN["batch_size"]
    for rank, host in enumerate(hosts):
        found = events(record, rank)
        begin = max(index for index, event in enumerate(found) if event.get("state") == "joining")
        assert found[begin].get("host", host) == host
        assert f"rank {rank} on {host} takes {interfaces[host]}\n" in (record / "logs" / f"{rank}.log").read_text()
        steps = [event for event in found[begin:] if event["type"] == "step"]
        resumed = steps[0]["step"] - steps[0].get("steps", 1)
        left = samples - resumed * batch * before
        assert steps[-1]["step"] == resumed + left / batch / len(hosts)
        reached = max(event["step"] for event in found[:begin] if event["type"] == "step")
        assert reached - resumed <= 2 * save_every, "it is resumed from the newest checkpoint"
        assert resumed >= save_every
        assert resumed % save_every == 0
        assert sum(event.get("steps", 1) for event in steps) == steps[-1]["step"] - resumed
        trained += sum(event["samples"] for event in steps)
        checksums.add(str([event["parameters"] for event in found if event["type"] == "checksum"][-1]))
        again = max(again, reached - resumed)
    planned = [event for event in events(record, 0) if event["type"] == "training_plan"][-1]
    assert planned["last_update"] == steps[-1]["step"], "what is left is known from the first step on"
    assert trained + resumed * batch * before == samples
    assert len(checksums) == 1
    return again
