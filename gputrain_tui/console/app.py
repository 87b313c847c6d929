"""The Textual app, which wires screens to runs.

Screens own their state; actions on runs use the functions of the commands. Leaving the console never touches a run.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

from rich.console import RenderableType
from textual import events
from textual.app import SystemCommand
from textual.await_complete import AwaitComplete
from textual.binding import BindingType
from textual.command import CommandList, CommandPalette
from textual.driver import Driver
from textual.errors import NoWidget
from textual.geometry import Region
from textual.screen import ModalScreen, Screen
from textual.widget import AwaitMount, Widget
from textual.widgets import Input

from gputrain_tui.console import settings
from gputrain_tui.console.actions import EVERYWHERE, NEW_RECIPE, available, bindings
from gputrain_tui.console.ordered_keys import OrderedKeys
from gputrain_tui.console.ramp import LIGHT_THEME
from gputrain_tui.console.screens.console_screen import LaunchSession, next_of
from gputrain_tui.console.screens.start_and_stop import start_demo
from gputrain_tui.console.terminal import EndNotice, load_tmux_buffer, trim_stderr
from gputrain_tui.console.textual_internals import paste_driver, write_to_terminal
from gputrain_tui.help_topics import section_heading
from gputrain_tui.history.run_folders import Run, list_runs
from gputrain_tui.history.status_file import ENDED
from gputrain_tui.lifecycle.live_run import BACKLOG_PAUSE_S, FIRST_POLL_BUDGET_S, LiveRun
from trainer.contract.errors import RequestError

if TYPE_CHECKING:
    from gputrain_tui.console.screens.console_screen import AppProtocol
    from gputrain_tui.hosts.hostfile import HostEntry

TOAST_READ_S = 2.0
"""Least seconds for which a notification is shown before a key removes it."""
THEMES = ("textual-dark", "textual-light", "ansi-dark", "ansi-light")
"""Themes that the theme key goes through; the last two use the terminal's own sixteen colours."""


def _screen(module: str, name: str) -> Screen[Any]:
    """Import a screen's class when it is first shown, and return an instance."""
    return cast(Screen[Any], getattr(importlib.import_module(f"gputrain_tui.console.screens.{module}"), name)())


