"""Exchanges how many ranks each node of a Slurm step starts, which Slurm does not know where the nodes' GPUs differ.

Node 0 listens; every other node reports its count and is answered with the counts of all, or with who is missing.

Each line ends with its HMAC under the key of the step (``slurm.step_key``), and a line without it is dropped. That
keeps out port scans, tasks of other jobs and of earlier steps, and whoever can ask Slurm nothing about the job. It does
not keep out root, the job's own user, whoever reads the traffic and repeats a line, nor another user of the cluster who
asks Slurm about the job and tries all ports on which its srun may listen: Slurm gives a step nothing that is secret
from these. The process group that follows takes any connection, so more protection here would gain nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.contract.errors import RequestError, TrainingError
from trainer.environments.decision import CountExchange

REPORT_BYTES = 256
"""Longest line that a node's report can be."""
REPORT_S = 10.0
"""How long a connection may take to report, and node 0 to acknowledge it."""
CONNECT_S = 5.0
"""How long a connection may take to be made, and a line to be sent."""
MOST_UNVERIFIED = 128
"""Connections without a valid report that are kept; a further one takes the place of the oldest."""
GRACE_S = 2.0
"""How much longer than node 0 the others wait, so that they get its answer with the missing nodes."""


def exchange_counts(exchange: CountExchange, count: int, *, timeout_s: float) -> list[int]:
    """Report how many ranks start here and return the counts of all nodes, in their order.

    Raises:
        RequestError: node 0 cannot listen.
        TrainingError: a node did not report in time; the message names it.
    """
    deadline = time.monotonic() + timeout_s
    if exchange.node == 0:
        return _Collector(exchange, count, timeout_s).collect(deadline)
    return _report(exchange, count, deadline, timeout_s)


def _signed(exchange: CountExchange, *words: object) -> bytes:
    text = " ".join(map(str, words)).encode()
    return text + b" " + _signature(exchange, text) + b"\n"


def _verified(exchange: CountExchange, line: bytes) -> list[str]:
    """Return the words of a line that was signed with the key of the step; none of any other."""
    text, _, signature = line.rstrip(b"\n").rpartition(b" ")
    if not hmac.compare_digest(signature, _signature(exchange, text)):
        return []
    return text.decode().split()


def _signature(exchange: CountExchange, text: bytes) -> bytes:
    return hmac.new(exchange.key.encode(), text, "sha256").hexdigest().encode()


# --- node 0 ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Peer:
    connection: socket.socket
    address: str
    until: float
    """When it is dropped unless it has reported, monotonic seconds."""
    received: bytes = b""
    node: int | None = None
    """Which node it is; None before it has reported."""


