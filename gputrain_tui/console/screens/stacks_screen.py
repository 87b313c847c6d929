"""Stacks screen: the Python stacks of all ranks of a run or of one, asked for as it opens, equal ones together."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType

from gputrain_tui.console.screens.console_screen import ConsoleScreen
from gputrain_tui.console.screens.start_and_stop import confirm_stop_of_screen
from gputrain_tui.console.widgets.canvas import SCROLL_KEYS, Copyable
from gputrain_tui.console.widgets.key_bar import KeyBar
from gputrain_tui.console.widgets.run_header import RunHeader
from gputrain_tui.console.widgets.stack_view import GroupsView
from gputrain_tui.history.status_file import ENDED
from gputrain_tui.lifecycle.stack_request import TIMEOUT_S, request_stacks
from gputrain_tui.state.rank_stacks import group_stacks
from gputrain_tui.tables import ranks_text

if TYPE_CHECKING:
    from gputrain_tui.lifecycle.live_run import LiveRun


class StacksScreen(ConsoleScreen):
    """The stacks screen; answers are shown as they come."""

    PLACE = "stacks"
    AUTO_FOCUS = "#stacks"
    BINDINGS: ClassVar[list[BindingType]] = [*SCROLL_KEYS]

    def __init__(self, live: LiveRun, *, rank: int | None = None) -> None:
        """Make the screen of a run; ``rank``: the only one whose stack is shown, None for all."""
        super().__init__()
        self.live = live
        self._rank = rank
        self._request = ""
        """The request whose answers are shown; empty: the newest answer of each rank in the record is."""
        self._requested_at = 0.0
        self._problem = ""
        """Why the ranks could not be asked."""

    def compose(self) -> ComposeResult:
        yield RunHeader(self.live, id="header")
        yield GroupsView(id="stacks")
        live = self.live
        yield KeyBar(self.PLACE, over=lambda: live.over)

    def on_mount(self) -> None:
        self.action_ask()

    def action_ask(self) -> None:
        """Ask all ranks; of an ended run, show what its record has."""
        self._request = self._problem = ""
        if self.live.status not in (*ENDED, "deleted"):  # the nodes of a lost run may go on
            try:
                self._request = request_stacks(self.live.run.dir)
            except OSError as error:
                self._problem = f"{self.live.run.dir.stack_request} cannot be written: {error.strerror}"
        self._requested_at = time.monotonic()
        self._show()

    def tick(self) -> None:
        self.query_one(RunHeader).tick()
        self._show()

    def repaint(self) -> None:
        self.tick()

    def _show(self) -> None:
        state = self.live.state
        ranks = set(state.ranks) if self._rank is None else {self._rank}
        answers = [each for each in state.stacks.values() if each.request >= self._request and each.rank in ranks]
        silent = sorted(ranks - {each.rank for each in answers})
        self.query_one(GroupsView).show_groups(group_stacks(answers), self._note(len(answers), silent))

    def _note(self, answered: int, silent: list[int]) -> str:
        """Return the title's note: when the answers were given, and who has given none."""
        if self._problem:
            return self._problem
        if not self._request:
            recorded = "these were recorded" if answered else "its record has no stacks"
            return f"{self.live.id} has ended; {recorded}"
        at = time.strftime("%H:%M:%S", time.localtime(int(self._request) / 1e9))
        if not silent:
            return f"{answered} of {answered} ranks at {at}"
        if self.live.status not in ENDED and time.monotonic() - self._requested_at < TIMEOUT_S:
            return f"asked at {at}; {answered} of {answered + len(silent)} have answered"
        lost = self.live.message if self.live.status == "lost" else ""
        return f"no answer from {ranks_text(silent)}: {lost or 'ended, or its node agent or host does not answer'}"

    def action_threads(self) -> None:
        self.query_one(GroupsView).toggle_threads()

    def action_scroll_by(self, lines: int) -> None:
        self.query_one(GroupsView).wheel(lines)

    def action_edge(self, side: int) -> None:
        self.query_one(GroupsView).action_edge(side)

    def copyable(self) -> Copyable | None:
        return self.query_one(GroupsView).copyable()

    def action_stop_run(self) -> None:
        confirm_stop_of_screen(self.console, self.live)

    def action_back(self) -> None:
        self.dismiss()