class Palette(CommandPalette):
    """Command palette that tolerates clicks from before a change of the terminal's size, and a list without lines."""

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether an action is enabled: one that moves by lines of the list only if any of it is visible."""
        has_lines = all(commands.scrollable_content_region for commands in self.query(CommandList))
        return super().check_action(action, parameters) if action != "command_list" or has_lines else False

    def get_widget_at(self, x: int, y: int) -> tuple[Widget, Region]:
        try:
            return super().get_widget_at(min(x, self.size.width - 1), min(y, self.size.height - 1))
        except NoWidget:  # a click that comes before the palette has its layout in a terminal that became larger
            return self.app.screen_stack[0], Region()


class GputrainApp(OrderedKeys):
    """The console's Textual app."""

    TITLE = "gputrain"
    CSS_PATH = "console.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings(EVERYWHERE)]
    MODES: ClassVar[dict[str, str | Callable[[], Screen[Any]]]] = {
        "cluster": partial(_screen, "cluster_screen", "ClusterScreen"),
        "launch": partial(_screen, "launch_screen", "LaunchScreen"),
        "history": partial(_screen, "history_screen", "HistoryScreen"),
    }

    def __init__(
        self,
        run: Run | None = None,
        *,
        fps: float | None = None,
        runs: Callable[[], list[Run]] = list_runs,
        follow: Callable[[Run], LiveRun] = LiveRun,
        clocked: bool = True,
        hosts: tuple[HostEntry, ...] = (),
    ) -> None:
        """Make the console.

        ``run`` is opened at once; ``fps``: most repaints per second, 10 if None; ``clocked``: whether a timer calls
        ``poll``, which a test calls itself; with ``hosts``, of a hostfile, the console begins with the cluster screen.
        """
        # NO_COLOR: do not convert the terminal's own colours, since the converted greys would be colours too.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self.live: LiveRun | None = None
        self.session = LaunchSession(hosts=hosts)
        self._leaving = False
        self._reported_at = math.inf
        """Time of the last notification, on the clock of events."""
        self._first_run = run
        self._fps = fps or 10.0
        self._runs = runs
        self._follow = follow
        self._clocked = clocked
        self._catching_up = False
        """Whether a timer will read the next portion of a backlog."""
        self._run_mode = ""
        self._opened = 0
        self._seen_version: int | None = None
        self._idle_polls = 0
        self._end_notice = EndNotice(self._write_to_terminal, os.environ)
        self.supervisors: list[subprocess.Popen[bytes]] = []
        """Supervisors of runs launched from this console; each launch polls them, so that an ended one is no zombie."""
        chosen = settings.theme(os.environ)
        self.theme = chosen if chosen in self.available_themes else THEMES[0]

    # Start, clock, end

    async def on_mount(self) -> None:
        self._catch_signals()
        if self._clocked:
            self.set_interval(1 / self._fps, self.poll)
            self.set_interval(60.0, trim_stderr)
        await self._begin()

    async def _begin(self) -> None:
        runs = [] if self._first_run is not None else self.list_runs()
        going = next((run for run in runs if run.state not in (*ENDED, "lost")), None)
        first = self._first_run or going
        if first is not None:
            await self.open_run(first)
        else:
            await self.switch_mode("cluster" if self.session.hosts else "history")

    async def on_event(self, event: events.Event) -> None:
        """Drop keys and clicks after the exit: they are meant for the shell."""
        if not (self._leaving and isinstance(event, events.InputEvent)):
            await super().on_event(event)

    def before_key(self, event: events.Key) -> bool:
        """Clear notifications shown for ``TOAST_READ_S``; return whether the key counts: not after the exit."""
        if event.time - self._reported_at > TOAST_READ_S:
            self.clear_notifications()  # a key after that long means that they were read
        return not self._leaving

    def _catch_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # signals belong to the main thread
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, partial(self.exit, None, 128 + number))

    def poll(self) -> None:
        """Read appended events and repaint the screen; after 2 s without an event only every 0.5 s, as clocks do."""
        self._idle_polls += 1
        if self._idle_polls > 2.0 * self._fps and self._idle_polls % max(int(0.5 * self._fps), 1):
            return
        if not self._catching_up:
            self._read_on()
        if self.live is not None:
            self._end_notice.check(self.live)
        version = self.live.version if self.live is not None else None
        if version != self._seen_version:
            self._seen_version, self._idle_polls = version, 0
        if self._clocked:
            self.call_later(self.tick)  # after a key that was pressed meanwhile
        else:
            self.tick()

    def _write_to_terminal(self, text: str) -> None:
        if settings.notifies(os.environ):
            write_to_terminal(self, text)

    def _turn_notices(self, on: bool) -> None:
        settings.save("notify", on)
        self.report(f"notices at the end of a run are {'on' if on else 'off'}")

    def tick(self) -> None:
        """Repaint the changed panels of the active screen, or of the one behind a dialog or the palette."""
        screen = self.screen if hasattr(self.screen, "tick") else self.screen_stack[0]
        if hasattr(screen, "tick") and screen.is_mounted:  # one that was opened just now has no panels yet
            screen.tick()

    def _read_on(self) -> None:
        """Read one portion of the record, and schedule the next while there is a backlog."""
        self._catching_up = self.live is not None and self.live.poll() and self._clocked
        if self._catching_up:
            self.set_timer(BACKLOG_PAUSE_S, self._read_on)

    def exit(self, result: int | None = None, return_code: int = 0, message: RenderableType | None = None) -> None:
        self._leaving = True
        super().exit(result, return_code, message)

    def on_unmount(self) -> None:
        """Close the record; the run goes on."""
        if self.live is not None:
            self.live.close()

    # Screens

    async def action_go(self, name: str) -> None:
        if name != "run":
            await self.switch_mode(name)
        elif self.live is not None:
            await self.switch_mode(self._run_mode)
        elif runs := self.list_runs():
            await self.open_run(runs[0])
        else:
            self.report("no run yet; d trains the demo, 2 opens a recipe")
            await self.switch_mode("history")

    async def open_run(self, run: Run) -> None:
        if self.live is not None and self.live.id == run.id:
            await self.switch_mode(self._run_mode)
            return
        from gputrain_tui.console.screens.run_screen import RunScreen

        former, former_mode = self.live, self._run_mode
        live = self.live = self._follow(run)
        self._end_notice.check(live)
        live.poll(FIRST_POLL_BUDGET_S)
        self._opened += 1
        self._run_mode = f"run-{self._opened}"
        self.add_mode(self._run_mode, lambda: RunScreen(live))
        await self.switch_mode(self._run_mode)
        if former is not None:
            former.close()
            await self.remove_mode(former_mode)

    def switch_mode(self, mode: str) -> AwaitMount:
        """Close dialogs and the palette, which a late click must not reach, and switch the mode."""
        if mode != self.current_mode:
            while isinstance(self.screen, ModalScreen):
                self.pop_screen()
        return super().switch_mode(mode)

    def pop_screen(self) -> AwaitComplete:
        """Pop the screen on top unless it is the mode's only one: a late event may pop a second time."""
        return super().pop_screen() if len(self.screen_stack) > 1 else AwaitComplete()

    async def action_quit(self) -> None:
        if names := ", ".join(draft.name for draft in self.session.drafts.values() if draft.changes):
            lost = f"Unsaved changes of {names} will be lost."
            self.confirm("Leave without saving?", lost, yes="Leave", act=self.exit)
        else:
            self.exit()

    def action_help_quit(self) -> None:
        typing = "esc, then q" if isinstance(self.focused, Input) else "q"
        self.report(f"{typing} leaves the console; runs continue")

    def action_command_palette(self) -> None:
        if not isinstance(self.screen, Palette):
            self.push_screen(Palette(id="--command-palette"))

    def action_help(self) -> None:
        from gputrain_tui.console.screens.help_screen import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(self.place, *self._help_position()))

    def _help_position(self) -> tuple[str, str]:
        """Return the topic of the help, and the heading in it, for the field or the panel under the cursor."""
        from gputrain_tui.console.screens.help_screen import TOPICS
        from gputrain_tui.console.widgets.form import Form

        if isinstance(self.focused, Form) and self.focused.field is not None:
            return section_heading(self.focused.field.key)
        panel = self.focused.id if self.focused is not None else None
        return (TOPICS.get(panel or "", "") if self.place == "run" else ""), ""

    def action_next_theme(self) -> None:
        self.theme = next_of(THEMES, self.theme) if self.theme in THEMES else THEMES[0]
        settings.save("theme", self.theme)

    @property
    def place(self) -> str:
        places = (getattr(screen, "PLACE", "") for screen in reversed(self.screen_stack))
        return next(filter(None, places), EVERYWHERE)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        for action in available(str(getattr(screen, "PLACE", EVERYWHERE))):
            if action.name not in ("command_palette", "help_quit"):
                title = f"{action.label} ({action.key_text})"
                yield SystemCommand(title, action.description, partial(screen.run_action, action.path))
        if getattr(screen, "PLACE", "") != "launch":
            yield SystemCommand("New recipe", NEW_RECIPE, self.action_new_recipe)
        yield SystemCommand("Choose a theme", "Show all themes", self.action_change_theme)
        on = settings.notifies(os.environ)
        help = f"{'Do not ring or' if on else 'Ring and'} notify the desktop when the run on the screen ends"
        yield SystemCommand(f"Notices {'off' if on else 'on'}", help, partial(self._turn_notices, not on))
        yield SystemCommand("Picture", "Save this screen as an SVG file", partial(self.deliver_screenshot))

    def get_driver_class(self) -> type[Driver]:
        return paste_driver(super().get_driver_class())

    def get_css_variables(self) -> dict[str, str]:
        """Return the theme's variables, in the light theme with darker colours than Textual's."""
        variables = super().get_css_variables()
        return variables | LIGHT_THEME if self.theme == "textual-light" else variables

    # Called by screens

    def list_runs(self) -> list[Run]:
        """Return the newest runs, newest first; if their folder cannot be read, report the error and return none."""
        try:
            return self._runs()
        except RequestError as error:
            self.report(str(error), alarm=True)
            return []

    def copy(self, text: str, label: str) -> None:
        """Copy text to the terminal's clipboard (OSC 52) and to tmux, and name it by ``label`` in a notification."""
        super().copy_to_clipboard(text)
        if os.environ.get("TMUX") and not self.is_headless:
            self.run_worker(partial(load_tmux_buffer, text), thread=True, group="clipboard")
        self.report(f"copied {label}")

    def copy_to_clipboard(self, text: str) -> None:
        lines = text.count("\n") + 1
        self.copy(text, f"{lines} lines" if lines > 1 else f"{len(text)} character{'s' * (len(text) != 1)}")

    def report(self, text: str, *, alarm: bool = False) -> None:
        """Show a notification, which a timeout or a key removes; ``alarm``: as an error, for longer."""
        self._reported_at = time.monotonic()
        self.notify(text, severity="error" if alarm else "information", markup=False, timeout=10 if alarm else 4)

    def confirm(self, question: str, consequence: str, *, yes: str, act: Callable[[], object]) -> None:
        from gputrain_tui.console.screens.confirm import Confirm

        def answered(agreed: bool | None) -> None:
            if agreed:
                act()

        self.push_screen(Confirm(question, consequence, yes=yes), answered)

    def action_demo(self) -> None:
        """Launch the demo as ``gputrain run recipes/demo.toml --detach`` does; if there are runs, after a dialog."""
        if self.list_runs():
            consequence = "Two processes train a small model on this machine's CPU, about half a minute."
            self.confirm("Run the demo?", consequence, yes="Run it", act=partial(start_demo, self))
        else:
            start_demo(self)

    async def action_new_recipe(self) -> None:
        self.session.wants_new = True
        await self.action_go("launch")


if TYPE_CHECKING:
    PROTOCOL_CHECK: type[AppProtocol] = GputrainApp  # for mypy
