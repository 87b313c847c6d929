"""Serves the list of runs, and the live page and the logs of each, read-only, to who has the token.

A thread for each connection, of which there is a maximum: what a viewer needs is bounded by one socket's buffer and one
request's headers, and the standard library's server limits these.
"""

from __future__ import annotations

import errno
import html
import io
import re
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from typing import Any, ClassVar
from urllib.parse import parse_qs, quote, unquote, urlsplit

import msgspec
import psutil

from gputrain_tui import paths
from gputrain_tui.history.run_columns import cause, loss_cell
from gputrain_tui.history.run_folders import RECENT_RUNS, Run, UnreadableRun, newest_runs, read_run
from gputrain_tui.history.summary import summarize, summarize_unreadable
from gputrain_tui.report.live_page import LivePages
from gputrain_tui.report.page import FILES
from gputrain_tui.tables import duration, number
from trainer.contract.errors import RequestError, quoted
from trainer.contract.record.regular_file import read_tail
from trainer.host.ports import is_port_free

LOOPBACK = "127.0.0.1"
OWN = ("localhost", LOOPBACK, "::1")
"""Addresses that only this machine reaches."""
MAX_CONNECTIONS = 100
"""Connections at once; more are refused with 503."""
REQUEST_TIMEOUT_S = 10.0
"""Seconds that a client may take for a whole request, or a socket to take what is sent."""
HEARTBEAT_S = 15.0
"""Seconds after which a stream without news sends a comment, which notices a viewer that is gone."""
LOG_BYTES = 256 << 10
"""Size of the end of a log that is shown."""
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
STATIC = {"page.css": "text/css", **dict.fromkeys(("charts.js", "page.js", "live.js"), "text/javascript")}
LIST_TITLES = ("run", "state", "recipe", "ranks", "step", "loss", "started", "took", "what is wrong")


class PageServer(ThreadingHTTPServer):
    """The server; ``serve_forever`` until it is interrupted."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 32

    def __init__(self, host: str, port: int, *, named: Mapping[str, Run] | None = None) -> None:
        """Listen; ``named`` are runs outside of the folder of runs, by id.

        Raises:
            RequestError: the port is in use, or the address is none of this machine.
        """
        self.token = secrets.token_urlsafe(32)
        self.named = dict(named or {})
        self._free = threading.Semaphore(MAX_CONNECTIONS)
        self.pages = LivePages()
        if not host:  # the socket would take it for all addresses of this machine
            raise RequestError("--host is empty; name an address of this machine, or 0.0.0.0 for all")
        self.named_host = f"[{host}]" if ":" in host else host
        """The host as it stands in an address."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), PageRequest)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                free = next((other for other in range(port + 1, 1 << 16) if is_port_free(other)), 0)
                raise RequestError(f"--port {port} is in use; {free or 'none above it'} is free") from None
            raise RequestError(f"--host {quoted(host)}: {error.strerror or error}") from None
        except (UnicodeError, TypeError):  # of encoding a name that is none
            raise RequestError(f"--host {quoted(host)} is no name or address of a host") from None
        except OverflowError:
            raise RequestError(f"--port is {port}; it is 0 to 65535") from None
        self.hosts = {"localhost", LOOPBACK, "[::1]", self.named_host, socket.gethostname()}
        if host not in OWN:
            addresses = [each.address for of in psutil.net_if_addrs().values() for each in of]
            self.hosts |= {f"[{each}]" if ":" in each else each for each in addresses}

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, or refuse it."""
        if not self._free.acquire(blocking=False):
            with suppress(OSError):
                request.settimeout(1.0)
                request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread more can be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a connection that broke: viewers come and go."""

    def find(self, run_id: str) -> Run | None:
        """Return a run of the list, by its whole id."""
        if (named := self.named.get(run_id)) is not None:
            return named
        if not re.fullmatch(r"[^/\0.][^/\0]*", run_id):
            return None
        found = read_run(paths.runs_folder() / run_id)
        return found if isinstance(found, Run) else None


