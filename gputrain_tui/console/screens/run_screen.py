"""Run screen: header, rank table, charts, findings and log of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from textual import on
from textual.app import ComposeResult
from textual.geometry import Size
from textual.widget import Widget

from gputrain_tui.console.panel_container import PANELS, PanelChoice, PanelContainer, PanelName, arrange
from gputrain_tui.console.screens.chart_screen import ChartScreen
from gputrain_tui.console.screens.start_and_stop import confirm_resume, relaunch
from gputrain_tui.console.widgets.canvas import Copyable
from gputrain_tui.console.widgets.findings import Findings
from gputrain_tui.console.widgets.hardware_lines import HardwareLines
from gputrain_tui.console.widgets.key_bar import KeyBar
from gputrain_tui.console.widgets.lateness_map import LatenessMap
from gputrain_tui.console.widgets.rank_columns import whole_width
from gputrain_tui.console.widgets.rank_grid import RankGrid
from gputrain_tui.console.widgets.rendezvous_panel import RendezvousView
from gputrain_tui.console.widgets.root_cause import RootCauseCard, draw_root_cause, failure_text
from gputrain_tui.console.widgets.run_header import RunHeader
from gputrain_tui.console.widgets.step_bars import StepBars
from gputrain_tui.state.finding_text import by_urgency

if TYPE_CHECKING:
    from gputrain_tui.lifecycle.live_run import LiveRun

CURSOR_DELAY_S = 0.04
"""Seconds before the charts highlight the rank under the cursor; a key held down thus redraws only the table."""


class RunScreen(ChartScreen):
    """The run screen."""

    PLACE = "run"
    AUTO_FOCUS = "#ranks"
    EVERY_TICK = "ranks"

    def __init__(self, live: LiveRun) -> None:
        super().__init__(live)
        self.grid = RankGrid(live, id="ranks")
        self.selected_rank: int | None = None
        """The rank that all panels highlight; None: none."""
        self.choice = PanelChoice(ranks=live.state.world_size)
        self._right_panel: PanelName | None = None
        """Findings or log, whichever was chosen last; None: findings if there are any, else the log."""
        self._cause_selected = False
        self._revealed_rank: int | None = None
        self._drawn_version: object = None
        """Version of the run at the last repaint of the header."""
        self._settled_version: object = None
        """Version of the run at the last redraw of the table after events ceased."""
        self._following = False
        """Whether a timer will make the charts highlight the rank under the cursor."""
        self._arranged: tuple[Size, PanelChoice] | None = None

    def compose(self) -> ComposeResult:
        live = self.live
        yield RunHeader(live, id="header")
        with PanelContainer(id="panels"):
            yield RootCauseCard(live, id="root_cause")
            yield self.grid
            yield RendezvousView(live, id="rendezvous")
            yield self.band_chart("loss", id="loss")
            # With one rank there is no synchronisation.
            yield self.band_chart("step_ms" if live.state.world_size == 1 else "sync_exposed_ms", id="sync")
            yield StepBars(live, id="bars")
            yield LatenessMap(live, id="late")
            yield Findings(live, id="findings")
            yield HardwareLines(live, id="hardware")
        yield KeyBar(self.PLACE, over=lambda: live.over, lacking=lambda: () if live.can_resume else ("resume",))

    def on_mount(self) -> None:
        self.place_panels()
        self.call_after_refresh(self._mount_log)

    async def _mount_log(self) -> None:
        """Mount the log after the first frame, which it would delay."""
        from gputrain_tui.console.widgets.log_view import LogView

        if not self.query(LogView):
            await self.query_one("#panels").mount(LogView(self.live.run.dir, live=self.live, id="log"))
            self._arranged = None
            self.place_panels()

    # Clock

    def tick(self) -> None:
        self.place_panels()
        super().tick()

    def after_events(self) -> None:
        """Select the failed rank once, reveal the rank of a new worst finding, and sort again after the last events."""
        super().after_events()
        cause = self.live.state.root_cause
        if cause is not None and cause.rank is not None and not self._cause_selected:
            self._cause_selected = True
            if self.selected_rank is None:
                self.select(cause.rank)
        self._reveal_worst_finding()
        version = self.live.version
        if version == self._drawn_version and version != self._settled_version:
            self._settled_version = version
            self.grid.redraw()
        self._drawn_version = version

    def _reveal_worst_finding(self) -> None:
        """Bring the rank of the worst finding into view, once for each."""
        flagged = [finding for finding in self.live.state.findings.values() if finding.rank is not None]
        worst = min(flagged, key=by_urgency, default=None)
        rank = worst.rank if worst is not None else None
        if rank != self._revealed_rank:
            self._revealed_rank = rank
            if rank is not None:
                self.grid.bring_into_view(rank)

    def repaint(self) -> None:
        self._follow()
        super().repaint()

    # Layout

    def _choice_for(self, size: Size) -> PanelChoice:
        state = self.live.state
        hosts = {view.host for view in state.ranks.values()}
        root_cause = self.query_one(RootCauseCard).root_cause()
        rendezvous = all(view.last is None for view in state.ranks.values()) and not self.live.over
        # The root cause card shows a failure in full: the findings are not needed for that alone.
        has_findings = bool(state.past_findings) or (bool(state.failures) and root_cause is None)
        most = max(size.height // 3, 5) if size.height < 44 else 14
        return replace(
            self.choice,
            ranks=len(state.ranks),
            right=self._right_panel or ("findings" if has_findings else "log"),
            rendezvous=rendezvous,
            hosts=len(hosts) if rendezvous else 1,
            # The findings may stand beside the table if the area is wide.
            table_cells=whole_width(len(state.ranks), [*filter(None, hosts)], balanced=state.shares.newest is not None)
            if size.width >= 160
            else 0,
            root_cause_lines=len(draw_root_cause(root_cause, size.width, most)) if root_cause is not None else 0,
        )

    def place_panels(self) -> None:
        size = self.panel_size
        choice = self._choice_for(size)
        if (size, choice) != self._arranged:
            self._arranged = (size, choice)
            self.query_one(PanelContainer).place(arrange(size.width, size.height, choice))

    def _choose(self, *, panel: PanelName | None = None, zoomed: bool | None = None) -> None:
        panel = self.choice.panel if panel is None else panel
        zoomed = self.choice.zoomed if zoomed is None else zoomed
        if panel == "hardware" and not zoomed:
            panel = "loss"
        if panel in ("findings", "log"):
            self._right_panel = panel
        self.choice = replace(self.choice, panel=panel, zoomed=zoomed)
        self.place_panels()

    # Actions

    def action_show(self, name: str) -> None:
        """Show a panel and focus it; zoom it if it is focused already, or visible without a focus of its own."""
        assert name in get_args(PanelName)
        panel: PanelName = name  # type: ignore[assignment]
        widget = self.query_one_optional(f"#{name}")
        if widget is None:
            return
        visible = widget.display
        if panel == "hardware":
            self._choose(panel=panel, zoomed=not visible)
        elif self.choice.zoomed:
            self._choose(panel=panel, zoomed=self.choice.panel != panel)
        elif not visible:
            self._choose(panel=panel)
        elif not widget.can_focus or widget.has_focus:
            self._choose(panel=panel, zoomed=True)
        self._focus(widget)

    def _focus(self, widget: Widget) -> None:
        if widget.can_focus:
            widget.focus()
        elif self.grid.display:
            self.grid.focus()
        else:
            self.set_focus(None)

    def action_next_panel(self) -> None:
        """Show the next hidden panel; while zoomed, zoom the next one."""
        names: list[PanelName] = [name for name in PANELS[1:] if self.query_one_optional(f"#{name}") is not None]
        begin = names.index(self.choice.panel) + 1 if self.choice.panel in names else 0
        order = names[begin:] + names[:begin]
        hidden = [name for name in order if not self.query_one(f"#{name}").display]
        name = (order if self.choice.zoomed else hidden or order)[0]
        self._choose(panel=name)
        self._focus(self.query_one(f"#{name}"))

    def action_zoom(self) -> None:
        """Zoom the focused panel, or the one chosen last; if a panel is zoomed, show all again."""
        focused = self.focused
        name = focused.id if focused is not None and not self.choice.zoomed else None
        panel: PanelName = name if name in ("findings", "log") else self.choice.panel  # type: ignore[assignment]
        self._choose(panel=panel, zoomed=not self.choice.zoomed)
        self._focus(self.query_one(f"#{panel}"))

    def copyable(self) -> Copyable | None:
        root_cause = self.query_one(RootCauseCard).root_cause()
        if root_cause is not None:
            return Copyable(failure_text(root_cause), "the failure")
        return self.query_one(Findings).copyable()

    def action_back(self) -> None:
        """Undo the first that applies: charts' cursor, range, zoom, focus of a panel, filter, selected rank."""
        if self.view_back():
            return
        if self.choice.zoomed:
            self._choose(zoomed=False)
            self.grid.focus()
        elif self.focused is not self.grid and self.grid.display:
            self.grid.focus()
        elif self.grid.filter_text:
            self.grid.set_filter("")
        elif self.selected_rank is not None:
            self.select(None)
        elif self.choice.panel == "ranks":
            self._choose(panel="loss")

    def select(self, rank: int | None) -> None:
        self.selected_rank = rank
        self.grid.show_rank(rank)
        self._highlight_rank(rank)

    @on(RankGrid.Picked)
    def _picked(self, message: RankGrid.Picked) -> None:
        """Highlight the rank in the charts after ``CURSOR_DELAY_S``."""
        self.selected_rank = message.rank
        if not self._following:
            self._following = True
            self.set_timer(CURSOR_DELAY_S, self._follow)

    def _follow(self) -> None:
        if self._following:
            self._following = False
            self.select(self.selected_rank)

    @on(Findings.RankChosen)
    def _pointed(self, message: Findings.RankChosen) -> None:
        self.select(message.rank)

    @on(Findings.Overflowed)
    def _overflowed(self, message: Findings.Overflowed) -> None:
        self._choose(panel="findings", zoomed=True)

    @on(RankGrid.Opened)
    def _opened(self, message: RankGrid.Opened) -> None:
        self.open_rank(message.rank)

    def action_open_rank(self) -> None:
        ranks = sorted(self.live.state.ranks)
        if self.selected_rank is not None or ranks:
            self.open_rank(self.selected_rank if self.selected_rank is not None else ranks[0])

    def open_rank(self, rank: int) -> None:
        from gputrain_tui.console.screens.rank_screen import RankScreen

        self.select(rank)
        self.app.push_screen(RankScreen(self.live, rank))

    def action_stacks(self) -> None:
        from gputrain_tui.console.screens.stacks_screen import StacksScreen

        self.app.push_screen(StacksScreen(self.live))

    # Actions after the end

    def action_resume(self) -> None:
        if self.live.over:
            confirm_resume(self.console, self.live.run)
        else:
            self.console.report(f"{self.live.id} is {self.live.status}; S stops it")

    async def action_relaunch(self) -> None:
        await relaunch(self.console, self.live.run)

    def action_compare(self) -> None:
        """Compare with another run of the same recipe: the newest before this one, or else after it."""
        run = self.live.run
        others = self.runs_of_recipe()
        if not others:
            text = f"no other of the newest runs is one of {run.status.recipe}; History (4) compares any two"
            self.console.report(text)
            return
        other = next((each for each in others if each.id < run.id), others[0])
        from gputrain_tui.console.screens.compare_screen import CompareScreen

        self.app.push_screen(CompareScreen([other, run]))

    def action_sort(self) -> None:
        self.grid.sort_next()

    def action_reverse(self) -> None:
        self.grid.sort_by(self.grid.sort_key)

    def action_one_of_each(self) -> None:
        if not self.grid.show_one_of_each():
            self.console.report("no process group is of several ranks but not of all")

    async def action_filter(self) -> None:
        from gputrain_tui.console.widgets.line_input import FilterLine

        line = self.query_one_optional(FilterLine)
        if line is None:
            line = FilterLine(self.grid)
            await self.mount(line, before=self.query_one(KeyBar))
        line.open()
