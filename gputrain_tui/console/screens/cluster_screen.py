"""Cluster screen: GPUs and their users, on this machine and on the hosts of the recipe or hostfile.

This machine is sampled every two seconds. Every other host is surveyed over ssh in its own thread, so that one that
does not answer delays none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

from textual import on, work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.events import Resize

from gputrain_tui.console.host_choice import Host, active_plans, ranks_by_gpu, remote_hosts
from gputrain_tui.console.screens.console_screen import Page
from gputrain_tui.console.widgets.gpu_table import GpuTable, MachinePanel, ProcessList
from gputrain_tui.console.widgets.key_bar import KeyBar
from gputrain_tui.history.run_folders import Run, list_runs
from gputrain_tui.hosts.host_names import THIS_MACHINE, LocalFacts, is_local
from gputrain_tui.hosts.inventory import Inventory, take_inventory
from gputrain_tui.hosts.local_facts import local_facts
from gputrain_tui.hosts.ssh import MAX_PARALLEL_HOSTS
from gputrain_tui.hosts.survey import HostReport, HostSurvey
from gputrain_tui.plan.planner import Plan
from gputrain_tui.recipe.model import Node
from trainer.contract.errors import RequestError


class ClusterScreen(Page):
    """The cluster screen."""

    PLACE = "cluster"
    CSS_PATH = "cluster.tcss"
    AUTO_FOCUS = "#gpus"

    def __init__(
        self,
        *,
        take: Callable[[], Inventory] = take_inventory,
        survey: Callable[[str], HostReport] | None = None,
        runs: Callable[[], list[Run]] = list_runs,
        clocked: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the screen; ``survey``: over ssh by default; ``clocked``: whether it samples on a timer."""
        super().__init__()
        self._take = take
        self._surveys = HostSurvey()
        self._survey = survey or self._surveys
        self._runs = runs
        self._clocked = clocked
        self._now = now
        self._sampling = False
        self._machine_panel = MachinePanel(id="machine")
        self._table = GpuTable(id="gpus")
        self._process_list = ProcessList(id="processes")
        self._plans: list[tuple[str, Plan]] = []
        self._hosts: dict[str, Host] = {}
        # An executor of its own: hosts that do not answer must not use up the threads that a launch needs.
        self._threads = ThreadPoolExecutor(MAX_PARALLEL_HOSTS, thread_name_prefix="survey")

    def body(self) -> ComposeResult:
        with Vertical(id="machines"):
            yield self._machine_panel
            yield self._table
            yield self._process_list

    def on_mount(self) -> None:
        if self._clocked:
            self.set_interval(2.0, self._sample_if_current)

    def on_unmount(self) -> None:
        self._surveys.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def on_screen_resume(self) -> None:
        self._sample()

    def _sample_if_current(self) -> None:
        if self.is_current:
            self._sample()

    def action_sample(self) -> None:
        """Sample all hosts now, also those whose last survey failed."""
        for name, host in self._hosts.items():
            self._hosts[name] = replace(host, surveyed_at=None)
        self._sample()

    def _recipe_nodes(self) -> tuple[Node, ...]:
        """Return the nodes of the open recipe; without one, those of the hostfile."""
        recipe = self.session.recipe
        return recipe.cluster.nodes if recipe is not None else tuple(entry.node for entry in self.session.hosts)

    # This machine

    @work(group="inventory")
    async def _sample(self) -> None:
        if self._sampling:
            return
        self._sampling = True
        named = [*(node.host for node in self._recipe_nodes()), *(entry.host for entry in self.session.hosts)]
        inventory, facts, self._plans = await asyncio.to_thread(self._read_machine, named)
        self._sampling = False
        local = self._hosts.get(THIS_MACHINE, Host(name=THIS_MACHINE))
        run_ranks = ranks_by_gpu(inventory, self._plans, lambda host: is_local(host, facts))
        now = self._now()
        local = replace(local, inventory=inventory, run_ranks=run_ranks, surveyed_at=now, inventory_at=now)
        nodes = (*self._recipe_nodes(), *(entry.node for entry in self.session.hosts))
        away = remote_hosts(nodes, lambda host: is_local(host, facts))
        self._hosts = {local.name: local, **{name: self._hosts.get(name, Host(name=name)) for name in away}}
        self._survey_due_hosts()
        self._show()

    def _read_machine(self, named: Sequence[str | None]) -> tuple[Inventory, LocalFacts, list[tuple[str, Plan]]]:
        """Return the inventory of this machine, the facts that ``is_local`` needs, and the plans of active runs."""
        runs: list[Run] = []
        with suppress(RequestError):  # unreadable runs are left out of the GPU table
            runs = self._runs()
        return self._take(), local_facts(named), active_plans(runs)

    # Remote hosts

    def _survey_due_hosts(self) -> None:
        now = self._now()
        for name, host in list(self._hosts.items()):
            if not host.is_local and host.is_due(now, again_s=4.0, failed_s=20.0):
                self._hosts[name] = replace(host, surveying=True)
                self._survey_host(name)

    @work(group="hosts")
    async def _survey_host(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        report = await loop.run_in_executor(self._threads, partial(self._survey, name))
        before = self._hosts.get(name)
        if before is None:  # the host's recipe was closed meanwhile
            return
        now = self._now()
        after = replace(before, surveying=False, surveyed_at=now, problem=report.problem)
        if report.inventory is not None:
            run_ranks = ranks_by_gpu(report.inventory, self._plans, lambda host: host == name)
            after = replace(after, inventory=report.inventory, run_ranks=run_ranks, inventory_at=now)
        self._hosts[name] = after
        self._show()

    # Panels

    def _show(self) -> None:
        self._table.show(list(self._hosts.values()), now=self._now())
        self._arrange()
        self.query_one(KeyBar).redraw()

    def lacking(self) -> Collection[str]:
        has_gpus = any(host.gpus for host in self._table.hosts)
        return () if has_gpus else ("toggle_gpu", "choose_free", "use_gpus")

    def on_resize(self, event: Resize) -> None:
        self._arrange()

    def _arrange(self) -> None:
        """Set the heights: host and processes as many lines as they need, the GPU table the rest."""
        machine, table, processes = self._machine_panel, self._table, self._process_list
        host, gpu = table.host, table.gpu
        machine.host, processes.gpu = host, gpu
        processes.of = host.display_name if table.several and host is not None else ""
        spaced = self.size.height >= 30
        driver = host is not None and host.inventory is not None and host.inventory.driver
        lines = (4 if table.several and not spaced else 6 if driver or table.several else 5) + spaced
        left = self.size.height - 3 - lines - max(len(table.lines) + 2, 5) - spaced
        want_processes = 0 if gpu is None else 3 + len(gpu.processes or ())
        process_lines = min(want_processes, left - spaced)
        machine.styles.height = lines
        processes.display = process_lines >= 3
        processes.styles.height = max(process_lines, 0) + spaced
        # If everything fits, the processes stand directly under the last GPU.
        fits = table.lines and left >= 0
        table.styles.height = len(table.lines) + 2 + spaced if fits else "1fr"
        machine.redraw()
        processes.redraw()

    @on(GpuTable.Moved)
    def _pointed(self, event: GpuTable.Moved) -> None:
        self._arrange()

    def action_toggle_gpu(self) -> None:
        self._table.action_toggle_gpu()

    def action_choose_free(self) -> None:
        self._table.choose_free()

    @on(GpuTable.Chosen)
    async def _chosen(self, event: GpuTable.Chosen) -> None:
        await self.action_use_gpus()

    async def action_use_gpus(self) -> None:
        chosen = self._table.chosen_by_host()
        if not chosen:
            self.console.report("there is no free GPU to launch on; a recipe with cpu_ranks trains on the CPU")
            return
        self.session.gpus = chosen
        await self.console.action_go("launch")
