"""Functions of a host for a node of a run: start or rejoin it, send its record, stop it.

A *session* is one connection that serves a node. The node's agent (``host_agent``) outlives it, and any later session,
of this supervisor or of another one, continues where the last one broke off. Standard library only, since this file is
sent to the host.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gputrain_tui.hosts.host_agent import (
    EXIT,
    TOKEN,
    await_agent,
    home_folder,
    identity_of,
    is_alive,
    read_object,
    send_signals,
    start_agent,
    write_heartbeat,
)
from gputrain_tui.hosts.host_frames import MAX_DATA_BYTES, HostFrame, RefusedCallError, frame
from trainer.contract.stop_level import StopLevel
from trainer.host.ports import free_port as find_free_port
from trainer.host.stop_request import signal_of

if TYPE_CHECKING:
    from gputrain_tui.hosts.host_program import CallServer

POLL_S = 0.5
"""Interval at which a session sends the growth of the record; each costs the launching side time per rank."""
BROKEN_S = 0.3
"""Time in which the ssh server of a broken connection ends."""
PART_BYTES = 1 << 18
ROUND_BYTES = 1 << 20
"""Most bytes of the record that are sent before calls are answered again."""
DISK_STANDS = "disk_stands"
"""Kind of the frame that says, once a second, that the disk keeps the session from answering a beat."""
RECORD_FILE = re.compile(r"(?:events|logs|digest)/[A-Za-z0-9._-]{1,255}")


def is_of_node(name: str, node: int, ranks: Sequence[int]) -> bool:
    """Whether one of a node's processes writes a file of the run directory, given as ``folder/file``."""
    if not RECORD_FILE.fullmatch(name):
        return False
    folder, _, file = name.partition("/")
    if not file.endswith(".log" if folder == "logs" else ".ndjson"):
        return False
    if file.startswith("machine-"):
        return True
    writer = file.partition(".")[0]
    return writer == f"node-{node}" or (writer.isdecimal() and int(writer) in ranks)


def replaced_files(node: int, ranks: Sequence[int]) -> list[str]:
    """Return the files of a node's processes that are replaced as a whole: their last collectives and the outcome."""
    collectives = [f"logs/collectives_{rank}{suffix}" for rank in ranks for suffix in ("", ".json")]
    return [*collectives, *gap_files(ranks), f"nodes/{node}.json"]


def gap_files(ranks: Sequence[int]) -> list[str]:
    """Return the files in which ranks tell what their event files lack."""
    return [f"gaps/{rank}.json" for rank in ranks]


def free_port(_: CallServer, __: Mapping[str, Any]) -> int:
    """Return a free port of this host, for the rendezvous of a run whose first node it has."""
    return find_free_port()


def node(server: CallServer, request: Mapping[str, Any]) -> int:
    """Start a node unless that was done before, send its record as it grows, and return its exit code."""
    call, session = server.call, Session(server, request)
    server.held.close()
    if request["start"]:
        session.extend_record(request["torn"])
        start_agent(session.folder, session.run_dir, request)
    agent = session.agent = await_agent(session.folder)
    server.node_runs = True
    server.limit_life()
    server.at_end = session.end
    server.of_node = {"beat": session.beat, "stop": session.stop, "stacks": session.stacks}
    started = {"shared": session.shared, "run_dir": str(session.run_dir), "agent": agent}
    server.send(frame(call, "started", started))
    while True:
        code = session.exit_code()  # read before the record, so that all of an ended node's record is sent
        if code is not None and server.node_runs:
            server.node_runs = False
            server.limit_life()
        frames, size = session.growth(call)
        server.send(*frames)
        if code is not None and not frames:
            server.of_node, server.at_end = {}, lambda: None
            if session.cut_off:
                raise RefusedCallError("it heard no more of the launching side, and so it ended its ranks")
            return code
        server.serve(POLL_S if code is None and size < ROUND_BYTES else 0)


