"""This machine and the hosts of the recipe at hand: what is there, who uses it, and what the next launch may take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import msgspec
from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.events import Resize
from textual.message import Message

from gputrain_tui.addresses import local_facts
from gputrain_tui.commands.plan import span
from gputrain_tui.console.actions import bindings
from gputrain_tui.console.screens.page import Page
from gputrain_tui.console.widgets.canvas import Canvas
from gputrain_tui.console.widgets.drawing import EMPTY, Row, cut, headline
from gputrain_tui.console.widgets.gpu_table import GpuTable, Machine, Ours, Processes
from gputrain_tui.inventory import Inventory, take_inventory
from gputrain_tui.plan import LocalFacts, Plan, is_local
from gputrain_tui.recipe import Node, Recipe
from gputrain_tui.runs import Run, list_runs
from gputrain_tui.tables import printable
from trainer.errors import RequestError

LOOK_S = 2.0
"""How often the machine is looked at, at most."""
GOING = ("starting", "running", "stopping")


@dataclass(frozen=True, kw_only=True)
class Host:
    """One node of the recipe at hand."""

    name: str
    asks: str
    """What the recipe wants of it."""
    known: str
    """What is known of it."""
    here: bool


def ours_on(inventory: Inventory, runs: Iterable[Run], facts: LocalFacts) -> dict[int, Ours]:
    """Return which of this machine's GPUs the running runs have, by their plans."""
    by_name = {str(gpu.index): gpu.index for gpu in inventory.gpus} | {gpu.uuid: gpu.index for gpu in inventory.gpus}
    found: dict[int, Ours] = {}
    for run in runs:
        if run.state not in GOING:
            continue
        plan: Plan | None = None
        with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            plan = msgspec.json.decode(run.dir.plan.read_bytes(), type=Plan)
        for node in plan.nodes if plan is not None else ():
            if not is_local(node.host, facts):
                continue
            for rank, device in zip(node.ranks, node.devices, strict=False):
                index = by_name.get(str(device))
                if index is not None:
                    found.setdefault(index, Ours(run=run.id, rank=rank))
    return found


def hosts_of(recipe: Recipe, facts: LocalFacts) -> list[Host]:
    """Return the nodes of a recipe and what is known of them."""
    found = []
    for node in recipe.cluster.nodes:
        here = is_local(node.host, facts)
        known = "this machine" if here else "not asked yet"
        found.append(Host(name=node.host or "this machine", asks=wants(node), known=known, here=here))
    return found


def wants(node: Node) -> str:
    """Say what a node of a recipe asks for."""
    if node.cpu_ranks is not None:
        return f"{node.cpu_ranks} CPU rank{'s' * (node.cpu_ranks != 1)}"
    if isinstance(node.gpus, int):
        return f"{node.gpus} GPU{'s' * (node.gpus != 1)}"
    if node.gpus in ("all", "free"):
        return f"{node.gpus} GPUs"
    if isinstance(node.gpus, tuple):
        ids = [gpu for gpu in node.gpus if isinstance(gpu, int)]
        consecutive = len(ids) == len(node.gpus) > 1 and ids == list(range(ids[0], ids[0] + len(ids)))
        return f"GPU {span(ids) if consecutive else ', '.join(str(gpu)[:12] for gpu in node.gpus)}"
    return f"{node.ranks} ranks" if node.ranks is not None else "its GPUs, or one CPU rank"


def draw_hosts(recipe: Recipe | None, hosts: list[Host], width: int, height: int) -> list[Row]:
    """Return the hosts of the recipe at hand."""
    name = "hosts of the recipe" if recipe is None else f"hosts of {printable(recipe.name)}"
    rows: list[Row] = [
        headline(
            width,
            [(name, "title")],
            [[("1 node", "dim")] if len(hosts) == 1 else [(f"{len(hosts)} nodes", "dim")]] if hosts else [],
        )
    ]
    if not hosts:
        rows.append([("No recipe is open; ", "dim"), ("2", "key"), (" chooses one.", "dim")])
    wide = max((len(host.name) for host in hosts), default=0) + 2
    shown = hosts[: height - 1 - (len(hosts) > height - 1)]
    for index, host in enumerate(shown):
        rows.append(
            [
                (f"{index:>4}  ", "dim"),
                (printable(host.name).ljust(wide), "bright"),
                (host.asks.ljust(22), "bright"),
                (host.known, "good" if host.here else "dim"),
            ]
        )
    if len(shown) < len(hosts):
        rows.append([(f"      {EMPTY} and {len(hosts) - len(shown)} more", "dim")])
    return [cut(row, width) for row in rows[:height]]


