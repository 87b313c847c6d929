"""Pure: explains in one line why a host could not be asked, and what to do about it."""

from __future__ import annotations

import re

from gputrain_tui.tables import printable

LONGEST = 160
"""Characters of a line that ssh or the host said itself."""

SSH_FAILED = 255
"""What ssh exits with when the connection fails; anything else is the exit code of the command."""

REASONS = (
    (r"could not resolve hostname", "no such host: neither DNS nor ~/.ssh/config knows the name"),
    (r"connection refused", "it refuses connections: is sshd running there, and on this port?"),
    (r"no route to host|network is unreachable", "there is no route to it from here"),
    (r"timed out during banner|timed out waiting", "something listens there, but no ssh server answers"),
    (r"timed out", "it does not answer"),
    (r"host identification has changed", "its host key has changed: `ssh-keygen -R {host}` if that is right"),
    (r"host key verification failed|host key is known", "its host key is not known yet: run `ssh {host}` once"),
    (r"permission denied", "it refuses the key: `ssh {host} true` must work without a password"),
    (r"too many authentication failures", "it refuses the keys: name one with IdentityFile in ~/.ssh/config"),
    (r"connection (closed|reset)|kex_exchange_identification|broken pipe", "it closed the connection"),
    (r"bad configuration option|can't open user config", "ssh does not take its configuration: {line}"),
)
"""What ssh says, in any case of letters, and what that means; the first that matches."""

OLD_PYTHON = "its python3 is {version}, but 3.10 or newer is needed"


def why_not(host: str, code: int, stderr: str) -> str:
    """Say why ssh, or the command that it was to run, failed.

    Args:
        host: as the person names it.
        code: of ssh.
        stderr: what ssh and the host said.
    """
    lines = [" ".join(line.split()) for line in stderr.splitlines() if line.strip()]
    last = _short(lines[-1]) if lines else ""
    if code == SSH_FAILED:
        for pattern, reason in REASONS:
            if found := next((line for line in lines if re.search(pattern, line, re.IGNORECASE)), None):
                return reason.format(host=printable(host), line=_short(found))
        return last or "ssh failed and does not say why"
    if code == 127 or "python3: command not found" in stderr:
        return "there is no python3"
    if version := re.search(r"python3 is (3\.\d+|2\.\d+)", stderr):
        return OLD_PYTHON.format(version=version[1])
    return f"its inventory failed: {last}" if last else f"its inventory failed with exit code {code}"


def _short(line: str) -> str:
    line = printable(line)
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"
