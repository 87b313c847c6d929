"""The console on machines behind a real sshd: seen, chosen, and in the launch."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from screens_at_rest import in_loop, open_screen, quiet_app, screen_text, settle
from ssh_server import SshServer, free_port
from test_other_machines import with_gpus

from gputrain_tui.console.screens.cluster_screen import ClusterScreen
from gputrain_tui.console.screens.launch_screen import LaunchScreen
from gputrain_tui.hosts.hostfile import HostEntry

RECIPE = '[[cluster.nodes]]\ncpu_ranks = 2\n\n[train]\ntask = "lm"\nmax_updates = 2\n\n[task]\ndata = "stdlib"\n'


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    monkeypatch.setenv("GPUTRAIN_HOME", str(tmp_path / "home"))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "tiny.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)


@in_loop
async def test_gpus_chosen_on_another_host_become_the_nodes_of_the_launch(server: SshServer, driver: Path) -> None:
    near, dead = with_gpus(server, driver, "near"), server.host("gone", port=free_port())
    app = quiet_app()
    app.session.hosts, app.session.hostfile = (HostEntry(host=near), HostEntry(host=dead)), "hosts"
    async with app.run_test(size=(140, 40)) as pilot:
        await open_screen(pilot, ClusterScreen(clocked=False, runs=list))
        text = screen_text(app)
        assert "1 of 2 free on 3 machines" in text
        assert "it refuses connections: is sshd running there" in text
        await pilot.press("f", "enter")
        await settle(pilot)
        launch = app.screen
        assert isinstance(launch, LaunchScreen)
        assert launch.draft is not None
        assert launch.draft.nodes() == [{"host": "near", "gpus": [1]}]
        while "GPU-bbbb" not in screen_text(app):  # the plan queried the host for its GPUs
            await pilot.pause()
            await settle(pilot)


@pytest.mark.timing
@in_loop
async def test_the_console_quits_at_once_while_a_host_does_not_answer() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        app = quiet_app()
        app.session.hosts = (HostEntry(host=f"ssh://192.0.2.9:{listening.getsockname()[1]}"),)
        loop = asyncio.get_running_loop()
        async with app.run_test(size=(120, 40)) as pilot:
            await app.push_screen(ClusterScreen(clocked=False, runs=list))
            while "querying" not in screen_text(app):
                await pilot.pause()
            begin = loop.time()
        assert loop.time() - begin < 0.9  # ssh itself would give up after a second