class _Collector:
    """Node 0: reads all connections at once, so that none can hold up the others."""

    def __init__(self, exchange: CountExchange, count: int, timeout_s: float) -> None:
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._counts = {0: count}
        self._peers: list[_Peer] = []
        """In the order in which they came."""
        self._refused: dict[str, int] = {}
        """Connections without a valid report, by address."""
        self._selector = selectors.DefaultSelector()

    def collect(self, deadline: float) -> list[int]:
        """Listen until all nodes have reported, and answer them."""
        nodes = range(self._exchange.nodes)
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            server = stack.enter_context(_listen(self._exchange.port))
            self._selector.register(server, selectors.EVENT_READ, None)
            while len(self._counts) < len(nodes):
                now = time.monotonic()
                if now >= deadline:
                    missing = [node for node in nodes if node not in self._counts]
                    self._answer("missing", *missing)
                    raise TrainingError(_missing(missing, self._timeout_s) + self._describe_refused())
                self._wait(server, min([deadline, *(peer.until for peer in self._peers if peer.node is None)]) - now)
            counts = [self._counts[node] for node in nodes]
            self._answer("counts", *counts)
            return counts

    def _wait(self, server: socket.socket, seconds: float) -> None:
        for key, _ in self._selector.select(max(seconds, 0.0)):
            if key.data is None:
                self._accept(server)
            elif key.data in self._peers:  # not dropped for another one since
                self._read(key.data)
        now = time.monotonic()
        for peer in [peer for peer in self._peers if peer.node is None and peer.until <= now]:
            self._refuse(peer)

    def _accept(self, server: socket.socket) -> None:
        try:
            connection, address = server.accept()
        except OSError:
            return  # gone again
        connection.setblocking(False)
        peer = _Peer(connection, address[0], time.monotonic() + REPORT_S)
        unverified = [other for other in self._peers if other.node is None]
        if len(unverified) >= MOST_UNVERIFIED:
            self._refuse(unverified[0])
        self._peers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> None:
        try:
            part = peer.connection.recv(REPORT_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if peer.node is not None:
            if not part:  # it ended, or will come again
                del self._counts[peer.node]
                self._drop(peer)
            return
        peer.received += part
        line, newline, _ = peer.received.partition(b"\n")
        if newline and self._accept_report(peer, line):
            return
        if newline or not part or len(peer.received) >= REPORT_BYTES:
            self._refuse(peer)

    def _accept_report(self, peer: _Peer, line: bytes) -> bool:
        """Take a report; return False when it is none of this step."""
        words = _verified(self._exchange, line)
        if len(words) != 3 or words[0] != "count":
            return False
        peer.node = int(words[1])
        for earlier in [other for other in self._peers if other.node == peer.node and other is not peer]:
            self._drop(earlier)
        self._counts[peer.node] = int(words[2])
        with contextlib.suppress(OSError):
            peer.connection.send(_signed(self._exchange, "heard", peer.node))
        return True

    def _refuse(self, peer: _Peer) -> None:
        self._refused[peer.address] = self._refused.get(peer.address, 0) + 1
        self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        self._peers.remove(peer)
        peer.connection.close()

    def _answer(self, *words: object) -> None:
        line = _signed(self._exchange, *words)
        for peer in self._peers:
            if peer.node is not None:
                peer.connection.settimeout(CONNECT_S)  # far more than such a line ever takes
                with contextlib.suppress(OSError):
                    peer.connection.sendall(line)

    def _describe_refused(self) -> str:
        """Describe the connections that were not of this step; they may be nodes with another environment."""
        if not self._refused:
            return ""
        some = ", ".join(list(self._refused)[:4]) + (", ..." if len(self._refused) > 4 else "")
        return f"; connections that were not of this Slurm step: {sum(self._refused.values())}, from {some}"

    def _close(self) -> None:
        for peer in self._peers:
            peer.connection.close()
        self._selector.close()


def _listen(port: int) -> socket.socket:
    try:
        server = socket.create_server(("", port), backlog=2048)
    except OSError as error:
        raise RequestError(
            f"node 0 cannot listen on port {port} to hear how many GPUs the other nodes have ({error.strerror}): "
            "choose another pair of ports with --distributed-port"
        ) from None
    server.setblocking(False)
    return server


def _missing(nodes: list[int], timeout_s: float) -> str:
    return f"nodes {nodes} did not come within {timeout_s:g} s to tell their GPUs"


# --- the other nodes ------------------------------------------------------------------------------------------------


def _report(exchange: CountExchange, count: int, deadline: float, timeout_s: float) -> list[int]:
    where = f"node 0 ({exchange.host}, port {exchange.port})"
    reason = "its task has not started, or the port is blocked"
    replied = False
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((exchange.host, exchange.port), timeout=min(left, CONNECT_S)) as connection:
                connection.sendall(_signed(exchange, "count", exchange.node, count))
                for words in _replies(connection, exchange, deadline):
                    replied = True
                    if words[0] == "counts":
                        return [int(word) for word in words[1:]]
                    if words[0] == "missing":
                        raise TrainingError(_missing([int(word) for word in words[1:]], timeout_s))
            reason = "what answers there is not node 0 of this Slurm step"
        except TimeoutError:
            if not replied:
                reason = "its machine or what listens there does not answer"
        except OSError as error:
            if error.errno not in (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE):
                reason = error.strerror or str(error)
        time.sleep(min(0.1, max(deadline - time.monotonic(), 0.0)))
    if replied:
        raise TrainingError(f"{where} waited {timeout_s:g} s for the GPU counts of other nodes and lacks some")
    raise TrainingError(f"{where} did not answer within {timeout_s:g} s: {reason}")


def _replies(connection: socket.socket, exchange: CountExchange, deadline: float) -> Iterator[list[str]]:
    """Yield the words of each line of node 0, up to the first one that is not of it.

    Raises:
        TimeoutError: it did not acknowledge the report soon, or did not answer in time.
    """
    limit = REPORT_BYTES + 12 * exchange.nodes
    received = b""
    until = min(time.monotonic() + REPORT_S, deadline)
    while len(received) < limit:
        connection.settimeout(max(until - time.monotonic(), 0.001))
        part = connection.recv(limit)
        if not part:
            return
        received += part
        while b"\n" in received:
            line, _, received = received.partition(b"\n")
            words = _verified(exchange, line)
            if not words:
                return
            yield words
            until = deadline + GRACE_S
