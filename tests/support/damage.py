"""Damage to a run directory: a file of it is removed, replaced by another file type, or gets other content."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import synthetic
from hypothesis import strategies as st

from gputrain_tui.history.run_folders import Run
from gputrain_tui.history.status_file import write_status
from trainer.host.process_identity import identify

FILES = (
    "status.json", "plan.json", "recipe.toml", "attempt.json", "mark", "supervisor.lock",
    "events", "events/run.ndjson", "events/0.ndjson", "events/1.ndjson", "events/node-0.ndjson", "events/².ndjson",
    "logs", "logs/0.log", "logs/node-0.log", "logs/supervisor.log", "logs/\x1b[2J.log", "logs/².log",
    "digest", "digest/0.16.ndjson", "digest/0.notes.ndjson",
    "nodes", "nodes/0.json", "checkpoints", "checkpoints/step_00000020.pt", "tmp",
)  # fmt: skip
ENDLESS_BYTES = 1 << 40
ESCAPE = "\x1b]52;c;AAAA\x07\x1b[2J\x9b31m\n\x00"
NUMBERS = (
    -1, 0, 2, 255, 65_535, 10**9, 2**31, 2**53, 2**63 - 1, 2**63, 10**17, 10**30, -(10**9), 1e17, 1e99, 1e300, -1e300,
)  # fmt: skip
RAW_NUMBERS = (b"1e999", b"9" * 5000, b"NaN")


@dataclass(frozen=True)
class Damage:
    """Damage to one file."""

    name: str
    kind: str
    value: Any = None

    def __call__(self, run_dir: Path) -> None:
        path = run_dir / self.name
        content = path.read_bytes() if path.is_file() else b""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if self.kind != "missing" and path.parent.is_dir():
            MAKE[self.kind](path, content, self.value)


def _number(path: Path, content: bytes, choice: tuple[int, Any]) -> None:
    """Replace one number of a file."""
    index, value = choice
    if isinstance(value, bytes):
        path.write_bytes(_changed(content, index, 987_654_321, (int, float)).replace(b"987654321", value))
    else:
        path.write_bytes(_changed(content, index, value, (int, float)))


def _changed(content: bytes, index: int, value: Any, kinds: tuple[type, ...]) -> bytes:
    """Return JSON lines with one value of the given types replaced."""
    try:
        lines = [json.loads(line) for line in content.splitlines()]
    except ValueError:
        return content + str(value).encode()
    places: list[tuple[Any, Any]] = []

    def walk(holder: Any, key: Any) -> None:
        found = holder[key]
        if isinstance(found, dict | list):
            for inner in list(found) if isinstance(found, dict) else range(len(found)):
                walk(found, inner)
        elif type(found) in kinds:
            places.append((holder, key))

    for line in range(len(lines)):
        walk(lines, line)
    if places:
        holder, key = places[index % len(places)]
        holder[key] = value
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def _fifo(path: Path, content: bytes, _: Any) -> None:
    os.mkfifo(path)


def _endless(path: Path, content: bytes, _: Any) -> None:
    path.touch()
    os.truncate(path, 1 << 20 if path.suffix == ".log" else ENDLESS_BYTES)  # a log is printed to its end


def _link(path: Path, content: bytes, target: str) -> None:
    path.symlink_to(path.name if target == "itself" else target)


MAKE: dict[str, Callable[[Path, bytes, Any], object]] = {
    "bytes": lambda path, _, value: path.write_bytes(value),
    "number": _number,
    "text": lambda path, content, index: path.write_bytes(_changed(content, index, ESCAPE, (str,))),
    "fifo": _fifo,
    "folder": lambda path, *_: path.mkdir(),
    "link": _link,
    "endless": _endless,
}

ODD_BYTES = (b"", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"null\n", b"{}\n", b"\0" * 5000, ESCAPE.encode())

damages = st.one_of(
    st.builds(Damage, st.sampled_from(FILES), st.sampled_from(("missing", "fifo", "folder", "endless"))),
    st.builds(
        Damage,
        st.sampled_from(FILES),
        st.just("link"),
        st.sampled_from(("/dev/zero", "itself", "/proc/self/mem", "/dev/tty", "/nowhere", "/")),
    ),
    st.builds(
        Damage, st.sampled_from(FILES), st.just("bytes"), st.one_of(st.sampled_from(ODD_BYTES), st.binary(max_size=99))
    ),
    st.builds(
        Damage,
        st.sampled_from([name for name in FILES if name.endswith("json")]),
        st.just("number"),
        st.tuples(st.integers(0, 400), st.sampled_from((*NUMBERS, *RAW_NUMBERS))),
    ),
    st.builds(
        Damage, st.sampled_from([name for name in FILES if name.endswith("json")]), st.just("text"), st.integers(0, 60)
    ),
)


def lost_run(root: Path) -> Run:
    """Write a run whose supervisor was killed, which `stop` adopts; it cannot train, because its data is missing."""
    run = synthetic.run(root, steps=40, status="running", straggler=1)
    gone = identify()
    run.status.supervisor = type(gone)(pid=2**22 + 1, start_ticks=1, boot_id=gone.boot_id, host=gone.host)
    write_status(run.dir, run.status)
    path = run.dir.path
    run.dir.recipe.write_text(
        'name = "demo"\n[[cluster.nodes]]\ncpu_ranks = 2\n[train]\ntask = "lm"\nmax_updates = 50\n'
        '[task]\ndata = "/nowhere/at/all.txt"\n'
    )
    run.dir.digest.mkdir(exist_ok=True)
    supervisor = json.loads(run.dir.status.read_bytes())["supervisor"]
    _dump(run.dir.attempt, {"since": {"0.ndjson": 0}, "processes": {"0": supervisor}, "tmp": str(run.dir.path)})
    _dump(run.dir.node_result(0), {"node": 0, "host": "localhost", "exit_code": 130, "stopped_at": 40, "saved": "a.pt"})
    (run.dir.checkpoints / "step_00000020.pt").write_bytes(b"no checkpoint")
    (path / "mark").write_text(f"GPUTRAIN_RUN={path}")
    block = {"type": "steps", "time": 1.8e9, "rank": 0, "step": 16, "epoch": 1, "steps": 16, "samples": 256, "begin": 0}
    size = run.dir.rank_events(0).stat().st_size
    lines = run.dir.rank_events(0).read_bytes()[: size // 2]
    _dump(run.dir.digest / "0.16.ndjson", {**block, "end": lines.rfind(b"\n") + 1, "loss": 2.0})
    lost = {"type": "lost", "time": 1, "events": 1, "message": ""}
    _dump(run.dir.digest / "0.notes.ndjson", {"begin": 0, "event": lost})
    return run


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value) + "\n")
