from __future__ import annotations

from pathlib import Path

import pytest

from trainer.contract.rendezvous_url import RendezvousUrl, parse_rendezvous_url, scheme_of, tcp_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("tcp://10.0.0.1:29500", RendezvousUrl(scheme="tcp", host="10.0.0.1", port=29500)),
        ("tcp://Head_1.Example.org:1/", RendezvousUrl(scheme="tcp", host="head_1.example.org", port=1)),
        ("tcp://[FD00::1]:4711", RendezvousUrl(scheme="tcp", host="fd00::1", port=4711)),
        ("tcp://[fe80::1%Eth0]:4711", RendezvousUrl(scheme="tcp", host="fe80::1%Eth0", port=4711)),
        ("file:///shared/a%20rendezvous", RendezvousUrl(scheme="file", path=Path("/shared/a rendezvous"))),
        ("file:///shared/rendezvous?x#y", RendezvousUrl(scheme="file", path=Path("/shared/rendezvous"))),
        ("env://", RendezvousUrl(scheme="env")),
    ],
)
def test_an_init_method_is_parsed_into_a_rendezvous_url(url: str, expected: RendezvousUrl) -> None:
    assert parse_rendezvous_url(url) == expected
    assert scheme_of(url) == expected.scheme


@pytest.mark.parametrize(
    "url",
    [
        "10.0.0.1:29500",
        "http://10.0.0.1:80",
        "tcp://10.0.0.1",
        "tcp://:29500",
        "tcp://h:port",
        "tcp://h:²",
        "tcp://h:1/x",
        "tcp://a@b:1",
        "tcp://a b:1",
        "tcp://[::::]:1",
        "tcp://[::1:29500",
        "tcp://h:1\n",
        f"tcp://h:{'1' * 5000}",
        "file://a/b",
        "file:///",
        "file:///a/",
        "file:///a%00b",
        "file:///a\nb",
        "",
    ],
)
def test_a_malformed_one_is_none(url: str) -> None:
    assert parse_rendezvous_url(url) is None


@pytest.mark.parametrize(("port", "usable"), [(0, False), (1, True), (65535, True), (65536, False), (999999999, False)])
def test_a_port_out_of_range_is_read_and_is_none_to_listen_at(port: int, usable: bool) -> None:
    url = parse_rendezvous_url(f"tcp://h:{port}")
    assert url is not None
    assert (url.port, url.has_port) == (port, usable)


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1", "fe80::1%eth0", "[fd00::1]"])
def test_a_tcp_url_is_parsed_back(host: str) -> None:
    url = parse_rendezvous_url(tcp_url(host, 29500))
    assert url == RendezvousUrl(scheme="tcp", host=host.strip("[]"), port=29500)
