"""Slurm's host lists and task counts, expanded without ``scontrol``, which containers lack."""

from __future__ import annotations

import itertools
import re

from trainer.contract.errors import RequestError

MAX_HOSTS = 100_000
"""Maximum hosts of a list, more than any cluster has: a longer range is a typo."""


def expand(hostlist: str) -> list[str]:
    """Expand ``n[1-2,5],gpu[01-03]`` to its host names, in order; keep leading zeros.

    Raises:
        RequestError: the text is not a host list.
    """
    hosts: list[str] = []
    for entry in _split(hostlist):
        parts = re.split(r"\[([^\[\]]*)\]", entry)
        if any(mark in text for text in parts[::2] for mark in "[]"):
            raise RequestError(f"host list {hostlist!r} has an unmatched bracket")
        # re.split alternates plain text and the content of brackets.
        choices = [[part] if index % 2 == 0 else _numbers(part, hostlist) for index, part in enumerate(parts)]
        hosts += ["".join(combination) for combination in itertools.product(*choices)]
        if len(hosts) > MAX_HOSTS:
            raise RequestError(f"host list {hostlist!r} names more than {MAX_HOSTS} hosts")
    if not hosts:
        raise RequestError("the host list is empty")
    return hosts


def _split(hostlist: str) -> list[str]:
    """Split at the commas outside brackets."""
    return [entry.strip() for entry in re.split(r",(?![^\[]*\])", hostlist) if entry.strip()]


def _numbers(ranges: str, hostlist: str) -> list[str]:
    numbers: list[str] = []
    for item in ranges.split(","):
        low, dash, high = item.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or (dash and int(high) < int(low)):
            raise RequestError(f"host list {hostlist!r} has {item.strip()!r} instead of a number or a range")
        count = int(high or low) - int(low) + 1
        if count > MAX_HOSTS:
            raise RequestError(f"host list {hostlist!r} names more than {MAX_HOSTS} hosts")
        numbers += [str(int(low) + offset).zfill(len(low)) for offset in range(count)]
    return numbers


def task_counts(text: str) -> list[int]:
    """Expand ``4(x2),2`` to ``[4, 4, 2]``: the tasks of each node, in the order of the host list.

    Raises:
        RequestError: the text is not a list of task counts.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:\(x(\d+)\))?\s*", item)
        if match is None or int(match[2] or 1) > MAX_HOSTS:
            raise RequestError(f"tasks per node {text!r} should look like '4(x2),2'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
