"""``gputrain serve``: what is answered, to whom, and what an attacker gets."""

from __future__ import annotations

import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import pytest
import synthetic
from waiting import LIMIT_S, until

from gputrain_tui.history.run_folders import Run
from gputrain_tui.report import live_page, page_server
from gputrain_tui.report.page_server import MAX_CONNECTIONS, PageServer
from gputrain_tui.report.report_fields import RunReport
from trainer.contract.errors import RequestError


@dataclass
class Site:
    """A server in a thread of this process, with one run whose texts are markup."""

    server: PageServer
    run: Run

    def get(self, path: str, *, cookie: bool = True, method: str = "GET", **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=LIMIT_S)
        if cookie:
            headers["Cookie"] = f"gputrain_{self.server.port}={self.server.token}"
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        body = answer.read()
        self.headers = {name.lower(): value for name, value in answer.getheaders()}
        connection.close()
        return answer.status, body

    @contextmanager
    def stream(self) -> Iterator[Iterator[bytes]]:
        """The lines of the stream of the run's page, until the server ends it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=LIMIT_S)
        cookie = {"Cookie": f"gputrain_{self.server.port}={self.server.token}"}
        connection.request("GET", f"/run/{self.run.id.replace('<', '%3C')}/events", headers=cookie)
        answer = connection.getresponse()
        yield iter(answer.readline, b"")
        answer.close()
        connection.close()

    def raw(self, data: bytes) -> bytes:
        """Send bytes, and return the first line of the answer; empty where the connection is closed."""
        with socket.create_connection(("127.0.0.1", self.server.port), timeout=LIMIT_S) as client:
            try:
                client.sendall(data)
            except OSError:
                return b""
            return client.makefile("rb").readline()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    run = synthetic.run(tmp_path / "runs", name="<b>demo", steps=30, status="finished")
    (run.dir.logs / "0.log").write_text("<script>line</script>\n")
    (tmp_path / "secret").write_text("secret")
    (run.dir.logs / "7.log").mkdir()
    os.mkfifo(run.dir.logs / "8.log")
    (run.dir.logs / "9.log").symlink_to(tmp_path / "secret")
    server = PageServer("127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield Site(server, run)
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_token_opens_the_pages_and_becomes_a_cookie(site: Site) -> None:
    assert site.get("/", cookie=False) == (403, b"")
    assert site.get("/?token=wrong", cookie=False) == (403, b"")
    status, body = site.get(f"/run/x?token={site.server.token}", cookie=False)
    assert (status, body) == (303, b"")
    assert site.headers["location"] == "/run/x"
    assert "HttpOnly; SameSite=Strict" in site.headers["set-cookie"]
    status, body = site.get("/")
    assert status == 200
    assert b"&lt;b&gt;demo" in body
    assert b"<b>" not in body
    assert site.get("/", Host="127.0.0.1:9000")[0] == 200, "the port that ssh forwards to ours"
    assert site.headers["content-security-policy"].startswith("default-src 'none'")


def test_an_ipv6_address_is_served_in_brackets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    try:
        server = PageServer("::1", 0)
    except RequestError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        for host, status in ((f"{server.named_host}:{server.port}", 303), ("[::2]", 403)):
            connection = http.client.HTTPConnection("::1", server.port, timeout=LIMIT_S)
            connection.request("GET", f"/?token={server.token}", headers={"Host": host})
            assert connection.getresponse().status == status
            connection.close()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("path", ["/%2Fevil.example", "/%2F%2Fevil.example/x", "/%5C%2Fevil.example"])
def test_the_token_leads_to_no_other_site(site: Site, path: str) -> None:
    assert site.get(f"{path}?token={site.server.token}", cookie=False)[0] == 303
    assert not site.headers["location"].startswith(("//", "/\\"))


def test_an_address_that_another_page_links_to_opens(site: Site) -> None:
    """In a terminal in a browser, or a chat: a redirect would reach the page as that site's request, without cookie."""
    address = f"/run/x?token={site.server.token}"
    assert site.get(address, cookie=False, Sec_Fetch_Site="cross-site") == (200, b"")
    assert site.headers["refresh"] == "0; url=/run/x"
    assert "SameSite=Strict" in site.headers["set-cookie"]
    assert site.get("/?token=wrong", cookie=False, Sec_Fetch_Site="cross-site") == (403, b"")


