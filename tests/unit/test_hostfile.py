from __future__ import annotations

from pathlib import Path

import pytest

from gputrain_tui.hosts.host_names import address_of
from gputrain_tui.hosts.host_pipes import explain_failure
from gputrain_tui.hosts.hostfile import HostEntry, parse_host_list, parse_hosts, read_hostfile
from gputrain_tui.recipe.model import Node
from trainer.contract.errors import RequestError


@pytest.mark.parametrize(
    ("line", "entry"),
    [
        ("gpu1", HostEntry(host="gpu1")),
        ("gpu1 slots=4", HostEntry(host="gpu1", slots=4)),
        ("gpu1 slots=4 max-slots=8", HostEntry(host="gpu1", slots=4)),
        ("gpu1:4", HostEntry(host="gpu1", slots=4)),
        ("gpu1 gpus=0,2", HostEntry(host="gpu1", gpus=(0, 2))),
        ("gpu1 gpus=2", HostEntry(host="gpu1", gpus=2)),
        ("gpu1 gpus=[3]", HostEntry(host="gpu1", gpus=(3,))),
        ("gpu1 gpus=free", HostEntry(host="gpu1", gpus="free")),
        ("  ada@gpu1.lab  # hers", HostEntry(host="ada@gpu1.lab")),
        ("gpu1 port=2222", HostEntry(host="ssh://gpu1:2222")),
        ("ssh://ada@gpu1:2222", HostEntry(host="ssh://ada@gpu1:2222")),
        ("ssh://[fd00::1]:2222", HostEntry(host="ssh://[fd00::1]:2222")),
        ("[fd00::1]", HostEntry(host="[fd00::1]")),
        ("ada@[fd00::1]:4", HostEntry(host="ada@[fd00::1]", slots=4)),
        ("fd00::1 gpus=1", HostEntry(host="[fd00::1]", gpus=1)),
        ("10.0.0.1", HostEntry(host="10.0.0.1")),
    ],
)
def test_a_line_names_a_host(line: str, entry: HostEntry) -> None:
    assert parse_hosts(line, name="hosts") == (entry,)


def test_comments_and_empty_lines_are_skipped() -> None:
    assert [entry.host for entry in parse_hosts("# ours\n\ngpu1\n  \n#gpu2\ngpu3\r\n", name="hosts")] == [
        "gpu1",
        "gpu3",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu1\n-oProxyCommand=x", "hosts:2: '-oProxyCommand=x' is not a host; write a name, an address, user@host or"),
        ("gpu 1", "hosts:1: '1' is not known; allowed are slots=, gpus=, port="),
        ("gpu1 slot=2", "hosts:1: 'slot=2' is not known; did you mean 'slots'?"),
        ("gpu1 slots=0", "hosts:1: slots is '0', but must be a whole number from 1 to 4096"),
        ("gpu1:many", "hosts:1: the number of slots after gpu1: is 'many', but must be"),
        ("gpu1 port=70000", "hosts:1: port is '70000', but must be a whole number from 1 to 65535"),
        ("gpu1 gpus=0", "hosts:1: gpus is 0, but must be a count >= 1"),
        ("gpu1 slots=1 gpus=1", "hosts:1: gpu1 has slots and gpus; keep one of them"),
        ("gpu1\ngpu2\ngpu1", "hosts:3: gpu1 is already on line 1"),
        ("# nothing\n", "hosts names no host"),
        ("gpu1;reboot", "hosts:1: 'gpu1;reboot' is not a host"),
        ("$(reboot)", "is not a host"),
    ],
)
def test_an_error_names_file_and_line(text: str, message: str) -> None:
    with pytest.raises(RequestError) as error:
        parse_hosts(text, name="hosts")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="hosts cannot be read: No such file or directory"):
        read_hostfile(tmp_path / "hosts")
    (tmp_path / "hosts").write_bytes(b"\xff\xfe")
    with pytest.raises(RequestError, match="it is not text"):
        read_hostfile(tmp_path / "hosts")


def test_hosts_on_the_command_line_have_commas_between_them() -> None:
    assert [entry.host for entry in parse_host_list("gpu1, ada@gpu2,gpu3:4,")] == ["gpu1", "ada@gpu2", "gpu3"]
    with pytest.raises(RequestError, match="--hosts is ',', but must name hosts"):
        parse_host_list(",")


@pytest.mark.parametrize(
    ("entry", "node"),
    [
        (HostEntry(host="a"), Node(host="a")),
        (HostEntry(host="a", slots=2), Node(host="a", ranks=2)),
        (HostEntry(host="a", gpus=(1,)), Node(host="a", gpus=(1,))),
    ],
)
def test_a_line_is_a_node_of_a_recipe(entry: HostEntry, node: Node) -> None:
    assert entry.node == node


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("gpu1", "gpu1"),
        ("ada@gpu1", "gpu1"),
        ("[fd00::1]", "fd00::1"),
        ("fd00::1", "fd00::1"),
        ("ssh://gpu1:2222", "gpu1"),
        ("ssh://ada@[fd00::1]:2222", "fd00::1"),
        ("ssh://ada@gpu1", "gpu1"),
    ],
)
def test_other_nodes_connect_to_the_address_alone(host: str, address: str) -> None:
    assert address_of(host) == address


# --- messages of ssh -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "stderr", "line"),
    [
        (255, "ssh: Could not resolve hostname gpu9: Name or service not known", "no such host: gpu9 is not in DNS"),
        (
            255,
            "ssh: Could not resolve hostname jump: Name or service not known\nkex_exchange_identification: x",
            "no such host: jump is",
        ),
        (
            255,
            "Host key for [::1]:22 has changed and you have",
            "its host key has changed: if expected, `ssh-keygen -R '[::1]:22'`",
        ),
        (
            255,
            "sh: 1: nc: not found\nkex_exchange_identification: Connection closed",
            "its ProxyCommand fails: sh: 1: nc: not found",
        ),
        (255, "ssh: connect to host a port 22: No route to host", "there is no route to it from here"),
        (255, "ssh: connect to host a port 22: Connection timed out", "it does not answer"),
        (
            255,
            "Connection timed out during banner exchange\nConnection to 1.2.3.4 port 22 timed out",
            "something listens",
        ),
        (255, "ada@a: Permission denied (publickey,password).", "it refuses the key: `ssh gpu9 true` must work"),
        (255, "Received disconnect from a port 22:2: Too many authentication failures", "it refuses the keys"),
        (255, "kex_exchange_identification: Connection closed by remote host", "it closed the connection"),
        (255, "/x: line 3: Bad configuration option: bogus\r\n", "ssh rejects its configuration: /x: line 3"),
        (255, "something \x1b[31mnew", "something ␛[31mnew"),
        (255, "", "ssh failed without a message"),
        (127, "bash: line 1: python3: command not found", "there is no python3"),
        (1, "fish: Unknown command: python3\npython3: command not found", "there is no python3"),
        (1, "python3 is 3.9", "its python3 is 3.9, but 3.10 or newer is needed"),
        (255, "Control socket connect(/c): Connection refused\nada@gpu9: Permission denied", "it refuses the key"),
        (1, "Traceback\nOSError: odd", "it failed: OSError: odd"),
        (1, "x" * 300, "it failed: " + "x" * 159 + "…"),
    ],
)
def test_a_failure_is_one_line_with_advice(code: int, stderr: str, line: str) -> None:
    assert explain_failure("gpu9", code, stderr).startswith(line)