class _Received(io.RawIOBase):
    """What a client sends. The whole of a request has to arrive in time, however little comes at once."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.begin_request()

    def begin_request(self) -> None:
        self._deadline = time.monotonic() + REQUEST_TIMEOUT_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        self._connection.settimeout(max(1e-3, self._deadline - time.monotonic()))
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(REQUEST_TIMEOUT_S)


class PageRequest(BaseHTTPRequestHandler):
    """One connection. Only GET and HEAD exist."""

    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version = "gputrain"
    sys_version = ""
    timeout: ClassVar[float] = REQUEST_TIMEOUT_S

    def setup(self) -> None:
        super().setup()
        self._received = _Received(self.connection)
        self.rfile = io.BufferedReader(self._received)

    def handle_one_request(self) -> None:
        self._received.begin_request()
        super().handle_one_request()

    def do_GET(self) -> None:
        """Answer a request of who is allowed to ask."""
        if not self._is_for_us():
            self._answer(HTTPStatus.FORBIDDEN)
            return
        try:
            address = urlsplit(self.path)
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        given = parse_qs(address.query).get("token", [""])[0]
        if given and secrets.compare_digest(given.encode(), self.server.token.encode()):
            # The cookie takes over, so that the token is in no history and no address that is passed on.
            cookie = f"{self._cookie_name}={self.server.token}; Path=/; HttpOnly; SameSite=Strict"
            # One slash alone: after two stands the name of another site.
            path = "/" + quote(unquote(address.path).lstrip("/"))
            if self._is_from_elsewhere:
                # A browser sends the cookie to no page that another site leads to, but from this answer on to the next.
                self._answer(HTTPStatus.OK, headers={"Set-Cookie": cookie, "Refresh": f"0; url={path}"})
            else:
                self._answer(HTTPStatus.SEE_OTHER, headers={"Set-Cookie": cookie, "Location": path})
        elif self._has_cookie():
            self._route([unquote(part) for part in address.path.split("/") if part])
        else:
            self._answer(HTTPStatus.FORBIDDEN)

    do_HEAD = do_GET  # noqa: N815 - the name that the base class asks for

    def _is_for_us(self) -> bool:
        """Whether the request names this server, and comes from one of its pages or from no page at all.

        A page of another name whose address was changed to ours (DNS rebinding) still names itself as the host.
        """
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin")
        # Not the port, which is another one where it is forwarded.
        return re.sub(r":\d+$", "", host) in self.server.hosts and origin in (None, f"http://{host}")

    @property
    def _cookie_name(self) -> str:
        return f"gputrain_{self.server.port}"  # cookies are of a host, not of a port

    @property
    def _is_from_elsewhere(self) -> bool:
        """Whether a page of another site or port led here."""
        return self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")

    def _has_cookie(self) -> bool:
        if self._is_from_elsewhere:
            return False
        # Not http.cookies, which drops all cookies for one that it cannot read, such as another program's JSON.
        cookies = (cookie.strip().partition("=") for cookie in self.headers.get("Cookie", "").split(";"))
        token = self.server.token.encode()
        return any(
            name == self._cookie_name and secrets.compare_digest(value.encode(), token) for name, _, value in cookies
        )

    def _route(self, parts: list[str]) -> None:
        match parts:
            case []:
                self._page("runs", _run_table(self.server))
            case [name] if name in STATIC:
                self._answer(HTTPStatus.OK, (FILES / name).read_bytes(), STATIC[name])
            case ["run", run_id, *rest]:
                run = self.server.find(run_id)
                if run is None:
                    self._no_page()
                else:
                    self._run(run, rest)
            case _:
                self._no_page()

    def _run(self, run: Run, rest: list[str]) -> None:
        match rest:
            case []:
                with self.server.pages.viewing(run) as page:
                    data = page.data
                logs = "".join(
                    f' <a href="/run/{quote(run.id)}/log/{name}">{name}</a>' for name in _log_names(run)[:64]
                )
                body = (
                    f'<nav><a href="/">all runs</a> · logs:{logs}</nav><main></main>'
                    f'<script type="application/json" id="data">{data}</script>'
                    '<script src="/charts.js"></script><script src="/page.js"></script><script src="/live.js"></script>'
                )
                self._page(run.id, body)
            case ["report.json"]:
                with self.server.pages.viewing(run) as page:
                    self._answer(HTTPStatus.OK, msgspec.json.encode(page.report), "application/json")
            case ["events"]:
                self._stream(run)
            case ["log", name] if name in _log_names(run):
                try:
                    text = read_tail(run.dir.logs / f"{name}.log", LOG_BYTES)
                except OSError:  # deleted since, or no file
                    self._no_page()
                else:
                    self._answer(HTTPStatus.OK, text)
            case _:
                self._no_page()

    def _stream(self, run: Run) -> None:
        """Send the page's data whenever it changes, as server-sent events, until the viewer is gone."""
        self.close_connection = True
        self.send_response(HTTPStatus.OK)
        self._send_headers("text/event-stream", {"Connection": "close"})
        if self.command == "HEAD":
            return
        version = 0
        # A viewer may be gone, or too slow to take what is sent.
        with self.server.pages.viewing(run) as page, suppress(OSError):
            while not page.is_over:
                if page.wait(version, HEARTBEAT_S):
                    version, data = page.version, page.data
                    self.wfile.write(f"data: {data}\n\n".encode())
                else:
                    self.wfile.write(b": nothing new\n\n")

    def _page(self, title: str, body: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        text = (
            '<!doctype html><html lang="en"><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<title>{html.escape(title)}</title><link rel="stylesheet" href="/page.css">{body}</html>'
        )
        self._answer(status, text.encode("utf-8", "surrogateescape"), "text/html")

    def _no_page(self) -> None:
        text = '<nav><a href="/">all runs</a></nav><main><p>There is no such run, log or page.</p></main>'
        self._page("not found", text, HTTPStatus.NOT_FOUND)

    def _answer(
        self, status: HTTPStatus, body: bytes = b"", kind: str = "text/plain", headers: Mapping[str, str] | None = None
    ) -> None:
        self.send_response(status)
        self._send_headers(kind, {"Content-Length": str(len(body)), **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_headers(self, kind: str, headers: Mapping[str, str]) -> None:
        safe = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in {**safe, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is none with its status alone: nothing of it comes back."""
        del message, explain
        headers = {"Connection": "close"}
        if code == HTTPStatus.NOT_IMPLEMENTED:  # what the base class says of each method without a function
            code, headers["Allow"] = HTTPStatus.METHOD_NOT_ALLOWED, "GET, HEAD"
        with suppress(OSError):
            self._answer(HTTPStatus(code), headers=headers)
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Log nothing: an address may have the token."""


def _log_names(run: Run) -> list[str]:
    """Return the names of a run's logs: of ranks, then of nodes."""
    with suppress(OSError):
        files = [path for path in run.dir.logs.glob("*.log") if not path.is_symlink()]
        names = [path.stem for path in files if re.fullmatch(r"(node-)?\d+", path.stem)]
        return sorted(names, key=lambda name: (name.startswith("node-"), int(name.removeprefix("node-"))))
    return []


def _run_table(server: PageServer) -> str:
    rows = []
    now = time.time()
    others = (run for run in newest_runs() if run.id not in server.named)
    listed = [*server.named.values(), *islice(others, RECENT_RUNS)]
    for run in listed:
        if isinstance(run, UnreadableRun):
            entry = summarize_unreadable(run)
            cells = [html.escape(run.id), "unreadable", "", "", "", "", "", "", html.escape(str(entry["message"]))]
        else:
            entry = summarize(run, now=now)
            cells = [
                f'<a href="/run/{quote(run.id)}">{html.escape(run.id)}</a>',
                html.escape(str(entry["state"])),
                html.escape(str(entry["recipe"])),
                str(entry["world_size"]),
                number(entry["step"]),
                loss_cell(entry),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(entry["started"])),
                duration(entry["duration_s"]),
                html.escape(cause(entry)),
            ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    titles = "".join(f"<th>{title}</th>" for title in LIST_TITLES)
    table = f'<table class="runs"><thead><tr>{titles}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    if not rows:
        return "<main><h1>no run yet</h1></main>"
    return f'<main><h1>runs</h1><div class="scroll">{table}</div></main>'