class Hosts(Canvas):
    """The hosts of the recipe at hand."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.recipe: Recipe | None = None
        self.hosts: list[Host] = []

    def draw(self, width: int, height: int) -> list[Row]:
        """Return the hosts."""
        return draw_hosts(self.recipe, self.hosts, width, height)


class ClusterScreen(Page):
    """The machines."""

    PLACE = "cluster"
    CSS_PATH = "cluster.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("cluster")]

    class Looked(Message):
        """The machine was looked at."""

        def __init__(self, inventory: Inventory, ours: Mapping[int, Ours], facts: LocalFacts) -> None:
            super().__init__()
            self.inventory = inventory
            self.ours = ours
            self.facts = facts

    def __init__(
        self,
        *,
        take: Callable[[], Inventory] = take_inventory,
        runs: Callable[[], list[Run]] = list_runs,
        clocked: bool = True,
    ) -> None:
        """Make the screen.

        Args:
            take: looks at this machine.
            runs: lists the runs.
            clocked: whether it looks again by itself.
        """
        super().__init__()
        self._take = take
        self._runs = runs
        self._clocked = clocked
        self._looking = False

    def body(self) -> ComposeResult:
        """Yield the machine, its GPUs, the processes on one of them, and the other hosts."""
        with Vertical(id="machines"):
            yield Machine(id="machine")
            yield GpuTable(id="gpus")
            yield Processes(id="processes")
            yield Hosts(id="hosts")

    def on_mount(self) -> None:
        """Look at the machine, now and then again."""
        self.query_one(GpuTable).focus()
        if self._clocked:
            self.set_interval(LOOK_S, self._look_if_seen)

    def on_screen_resume(self) -> None:
        """Look at the machine when the screen is shown."""
        self.action_look()

    def _look_if_seen(self) -> None:
        if self.is_current:
            self.action_look()

    def action_look(self) -> None:
        """Look at the machine in the background, unless somebody is at it."""
        if not self._looking:
            self._looking = True
            self._look(self.desk.recipe)

    @work(thread=True, exclusive=True, group="inventory")
    def _look(self, recipe: Recipe | None) -> None:
        inventory = self._take()
        facts = local_facts(node.host for node in recipe.cluster.nodes) if recipe is not None else local_facts(())
        runs: list[Run] = []
        with suppress(RequestError):  # the runs cannot be read: then none of them is shown on a GPU
            runs = self._runs()
        self.post_message(self.Looked(inventory, ours_on(inventory, runs, facts), facts))

    @on(Looked)
    def _show(self, event: Looked) -> None:
        self._looking = False
        machine, table, hosts = self.query_one(Machine), self.query_one(GpuTable), self.query_one(Hosts)
        machine.inventory = event.inventory
        table.show(event.inventory, event.ours)
        recipe = self.desk.recipe
        hosts.recipe, hosts.hosts = recipe, hosts_of(recipe, event.facts) if recipe is not None else []
        hosts.redraw()
        machine.redraw()
        self._arrange()

    def on_resize(self, event: Resize) -> None:
        """Give every part the lines that it needs."""
        self._arrange()

    def _arrange(self) -> None:
        """Share the lines: the machine and the hosts what they need, the GPUs the rest."""
        table, processes, hosts = self.query_one(GpuTable), self.query_one(Processes), self.query_one(Hosts)
        processes.gpu = table.gpus[min(table.cursor, len(table.gpus) - 1)] if table.gpus else None
        gpu = processes.gpu
        spaced = self.size.height >= 30
        machine = self.query_one(Machine)
        lines = (6 if machine.inventory is None or machine.inventory.driver else 5) + spaced
        left = self.size.height - 3 - lines - max(len(table.gpus) + 2, 5) - spaced
        want_hosts = max(len(hosts.hosts), 1) + 1
        want_processes = 0 if gpu is None else 3 + len(gpu.processes or ())
        host_lines = min(want_hosts, max(left - min(want_processes, left // 2), 3))
        process_lines = min(want_processes, left - host_lines - spaced)
        machine.styles.height = lines
        hosts.styles.height = host_lines
        processes.display = process_lines >= 3
        processes.styles.height = max(process_lines, 0) + spaced
        # Where there is room, what is known of one GPU stands right below all of them.
        table.styles.height = len(table.gpus) + 2 + spaced if processes.display else "1fr"
        processes.redraw()

    @on(GpuTable.Moved)
    def _pointed(self, event: GpuTable.Moved) -> None:
        self._arrange()

    def action_toggle_gpu(self) -> None:
        """Choose the GPU with the cursor, or not."""
        self.query_one(GpuTable).action_toggle_gpu()

    def action_choose_free(self) -> None:
        """Choose all free GPUs, or none."""
        self.query_one(GpuTable).choose_free()

    @on(GpuTable.Chosen)
    async def _chosen(self, event: GpuTable.Chosen) -> None:
        await self.action_use_gpus()

    async def action_use_gpus(self) -> None:
        """Put the chosen GPUs, or the one with the cursor, into the launch."""
        table = self.query_one(GpuTable)
        if not table.gpus:
            self.console.say("there is no GPU to launch on; a recipe with cpu_ranks trains on the CPU")
            return
        self.desk.gpus = tuple(sorted(table.chosen)) or (table.gpus[table.cursor].index,)
        await self.console.action_go("launch")
