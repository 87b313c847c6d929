"""One run: how it goes, every rank, and what was found; the person chooses what to look at closely."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar, get_args

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.events import Resize
from textual.geometry import Size
from textual.widget import Widget

from gputrain_tui.console.actions import bindings
from gputrain_tui.console.panel_container import PANELS, PanelChoice, PanelContainer, PanelName, arrange
from gputrain_tui.console.screens.charts import CHARTS_S, ChartScreen
from gputrain_tui.console.widgets.arrivals import JoiningView
from gputrain_tui.console.widgets.band_chart import BandChart
from gputrain_tui.console.widgets.culprit import CulpritCard, culprit_height
from gputrain_tui.console.widgets.findings import Findings
from gputrain_tui.console.widgets.key_bar import KeyBar
from gputrain_tui.console.widgets.lateness_map import LatenessMap
from gputrain_tui.console.widgets.panel import Panel
from gputrain_tui.console.widgets.rank_grid import RankGrid
from gputrain_tui.console.widgets.run_header import RunHeader
from gputrain_tui.console.widgets.step_bars import StepBars

if TYPE_CHECKING:
    from gputrain_tui.console.live import LiveRun
    from gputrain_tui.console.widgets.filter_line import FilterLine
    from gputrain_tui.console.widgets.log_view import LogView

FOLLOW_S = 0.04
"""How long after the cursor the charts point at another rank."""


class RunScreen(ChartScreen):
    """A run, running or ended."""

    PLACE = "run"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("run")]

    def __init__(self, live: LiveRun) -> None:
        super().__init__(live)
        self.selected_rank: int | None = None
        """The rank that table, charts and log point at."""
        self.choice = PanelChoice(ranks=live.state.world_size)
        """What is shown, as far as the person chose it."""
        self._painted_at: dict[str | None, float] = {}
        """When each chart was last looked at, monotonic seconds."""
        self._right: PanelName | None = None
        """Of findings and log the one that was asked for; until then whatever has something to say."""
        self._pointed_out = False
        self._before: object = None
        self._settled: object = None
        """Version of the run at the last painting of charts, and when events had ceased."""
        self._following = False
        """Whether the charts are still to point at the rank under the cursor."""
        self._arranged: tuple[Size, PanelChoice] | None = None

    def compose(self) -> ComposeResult:
        """Yield the panels; ``container.arrange`` says where they stand."""
        live = self.live
        yield RunHeader(live, id="header")
        with PanelContainer(id="panels"):
            yield CulpritCard(live, id="culprit")
            yield RankGrid(live, id="ranks")
            yield JoiningView(live, id="joining")
            yield BandChart(live, "loss", "loss", "nats", id="loss")
            if live.state.world_size == 1:  # nobody to wait for
                yield BandChart(live, "step_ms", "step ms", empty="no step was measured yet", spiky=True, id="sync")
            else:
                waits = "no gradient synchronisation was measured yet"
                yield BandChart(live, "sync_exposed_ms", "sync wait ms", empty=waits, spiky=True, id="sync")
            yield StepBars(live, id="bars")
            yield LatenessMap(live, id="late")
            yield Findings(live, id="findings")
        yield KeyBar(self.PLACE)

    def on_mount(self) -> None:
        """Give the keys to the table."""
        self._arrange()
        self.query_one(RankGrid).focus()
        self.call_after_refresh(self._mount_log)

    def on_resize(self, event: Resize) -> None:
        """Find new places at once."""
        self._arrange()

    async def _mount_log(self) -> None:
        """Bring the log after the first frame: it is the one panel that needs more than lines."""
        from gputrain_tui.console.widgets.log_view import LogView

        if not self.query(LogView):
            await self.query_one("#panels").mount(LogView(self.live.run.dir, id="log"))
            self._arranged = None
            self._arrange()

    # The clock

    def tick(self) -> None:
        """Repaint what moved: the table every time, charts less often, and not all of them at the same beat."""
        self._arrange()
        now = time.monotonic()
        for turn, panel in enumerate(self._shown()):
            if panel.id == "ranks" or self._is_due(panel.id, turn, now):
                panel.tick()
        if self._is_due("header", 0, now):
            self.query_one(RunHeader).tick()
            self._settle()

    def _is_due(self, name: str | None, turn: int, now: float) -> bool:
        """Return whether a chart is to be painted again; the first time sets them apart by their turns."""
        before = self._painted_at.get(name)
        if before is not None and now - before < CHARTS_S:
            return False
        self._painted_at[name] = now if before is not None else now - turn % 3 * CHARTS_S / 3
        return True

    def _settle(self) -> None:
        """Point out the rank that failed, and bring the table's order up to date when events have ceased."""
        cause = self.live.state.root_cause
        if cause is not None and cause.rank is not None and not self._pointed_out:
            self._pointed_out = True
            if self.selected_rank is None:
                self.select(cause.rank)
        version = self.live.version
        if version == self._before and version != self._settled:
            self._settled = version
            self.query_one(RankGrid).redraw()
        self._before = version

    def repaint(self) -> None:
        """Bring everything up to date at once."""
        self._follow()
        self._painted_at.clear()
        self.tick()

    def _shown(self) -> list[Panel | LogView]:
        return [child for child in self.query_one("#panels").children if child.display]  # type: ignore[misc]

    # Where things stand

    def _wished(self, size: Size) -> PanelChoice:
        """Return what is to be shown in an area, which also depends on the run."""
        state = self.live.state
        card = self.query_one(CulpritCard)
        culprit = card.culprit()
        joining = all(view.last is None for view in state.ranks.values()) and not self.live.over
        most = max(size.height // 3, 5) if size.height < 44 else 14
        return PanelChoice(
            ranks=len(state.ranks),
            panel=self.choice.panel,
            right=self._right or ("findings" if state.past_findings or state.failures else "log"),
            zoomed=self.choice.zoomed,
            joining=joining,
            hosts=len({view.host for view in state.ranks.values()}) if joining else 1,
            card=culprit_height(culprit, size.width, most) if culprit is not None else 0,
        )

    def _arrange(self) -> None:
        """Show and hide panels, and lay them out anew, if there is a reason to."""
        container = self.query_one(PanelContainer)
        size = Size(max(self.app.size.width - 2, 0), max(self.app.size.height - 3, 0))
        choice = self._wished(size)
        if (size, choice) == self._arranged:
            return
        self._arranged = (size, choice)
        container.place(arrange(size.width, size.height, choice))

    def _look(self, *, panel: PanelName | None = None, zoomed: bool | None = None) -> None:
        """Change what is shown."""
        panel = self.choice.panel if panel is None else panel
        if panel in ("findings", "log"):
            self._right = panel
        self.choice = PanelChoice(
            ranks=self.choice.ranks,
            panel=panel,
            zoomed=self.choice.zoomed if zoomed is None else zoomed,
        )
        self._arrange()

    def _panel(self, name: str) -> Widget | None:
        return next(iter(self.query(f"#{name}")), None)

    # What the person does

    def action_show(self, name: str) -> None:
        """Show a panel; where it is shown already, give it the keys, and then the whole screen."""
        assert name in get_args(PanelName)
        panel: PanelName = name  # type: ignore[assignment]
        widget = self._panel(name)
        if widget is None:
            return
        visible = widget.display
        if self.choice.zoomed:
            self._look(panel=panel, zoomed=self.choice.panel != panel)
        elif not visible:
            self._look(panel=panel)
        elif not widget.can_focus or widget.has_focus:
            self._look(panel=panel, zoomed=True)
        self._focus(widget)

    def _focus(self, widget: Widget) -> None:
        grid = self.query_one(RankGrid)
        if widget.can_focus:
            widget.focus()
        elif grid.display:
            grid.focus()
        else:
            self.set_focus(None)

    def action_next_panel(self) -> None:
        """Show the next panel that is not to be seen yet, or zoom the next one."""
        there: list[PanelName] = [name for name in PANELS[1:] if self._panel(name) is not None]
        begin = there.index(self.choice.panel) + 1 if self.choice.panel in there else 0
        order = there[begin:] + there[:begin]
        hidden = [name for name in order if not self.query_one(f"#{name}").display]
        name = (order if self.choice.zoomed else hidden or order)[0]
        self._look(panel=name)
        self._focus(self.query_one(f"#{name}"))

    def action_zoom(self) -> None:
        """Give everything to the panel that was looked at last, or take it back."""
        focused = self.focused
        name = focused.id if focused is not None and not self.choice.zoomed else None
        panel: PanelName = name if name in ("findings", "log") else self.choice.panel  # type: ignore[assignment]
        self._look(panel=panel, zoomed=not self.choice.zoomed)
        self._focus(self.query_one(f"#{panel}"))

    def action_back(self) -> None:
        """Undo one thing: zoom, filter, selection."""
        grid = self.query_one(RankGrid)
        if self.choice.zoomed:
            self._look(zoomed=False)
            grid.focus()
        elif self.focused is not grid and grid.display:
            grid.focus()
        elif grid.filter_text:
            grid.set_filter("")
        elif self.selected_rank is not None:
            self.select(None)
        elif self.choice.panel == "ranks":
            self._look(panel="loss")

    def select(self, rank: int | None) -> None:
        """Point every panel at a rank, or at none."""
        self.selected_rank = rank
        self.query_one(RankGrid).show_rank(rank)
        self._point_at(rank)

    @on(RankGrid.Picked)
    def _picked(self, message: RankGrid.Picked) -> None:
        """Let the charts follow once the cursor is painted: a key held down moves it without them."""
        self.selected_rank = message.rank
        if not self._following:
            self._following = True
            self.set_timer(FOLLOW_S, self._follow)

    def _follow(self) -> None:
        if self._following:
            self._following = False
            self.select(self.selected_rank)

    @on(Findings.RankChosen)
    def _pointed(self, message: Findings.RankChosen) -> None:
        self.select(message.rank)

    @on(RankGrid.Opened)
    def _opened(self, message: RankGrid.Opened) -> None:
        self.open_rank(message.rank)

    def action_open_rank(self) -> None:
        """Open the selected rank, or the first one."""
        ranks = sorted(self.live.state.ranks)
        if self.selected_rank is not None or ranks:
            self.open_rank(self.selected_rank if self.selected_rank is not None else ranks[0])

    def open_rank(self, rank: int) -> None:
        """Show everything of one rank."""
        from gputrain_tui.console.screens.rank import RankScreen

        self.select(rank)
        self.app.push_screen(RankScreen(self.live, rank))

    def action_sort(self) -> None:
        """Sort the table by the next column."""
        self.query_one(RankGrid).sort_next()

    def action_reverse(self) -> None:
        """Turn the order of the table around."""
        self.query_one(RankGrid).reverse_sort()

    async def action_filter(self) -> None:
        """Ask which ranks to show."""
        from gputrain_tui.console.widgets.filter_line import FilterLine

        line: FilterLine | None = next(iter(self.query(FilterLine)), None)
        if line is None:
            grid = self.query_one(RankGrid)
            line = FilterLine(grid)
            await self.mount(line, before=self.query_one(KeyBar))
        line.ask()