class Session:
    """A node, and how much of its record this connection has sent."""

    def __init__(self, server: CallServer, request: Mapping[str, Any]) -> None:
        """Find the run directory: the launching side's path if its token is visible there, else one in this home."""
        self._server = server
        self.agent: dict[str, Any] = {}
        """Identity of the agent's process and, as ``node``, of the node's; empty until it is known."""
        self._leased: bool = request["leased"]
        path = Path(request["run_dir"])
        self.shared = (path / "agents" / request["attempt"] / TOKEN).exists()
        self.run_dir = path if self.shared else home_folder(request) / "runs" / path.name
        self.folder = self.run_dir / "agents" / request["attempt"]
        self._node: int = request["node"]
        self._ranks: list[int] = request["ranks"]
        self._sizes: dict[str, int] = dict(request["sizes"])
        self._replaced: dict[str, tuple[int, int]] = {}
        """Modification time in ns and size of each replaced file when it was last sent."""
        self._stop_level = StopLevel.NONE
        self.cut_off = False
        """Whether the agent has ended the node, as the launching side was not heard of for too long."""
        self._ssh_server = identity_of(os.getppid())
        """The process that serves this connection, or a shell that it has started."""

    def extend_record(self, torn: Collection[str]) -> None:
        """Give the node's files here the sizes that they have on the launching side, where the record is whole.

        On a host that takes the place of a lost one they are shorter. The offsets of what it appends are then those of
        the one record; what is before them is a hole here. ``torn`` are files whose last line is not complete.
        """
        if self.shared:
            return
        for name, size in self._sizes.items():
            path = self.run_dir / name
            if size and not path.name.startswith("machine-") and (not path.exists() or path.stat().st_size < size):
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with path.open("ab") as file:
                    file.truncate(size - 1)
                    file.write(b"\0" if name in torn else b"\n")

    # --- calls --------------------------------------------------------------------------------------------------

    def beat(self, _: Mapping[str, Any]) -> str:
        """Record a beat; return why the run directory cannot be written, empty if it can or where ranks tell it."""
        is_written = threading.Event()
        thread = threading.Thread(target=self._tell_standstill, args=(is_written,), daemon=True)
        thread.start()
        try:
            write_heartbeat(self.folder, leased=self._leased)
        except OSError as error:  # the node goes on while its ranks make steps
            told = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOENT)
            return "" if told else error.strerror or "it refuses to be written"
        finally:
            is_written.set()
            thread.join()  # of both only one may send
        return ""

    def _tell_standstill(self, is_written: threading.Event) -> None:
        """Say once a second that a write does not end; this thread alone sends meanwhile."""
        with suppress(OSError):  # the connection has ended, which the main thread sees as well
            while not is_written.wait(1.0):
                self._server.send(frame(self._server.call, DISK_STANDS))

    def end(self) -> None:
        """Tell the agent that the launching side is gone, unless the connection broke, and with it the ssh server."""
        time.sleep(BROKEN_S)
        if is_alive(self._ssh_server):
            with suppress(OSError):
                write_heartbeat(self.folder, leased=self._leased, gone=True)

    def stop(self, request: Mapping[str, Any]) -> None:
        """Send the node a stop request of a higher level than before, or end its agent and with it the node."""
        level = StopLevel(request["level"])
        if level > self._stop_level:
            self._stop_level = level
            if level >= StopLevel.KILL:
                send_signals(self.agent, signal.SIGTERM)
            else:
                send_signals(self.agent["node"], signal_of(level), signal.SIGCONT)

    def stacks(self, request: Mapping[str, Any]) -> None:
        """Pass a request for the stacks of all ranks on to the node agent."""
        with suppress(OSError):
            (self.run_dir / "stack_request").write_text(request["request"])

    # --- the node -----------------------------------------------------------------------------------------------

    def exit_code(self) -> int | None:
        alive = is_alive(self.agent) or is_alive(self.agent["node"])
        ended = read_object(self.folder / EXIT)  # read last: a process that has ended wrote it before
        if ended is not None:
            self.cut_off = ended["cut_off"]
            return int(ended["code"])
        if not alive and not self.folder.exists():
            raise RefusedCallError(f"the run directory {self.run_dir} was deleted there during the run")
        return None if alive else -signal.SIGKILL

    # --- the record ---------------------------------------------------------------------------------------------

    def growth(self, call: int) -> tuple[list[HostFrame], int]:
        """Return new parts of the node's files, and their bytes; nothing if the launching side shares them."""
        if self.shared:
            return [], 0
        total = 0
        frames = []
        # Digests are listed first and sent last: the launching side has no digest of events that it does not have yet.
        found = [(name, size) for folder in ("digest", "events", "logs") for name, size in self._files(folder)]
        for name, size in reversed(found):
            begin = self._sizes.get(name, 0)
            if name not in self._sizes and not size:
                frames.append(frame(call, "file", name=name))
            while begin < size and total < ROUND_BYTES:
                data = _part(self.run_dir / name, begin, min(size - begin, PART_BYTES))
                if not data:
                    break
                frames.append(frame(call, "file", data, name=name, offset=begin))
                begin += len(data)
                total += len(data)
            self._sizes[name] = begin
        # While the record grows only its gaps are sent: what replaces other files belongs to the whole of it.
        for name in gap_files(self._ranks) if total else replaced_files(self._node, self._ranks):
            if self._is_replaced(name):
                data = _part(self.run_dir / name, 0, MAX_DATA_BYTES)
                if data.strip() or not name.startswith("gaps/"):
                    frames.append(frame(call, "whole", data, name=name))
        return frames, total

    def _is_replaced(self, name: str) -> bool:
        try:
            stat = (self.run_dir / name).stat()
        except OSError:
            return False
        state = stat.st_mtime_ns, stat.st_size
        if state == self._replaced.get(name) or stat.st_size > MAX_DATA_BYTES:
            return False
        self._replaced[name] = state
        return True

    def _files(self, folder: str) -> Iterator[tuple[str, int]]:
        try:
            with os.scandir(self.run_dir / folder) as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}"
                    if is_of_node(name, self._node, self._ranks):
                        yield name, entry.stat().st_size
        except OSError:
            return


def _part(path: Path, begin: int, count: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(count)
    except OSError:
        return b""
