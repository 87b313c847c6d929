"""Exchange of the number of ranks that each node of a Slurm step starts, for nodes with unequal numbers of GPUs.

Node 0 listens; every other node reports its count and gets the counts of all nodes, or a list of the missing ones.

Each line ends with its HMAC under the key of the step (``slurm.step_key``), and a line without it is dropped. That
keeps out port scans, tasks of other jobs and of earlier steps, and users who cannot query the job from Slurm. It does
not keep out root, the job's own user, an attacker who reads the traffic and replays a line, or a user of the cluster
who queries the job from Slurm and tries all ports of its srun: Slurm gives a step no secret that is hidden from these.
The process group that follows accepts any connection, so more protection here would gain nothing.
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
"""Maximum length of a node's report."""
REPORT_S = 10.0
"""Time-out of connecting, of a connection until its report, of a line, and of node 0 until its acknowledgement."""
MAX_UNVERIFIED = 128
"""Maximum connections without a valid report; a further one replaces the oldest."""
GRACE_S = 2.0
"""Time that the other nodes wait longer than node 0, so that they get its list of missing nodes."""


def exchange_counts(exchange: CountExchange, count: int, *, timeout_s: float) -> list[int]:
    """Report the number of ranks of this node and return the counts of all nodes, in their order.

    Raises:
        RequestError: node 0 cannot listen.
        TrainingError: a node did not report in time; the message names it.
    """
    deadline = time.monotonic() + timeout_s
    if exchange.node == 0:
        return _Collector(exchange, count, timeout_s).collect(deadline)
    return _report(exchange, count, deadline, timeout_s)


def _signed(exchange: CountExchange, message: str, *numbers: int) -> bytes:
    text = " ".join([message, *map(str, numbers)]).encode()
    return text + b" " + _signature(exchange, text) + b"\n"


def _verified(exchange: CountExchange, line: bytes) -> tuple[str, list[int]]:
    """Return the message of a line that was signed with the key of the step, and its numbers; empty for other lines."""
    text, _, signature = line.rstrip(b"\n").rpartition(b" ")
    if not hmac.compare_digest(signature, _signature(exchange, text)):
        return "", []
    message, *numbers = text.decode().split()
    return message, list(map(int, numbers))


def _signature(exchange: CountExchange, text: bytes) -> bytes:
    return hmac.new(exchange.key.encode(), text, "sha256").hexdigest().encode()


# --- node 0 ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Peer:
    connection: socket.socket
    address: str
    until: float
    """Time at which it is dropped if it has not reported, monotonic seconds."""
    received: bytes = b""
    node: int | None = None
    """Index of its node; None before its report."""


class _Collector:
    """Server on node 0; it reads all connections at once, so that none can delay the others."""

    def __init__(self, exchange: CountExchange, count: int, timeout_s: float) -> None:
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._counts = {0: count}
        self._peers: list[_Peer] = []
        """Open connections, oldest first."""
        self._refused: dict[str, int] = {}
        """Number of connections without a valid report, by address."""
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
                    self._answer("missing", missing)
                    raise TrainingError(_missing_message(missing, self._timeout_s) + self._refused_message())
                self._wait(server, min([deadline, *(peer.until for peer in self._peers if peer.node is None)]) - now)
            counts = [self._counts[node] for node in nodes]
            self._answer("counts", counts)
            return counts

    def _wait(self, server: socket.socket, seconds: float) -> None:
        for key, _ in self._selector.select(max(seconds, 0.0)):
            if key.data is None:
                self._accept(server)
            elif key.data in self._peers:  # not replaced by another one meanwhile
                self._read(key.data)
        now = time.monotonic()
        for peer in [peer for peer in self._peers if peer.node is None and peer.until <= now]:
            self._refuse(peer)

    def _accept(self, server: socket.socket) -> None:
        try:
            connection, address = server.accept()
        except OSError:
            return  # closed already
        connection.setblocking(False)
        peer = _Peer(connection, address[0], time.monotonic() + REPORT_S)
        unverified = [each for each in self._peers if each.node is None]
        if len(unverified) >= MAX_UNVERIFIED:
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
            if not part:  # its task ended, or will connect again
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
        """Take a report; return False if it is not one of this step."""
        message, numbers = _verified(self._exchange, line)
        if message != "count" or len(numbers) != 2:
            return False
        peer.node, count = numbers
        for earlier in [each for each in self._peers if each.node == peer.node and each is not peer]:
            self._drop(earlier)
        self._counts[peer.node] = count
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

    def _answer(self, message: str, numbers: list[int]) -> None:
        line = _signed(self._exchange, message, *numbers)
        for peer in self._peers:
            if peer.node is not None:
                peer.connection.settimeout(REPORT_S)  # far more than one line needs
                with contextlib.suppress(OSError):
                    peer.connection.sendall(line)

    def _refused_message(self) -> str:
        """Return a message about connections that were not of this step; they may be nodes with other variables."""
        if not self._refused:
            return ""
        some = ", ".join(list(self._refused)[:4]) + (", ..." if len(self._refused) > 4 else "")
        return f"; refused connections from outside this Slurm step: {sum(self._refused.values())}, from {some}"

    def _close(self) -> None:
        for peer in self._peers:
            peer.connection.close()
        self._selector.close()


def _listen(port: int) -> socket.socket:
    try:
        server = socket.create_server(("", port), backlog=2048)
    except OSError as error:
        raise RequestError(
            f"node 0 cannot listen on port {port} for the GPU counts of the other nodes ({error.strerror}): "
            "choose another pair of ports with --distributed-port"
        ) from None
    server.setblocking(False)
    return server


def _missing_message(nodes: list[int], timeout_s: float) -> str:
    return f"nodes {nodes} did not report their GPU counts within {timeout_s:g} s"


# --- the other nodes ------------------------------------------------------------------------------------------------


def _report(exchange: CountExchange, count: int, deadline: float, timeout_s: float) -> list[int]:
    where = f"node 0 ({exchange.host}, port {exchange.port})"
    reason = "its task has not started, or the port is blocked"
    replied = False
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((exchange.host, exchange.port), timeout=min(left_s, REPORT_S)) as connection:
                connection.sendall(_signed(exchange, "count", exchange.node, count))
                for message, numbers in _replies(connection, exchange, deadline):
                    replied = True
                    if message == "counts":
                        return numbers
                    if message == "missing":
                        raise TrainingError(_missing_message(numbers, timeout_s))
            reason = "something else listens there, not node 0 of this Slurm step"
        except TimeoutError:
            if not replied:
                reason = "its machine, or the process that listens there, does not answer"
        except OSError as error:
            if error.errno not in (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE):
                reason = error.strerror or str(error)
        time.sleep(min(0.1, max(deadline - time.monotonic(), 0.0)))
    if replied:
        raise TrainingError(
            f"{where} waited {timeout_s:g} s for the GPU counts of other nodes, and some are still missing"
        )
    raise TrainingError(f"{where} did not answer within {timeout_s:g} s: {reason}")


def _replies(connection: socket.socket, exchange: CountExchange, deadline: float) -> Iterator[tuple[str, list[int]]]:
    """Yield message and numbers of each line of node 0, until the first line without a valid signature.

    Raises:
        TimeoutError: node 0 did not acknowledge the report within ``REPORT_S``, or did not answer in time.
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
            message, numbers = _verified(exchange, line)
            if not message:
                return
            yield message, numbers
            until = deadline + GRACE_S