@pytest.mark.parametrize("other", ['a={"x":1,"y":[2]}', "a=\xe9 b", "a b=c", "gputrain_{port}=of-another", "="])
def test_cookies_of_other_programs_on_this_machine_shut_nobody_out(site: Site, other: str) -> None:
    own = f"gputrain_{site.server.port}={site.server.token}"
    sent = other.format(port=site.server.port) if "port" in other else other
    assert site.get("/", cookie=False, Cookie=f"{sent}; {own}")[0] == 200
    assert site.get("/", cookie=False, Cookie=sent)[0] == 403


def test_a_run_has_its_page_its_logs_and_a_stream_of_its_data(site: Site) -> None:
    status, body = site.get(f"/run/{site.run.id.replace('<', '%3C')}")
    assert status == 200
    data = json.loads(body.split(b'id="data">')[1].split(b"</script>")[0])
    assert data["report"]["step"] == 30
    status, body = site.get(f"/run/{site.run.id.replace('<', '%3C')}/log/0")
    assert (status, body) == (200, b"<script>line</script>\n")
    assert site.headers["content-type"] == "text/plain; charset=utf-8"
    assert site.headers["x-content-type-options"] == "nosniff"
    assert site.get("/page.js")[0] == 200
    assert site.get("/page.js", method="HEAD") == (200, b"")
    status, body = site.get(f"/run/{site.run.id.replace('<', '%3C')}/report.json")
    assert (status, site.headers["content-type"]) == (200, "application/json; charset=utf-8")
    assert msgspec.json.decode(body, type=RunReport).step == 30
    with site.stream() as lines:
        assert json.loads(next(lines).removeprefix(b"data: "))["report"]["id"] == site.run.id
    assert site.get(f"/run/{site.run.id.replace('<', '%3C')}/events", method="HEAD") == (200, b"")
    assert site.headers["content-type"].startswith("text/event-stream")


def test_a_viewer_who_comes_when_nobody_has_looked_for_long_is_followed_anew(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_page, "INTERVAL_S", 0.02)
    monkeypatch.setattr(live_page, "LINGER_S", 0.05)
    monkeypatch.setattr(page_server, "HEARTBEAT_S", 0.02)  # a viewer who is gone is noticed so
    for step in (31, 32, 33):
        with site.stream() as lines:
            next(lines)
            synthetic.write(site.run.dir.rank_events(0), synthetic.step_of(0, step, random.Random(1)))
            assert any(f'"steps":{step}'.encode() in line for line in lines)
        until(lambda: not len(site.server.pages))


def test_a_page_keeps_up_with_a_record_that_grows_by_megabytes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "INTERVAL_S", 60.0)  # in which a loaded machine too has read all of it
    with site.server.pages.viewing(site.run) as page:
        noise = random.Random(1)
        lines = [synthetic.step_of(0, step, noise) for step in range(31, 8_031)]
        synthetic.write(site.run.dir.rank_events(0), *lines)
        page.update()
        assert page.report is not None
        assert page.report.ranks[0].steps == 8_030


def test_the_stream_of_a_run_that_is_deleted_ends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_page, "INTERVAL_S", 0.02)
    with site.stream() as lines:
        next(lines)
        shutil.rmtree(site.run.dir.path)
        assert [line for line in lines if line.startswith(b"data")] == []
    assert site.get(f"/run/{site.run.id.replace('<', '%3C')}") == (404, site.get("/none")[1])


def test_a_request_that_comes_byte_by_byte_is_given_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "REQUEST_TIMEOUT_S", 0.3)
    with socket.create_connection(("127.0.0.1", site.server.port), timeout=LIMIT_S) as client:
        client.settimeout(0.05)
        for byte in b"GET / HTTP/1.1\r\nX: " + b"a" * 1000:
            client.send(bytes([byte]))
            try:
                assert client.recv(1) == b"", "the server has nothing to say to such a client"
                break
            except TimeoutError:
                continue
        else:
            pytest.fail("it takes a place for as long as it likes")


