"""Rules of the Trace Event Format in Perfetto's JSON importer, which drops events that break one."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

PHASES = frozenset("MXi")
LARGEST_ID = 2**32 - 1
"""Largest process or thread number: the importer reads 32 bits."""


def threads_of(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Check the rules, and return the slices of each thread by process and thread number."""
    assert isinstance(trace["traceEvents"], list)
    threads: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    processes, thread_names, named_processes = set(), {}, set()
    for event in trace["traceEvents"]:
        assert event["ph"] in PHASES
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event.get("args", {}), dict)
        for number in (event["pid"], event["tid"]):
            assert type(number) is int
            assert 0 <= number <= LARGEST_ID
        assert type(event["ts"]) in (int, float)
        assert event["ts"] >= 0
        if event["ph"] == "M":
            assert event["ts"] == 0, "metadata must precede the events of its thread"
            if event["name"] == "process_name":
                assert event["pid"] not in named_processes
                named_processes.add(event["pid"])
            if event["name"] == "thread_name":
                thread_names[event["pid"], event["tid"]] = event["args"]["name"]
            if event["name"] in ("process_name", "thread_name"):
                assert isinstance(event["args"]["name"], str)
                assert event["args"]["name"]
            continue
        processes.add(event["pid"])
        if event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
            continue
        assert type(event["dur"]) in (int, float)
        assert event["dur"] >= 0
        threads[event["pid"], event["tid"]].append(event)
    assert processes <= named_processes
    assert thread_names.keys() == threads.keys()
    for slices in threads.values():
        _require_nested(slices)
    return threads


def _require_nested(slices: list[dict[str, Any]]) -> None:
    """Check that slices, in nanoseconds, are nested or disjoint, and that outer slices precede inner ones."""
    open_ends: list[int] = []
    # Stable: slices with equal starts keep the order of the file, as in the importer.
    for event in sorted(slices, key=lambda event: int(event["ts"] * 1000)):
        begin, end = int(event["ts"] * 1000), int(event["ts"] * 1000) + int(event["dur"] * 1000)
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], f"{event} ends after the slice around it"
        open_ends.append(end)
