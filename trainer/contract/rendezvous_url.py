"""Init methods, the URLs of a rendezvous: ``tcp://HOST:PORT``, ``file:///PATH``, ``env://``."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import unquote

Scheme = Literal["tcp", "file", "env"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
LAST_PORT = 65_535

TCP_URL = r"tcp://(?:\[([0-9a-fA-F:.]+)(%[\w.-]+)?\]|([\w.%-]+)):([0-9]{1,9})/?"
FILE_URL = r"file://(/[^?#\r\n\t]*[^/?#\r\n\t])(?:[?#].*)?"


@dataclass(frozen=True, kw_only=True)
class RendezvousUrl:
    """A parsed init method."""

    scheme: Scheme
    host: str = ""
    """Host of ``tcp://``, in lower case and without brackets."""
    port: int = 0
    """Port of ``tcp://``; 0 stands for a free port that is still to be chosen."""
    path: Path = Path()
    """Path of ``file://``, absolute."""

    @property
    def has_port(self) -> bool:
        return 1 <= self.port <= LAST_PORT


def scheme_of(url: str) -> Scheme | None:
    """Return the scheme of an init method, even if the rest is malformed; None if it is none of the three."""
    return next((scheme for scheme in SCHEMES if url.startswith(f"{scheme}://")), None)


def parse_rendezvous_url(url: str) -> RendezvousUrl | None:
    """Return a parsed init method; None if it is malformed. The port may be out of range."""
    scheme = scheme_of(url)
    if scheme == "env":
        return RendezvousUrl(scheme="env")
    if match := re.fullmatch(FILE_URL, url):
        path = unquote(match[1])
        return None if "\0" in path else RendezvousUrl(scheme="file", path=Path(path))
    match = re.fullmatch(TCP_URL, url)
    if match is None or (match[1] and not _is_ipv6(match[1])):
        return None
    host = match[1].lower() + (match[2] or "") if match[1] else match[3].lower()
    return RendezvousUrl(scheme="tcp", host=host, port=int(match[4]))


def tcp_url(host: str, port: int | str) -> str:
    """Return the init method of a host and a port, with an IPv6 address in brackets."""
    host = host.strip("[]")
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def port_in_use(port: int) -> str:
    """Return the part of a message that rank 0 cannot listen on a port, because another program does."""
    return f"port {port} is in use on this machine"


def _is_ipv6(text: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6, text)
    except OSError:
        return False
    return True
