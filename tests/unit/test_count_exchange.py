"""The nodes of a Slurm step exchange how many ranks they start, despite foreign connections."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainer.agent import count_exchange
from trainer.agent.count_exchange import exchange_counts
from trainer.contract.errors import RequestError, TrainingError
from trainer.environments.decision import CountExchange
from trainer.host.ports import free_port

LIMIT_S = 20.0


def exchange(node: int, nodes: int, port: int, key: str = "job 24, step 0") -> CountExchange:
    return CountExchange(node=node, nodes=nodes, host="127.0.0.1", port=port, expected_world=None, key=key)


def connect(port: int) -> socket.socket:
    """Connect to node 0 once it listens."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port))
        time.sleep(0.005)


def test_nodes_exchange_their_counts() -> None:
    counts = [4, 2, 8, 1]
    port = free_port()
    with ThreadPoolExecutor(len(counts)) as pool:
        counted = [
            pool.submit(exchange_counts, exchange(node, len(counts), port), count, timeout_s=LIMIT_S)
            for node, count in enumerate(counts)
        ]
        assert [answer.result() for answer in counted] == [counts] * len(counts)


def http(stranger: socket.socket) -> None:
    stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")


def nested(stranger: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        stranger.sendall(b"[" * 100_000 + b"\n")


def endless(stranger: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        stranger.sendall(b"1" * 1_000_000)


def huge(stranger: socket.socket) -> None:
    stranger.sendall(b"count 1 " + b"9" * 200 + b" 0\n")


def claim(stranger: socket.socket) -> None:
    stranger.sendall(json.dumps([1, 64]).encode() + b"\n")


def unsigned(stranger: socket.socket) -> None:
    stranger.sendall(b"count 1 64\n")


def binary(stranger: socket.socket) -> None:
    stranger.sendall(b"\xff\x00 \xfe\n")


def silent(_: socket.socket) -> None:
    """Connect and send nothing."""


@pytest.mark.parametrize(
    "sends", [silent, http, nested, endless, huge, claim, unsigned, binary], ids=lambda sends: sends.__name__
)
def test_a_stranger_neither_holds_up_the_count_nor_changes_it(sends: Callable[[socket.socket], None]) -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
        first = pool.submit(exchange_counts, exchange(0, 2, port), 4, timeout_s=LIMIT_S)
        sends(stack.enter_context(connect(port)))
        begun = time.monotonic()
        second = pool.submit(exchange_counts, exchange(1, 2, port), 2, timeout_s=LIMIT_S)
        assert first.result() == second.result() == [4, 2]
        assert time.monotonic() - begun < LIMIT_S / 2


def test_many_silent_connections_do_not_keep_a_node_out() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
        first = pool.submit(exchange_counts, exchange(0, 2, port), 4, timeout_s=LIMIT_S)
        for _ in range(2 * count_exchange.MAX_UNVERIFIED):
            stack.enter_context(connect(port))
        second = pool.submit(exchange_counts, exchange(1, 2, port), 2, timeout_s=LIMIT_S)
        assert first.result() == second.result() == [4, 2]


def test_a_silent_connection_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count_exchange, "REPORT_S", 0.1)
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(exchange_counts, exchange(0, 2, port), 4, timeout_s=LIMIT_S)
        with connect(port) as stranger:
            stranger.settimeout(LIMIT_S)
            assert stranger.recv(1) == b""
        exchange_counts(exchange(1, 2, port), 2, timeout_s=LIMIT_S)
        assert first.result() == [4, 2]


def test_a_node_of_another_slurm_step_is_refused() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(exchange_counts, exchange(0, 2, port), 4, timeout_s=LIMIT_S)
        other = pool.submit(exchange_counts, exchange(1, 2, port, key="job 24, step 1"), 64, timeout_s=0.3)
        with pytest.raises(TrainingError, match="something else listens there, not node 0 of this Slurm step"):
            other.result()
        assert exchange_counts(exchange(1, 2, port), 2, timeout_s=LIMIT_S) == [4, 2]
        assert first.result() == [4, 2]


def test_a_node_that_comes_a_second_time_is_counted_once_and_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count_exchange, "GRACE_S", 0.1)
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(exchange_counts, exchange(0, 3, port), 4, timeout_s=LIMIT_S)
        with pytest.raises(TrainingError, match=r"waited 0\.3 s for the GPU counts of other nodes"):
            exchange_counts(exchange(1, 3, port), 2, timeout_s=0.3)
        again = pool.submit(exchange_counts, exchange(1, 3, port), 2, timeout_s=LIMIT_S)
        assert exchange_counts(exchange(2, 3, port), 8, timeout_s=LIMIT_S) == [4, 2, 8]
        assert first.result() == again.result() == [4, 2, 8]


def test_nodes_that_do_not_come_are_named_by_all_that_came() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
        first = pool.submit(exchange_counts, exchange(0, 4, port), 4, timeout_s=0.5)
        stack.enter_context(connect(port))
        second = pool.submit(exchange_counts, exchange(2, 4, port), 2, timeout_s=0.5)
        for pending in (first, second):
            with pytest.raises(TrainingError, match=r"^nodes \[1, 3\] did not report their GPU counts within 0\.5 s"):
                pending.result()


def test_a_missing_node_is_reported_with_the_foreign_connections() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(exchange_counts, exchange(0, 2, port), 4, timeout_s=0.3)
        with connect(port) as stranger:
            http(stranger)
            stranger.settimeout(LIMIT_S)
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b""
        with pytest.raises(TrainingError, match=r"from outside this Slurm step: 1, from 127\.0\.0\.1$"):
            first.result()


def test_a_node_alone_names_node_0() -> None:
    with pytest.raises(TrainingError, match=r"^node 0 \(127.0.0.1, port \d+\) did not answer within 0.05 s: its task"):
        exchange_counts(exchange(1, 3, free_port()), 4, timeout_s=0.05)


@pytest.fixture
def impostor() -> Iterator[int]:
    """Port of a process that answers every report with counts of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(4096)
                        connection.sendall(b"[4, 64]\n")

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_counts_of_a_foreign_process_are_refused(impostor: int) -> None:
    with pytest.raises(TrainingError, match="something else listens there, not node 0 of this Slurm step"):
        exchange_counts(exchange(1, 2, impostor), 2, timeout_s=0.2)


def test_a_port_in_use_on_node_0_is_refused_with_the_flag_that_chooses_another() -> None:
    with (
        socket.create_server(("", 0)) as busy,
        pytest.raises(RequestError, match=r"cannot listen on port \d+ .*--distributed-port$"),
    ):
        exchange_counts(exchange(0, 2, busy.getsockname()[1]), 4, timeout_s=LIMIT_S)


def test_the_key_of_a_step_is_not_shown() -> None:
    shown = repr(dataclasses.replace(exchange(0, 2, 1), key="of the step"))
    assert "of the step" not in shown
