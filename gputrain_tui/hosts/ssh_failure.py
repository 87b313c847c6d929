"""Pure: explains a failure of ssh, or of a program on a host, in one line with its remedy."""

from __future__ import annotations

import re

from gputrain_tui.tables import printable

MAX_LINE_CHARS = 160
"""Limit of a quoted line of ssh or the host: it shares a table's row with other columns."""

SSH_FAILED = 255
"""Exit code of ssh when the connection fails; any other is the remote command's."""

REASONS = (
    (r"could not resolve hostname", "no such host: the name is not in DNS or ~/.ssh/config"),
    (r"connection refused", "it refuses connections: is sshd running there, and on this port?"),
    (r"no route to host|network is unreachable", "there is no route to it from here"),
    (r"timed out during banner|timed out waiting", "something listens there, but no ssh server answers"),
    (r"timed out", "it does not answer"),
    (r"host identification has changed", "its host key has changed: if expected, `ssh-keygen -R {host}`"),
    (r"host key verification failed|host key is known", "its host key is not known yet: run `ssh {host}` once"),
    (r"permission denied", "it refuses the key: `ssh {host} true` must work without a password"),
    (r"too many authentication failures", "it refuses the keys: name one with IdentityFile in ~/.ssh/config"),
    (r"connection (closed|reset)|kex_exchange_identification|broken pipe", "it closed the connection"),
    (r"bad configuration option|can't open user config", "ssh rejects its configuration: {line}"),
)
"""Patterns of ssh's messages, in any case → explanation; the first match counts."""

OLD_PYTHON = "its python3 is {version}, but 3.10 or newer is needed"


def explain_failure(host: str, code: int, stderr: str) -> str:
    """Explain in one line why ssh, or the program on the host, has ended with this code and standard error."""
    lines = [" ".join(line.split()) for line in stderr.splitlines() if line.strip()]
    # ssh goes on without a shared connection whose process has ended.
    lines = [line for line in lines if not line.startswith("Control socket connect")]
    last = _shortened(lines[-1]) if lines else ""
    if code == SSH_FAILED:
        for pattern, reason in REASONS:
            if found := next((line for line in lines if re.search(pattern, line, re.IGNORECASE)), None):
                return reason.format(host=printable(host), line=_shortened(found))
        return last or "ssh failed without a message"
    if code == 127 or "python3: command not found" in stderr:
        return "there is no python3"
    if version := re.search(r"python3 is (3\.\d+|2\.\d+)", stderr):
        return OLD_PYTHON.format(version=version[1])
    return f"it failed: {last}" if last else f"it failed with exit code {code}"


def _shortened(line: str) -> str:
    line = printable(line)
    return line if len(line) <= MAX_LINE_CHARS else line[: MAX_LINE_CHARS - 1] + "…"
