"""Files that a session of the host agent sends."""

from __future__ import annotations

from pathlib import Path

import pytest

from gputrain_tui.hosts.host_agent import MAX_DATA_BYTES, Session

MARK = b"\x00mark"


@pytest.mark.parametrize(("size", "sent"), [(MAX_DATA_BYTES, True), (MAX_DATA_BYTES + 1, False)])
def test_a_file_larger_than_a_frame_stays_on_the_host_and_the_session_goes_on(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], size: int, sent: bool
) -> None:
    run_dir = tmp_path / "runs" / "run"
    for folder in ("events", "logs", "digest", "nodes"):
        (run_dir / folder).mkdir(parents=True)
    with (run_dir / "logs" / "collectives_0").open("wb") as dump:
        dump.truncate(size)
    (run_dir / "nodes" / "0.json").write_text("{}")
    env = {"GPUTRAIN_HOME": str(tmp_path)}
    session = Session(
        MARK, {"run_dir": str(run_dir), "env": env, "node": 0, "ranks": [0], "sizes": {}, "attempt": "first"}
    )
    session.send_record()
    frames = capfdbinary.readouterr().out.split(MARK)[1:]
    assert [b"collectives_0" in frame[:200] for frame in frames] == ([True, False] if sent else [False])
    assert b'"nodes/0.json"' in frames[-1]
