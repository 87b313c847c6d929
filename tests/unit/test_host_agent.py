"""Files that a session of a node sends."""

from __future__ import annotations

from pathlib import Path

import pytest

from gputrain_tui.hosts.host_frames import MAX_DATA_BYTES
from gputrain_tui.hosts.host_session import Session


@pytest.mark.parametrize(("size", "sent"), [(MAX_DATA_BYTES, True), (MAX_DATA_BYTES + 1, False)])
def test_a_file_larger_than_a_frame_stays_on_the_host_and_the_session_goes_on(
    tmp_path: Path, size: int, sent: bool
) -> None:
    run_dir = tmp_path / "runs" / "run"
    for folder in ("events", "logs", "digest", "nodes"):
        (run_dir / folder).mkdir(parents=True)
    with (run_dir / "logs" / "collectives_0").open("wb") as dump:
        dump.truncate(size)
    (run_dir / "nodes" / "0.json").write_text("{}")
    env = {"GPUTRAIN_HOME": str(tmp_path)}
    request = {"run_dir": str(run_dir), "env": env, "node": 0, "ranks": [0], "sizes": {}, "attempt": "first"}
    frames, _ = Session({**request, "leased": False}).growth(1)
    assert [each.name for each in frames] == [*(["logs/collectives_0"] if sent else []), "nodes/0.json"]