REFUSED: dict[str, tuple[str, dict[str, str], int]] = {
    "another name for this machine": ("/", {"Host": "evil.example"}, 403),
    "another name with our port": ("/", {"Host": "evil.example:{port}"}, 403),
    "a page of another origin": ("/", {"Origin": "http://evil.example"}, 403),
    "a page of another site": ("/", {"Sec-Fetch-Site": "cross-site"}, 403),
    "a page of another port": ("/", {"Origin": "http://127.0.0.1:1"}, 403),
    "a folder above": ("/run/..%2F..%2Fsecret", {}, 404),
    "two folders above": ("/run/%2e%2e/log/0", {}, 404),
    "a hidden folder": ("/run/.new-1", {}, 404),
    "a null byte": ("/run/%00", {}, 404),
    "a file of the run": ("/run/{run}/status.json", {}, 404),
    "a log above": ("/run/{run}/log/..%2F..%2F..%2Fsecret", {}, 404),
    "a link for a log": ("/run/{run}/log/9", {}, 404),
    "a file of the package": ("/..%2Fpage.py", {}, 404),
    "a folder for a log": ("/run/{run}/log/7", {}, 404),
    "a pipe for a log": ("/run/{run}/log/8", {}, 404),
    "an address that is none": ("ftp://[", {}, 400),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_for_this_page_is_refused_with_nothing_of_the_request(site: Site, name: str) -> None:
    path, headers, status = REFUSED[name]
    sent = {key.replace("-", "_"): value.format(port=site.server.port) for key, value in headers.items()}
    found, body = site.get(path.format(run=site.run.id.replace("<", "%3C")), **sent)
    assert found == status
    if status == 404:
        assert b"There is no such run, log or page." in body
        assert body == site.get("/none")[1], "the same for each"
    else:
        assert body == b""


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
def test_no_request_writes(site: Site, method: str) -> None:
    assert site.get("/", method=method)[0] == 405
    assert site.headers["allow"] == "GET, HEAD"


def test_a_long_request_is_cut_off(site: Site) -> None:
    assert b" 414 " in site.raw(b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n")
    assert b" 431 " in site.raw(b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 70_000 + b"\r\n\r\n")
    many = b"".join(b"X-%d: a\r\n" % number for number in range(300))
    assert b" 431 " in site.raw(b"GET / HTTP/1.1\r\n" + many + b"\r\n")


def test_more_connections_than_the_maximum_are_refused_and_later_served(site: Site) -> None:
    held = [socket.create_connection(("127.0.0.1", site.server.port)) for _ in range(MAX_CONNECTIONS)]
    until(lambda: threading.active_count() > MAX_CONNECTIONS)
    assert b" 503 " in site.raw(b"")
    for each in held:
        each.close()
    until(lambda: b" 403 " in site.raw(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n"))


def test_a_thread_that_cannot_start_takes_no_place(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _no_more_threads)
        for _ in range(MAX_CONNECTIONS + 1):
            assert b" 503 " not in site.raw(b"")
    assert site.get("/")[0] == 200


def _no_more_threads(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_at_all_addresses_each_of_this_machine_is_a_host_and_no_other_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    with PageServer("0.0.0.0", 0) as server:
        own = {each.address for of in psutil.net_if_addrs().values() for each in of if each.family == socket.AF_INET}
        assert own <= server.hosts
        assert "evil.example" not in server.hosts


def test_a_port_in_use_is_said_with_the_next_free_one(site: Site) -> None:
    with pytest.raises(RequestError, match=rf"--port {site.server.port} is in use; \d+ is free") as refused:
        PageServer("127.0.0.1", site.server.port)
    assert site.server.port < int(str(refused.value).split()[-3]) < site.server.port + 100
    with pytest.raises(RequestError, match="it is 0 to 65535"):
        PageServer("127.0.0.1", 70_000)


@pytest.mark.parametrize("host", ["", "ä" * 70, "a" * 300, "no.such.host.invalid", "203.0.113.1"])
def test_what_is_no_address_of_this_machine_is_a_line(host: str) -> None:
    with pytest.raises(RequestError, match="--host"):
        PageServer(host, 0)


def test_the_command_prints_its_address_and_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path))
    run = synthetic.run(tmp_path / "runs", steps=5, status="finished")
    argv = [sys.executable, "-m", "gputrain_tui", "serve", "last", "--port", "0"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline()
    assert f"/run/{run.id}?token=" in address
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 130
    process.stdout.close()
