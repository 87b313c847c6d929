"""What the console assumes of Textual's internals holds in the installed version, and stands in one module."""

from __future__ import annotations

import ast
import asyncio
import functools
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import textual
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.drivers.headless_driver import HeadlessDriver
from textual.drivers.linux_driver import LinuxDriver
from textual.widgets import Markdown

import gputrain_tui.console
from gputrain_tui.console import textual_internals as internals
from gputrain_tui.help_topics import ORDER, read_topic

MODULES = [
    importlib.import_module(module.name)
    for module in pkgutil.walk_packages(gputrain_tui.console.__path__, "gputrain_tui.console.")
    if module.name != internals.__name__
]
ASSUMED: list[tuple[Callable[..., Any], list[str]]] = [
    (internals.XTermParser.feed, ["self", "data"]),
    (internals.XTermParser.tick, ["self"]),
    (LinuxDriver.run_input_thread, ["self"]),
    (LinuxDriver.process_message, ["self", "message"]),
    (LinuxDriver.write, ["self", "data"]),
    (LinuxDriver.flush, ["self"]),
    (internals.TrackedSlugs.slug, ["self", "text"]),
]
"""Methods that are called or overridden, with their parameters."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.AST) -> Iterator[str]:
    """Yield the private names of the methods in a piece of code, and of the attributes of ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            name = node.attr
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = node.name
        else:
            continue
        if is_private(name):
            yield name


@functools.cache
def names_of_class(cls: type) -> frozenset[str]:
    return frozenset(private_names(ast.parse(textwrap.dedent(inspect.getsource(cls)))))


@functools.cache
def names_of_textual() -> frozenset[str]:
    files = Path(textual.__file__).parent.rglob("*.py")
    return frozenset(name for file in files for name in private_names(ast.parse(file.read_text(encoding="utf-8"))))


def widgets() -> Iterator[tuple[type, list[type]]]:
    """Yield the console's classes that derive from Textual's, each with these."""
    for module in MODULES:
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == module.__name__:
                bases = [base for base in cls.__mro__ if base.__module__.partition(".")[0] == "textual"]
                if bases:
                    yield cls, bases


def test_no_other_module_imports_a_private_one_of_textual() -> None:
    imported = [
        f"{module.__name__}: {name}"
        for module in MODULES
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.ImportFrom | ast.Import)
        for alias in node.names
        for name in [f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name]
        if name.startswith("textual") and "._" in name
    ]
    assert imported == []


def test_no_private_name_of_a_widget_is_one_of_textuals_classes_below_it() -> None:
    """Such a name would override a method or replace an attribute."""
    classes = list(widgets())
    assert len(classes) > 40
    shared = [
        f"{cls.__name__}: {name}, of {base.__name__}"
        for cls, bases in classes
        for base in bases
        for name in names_of_class(cls) & names_of_class(base)
    ]
    assert shared == []


def test_every_private_attribute_is_one_of_our_own() -> None:
    for module in MODULES:
        tree = ast.parse(inspect.getsource(module))
        own = {
            node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }
        own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_private(node.attr)}
        assert (used - own) & names_of_textual() == set(), module.__name__


@pytest.mark.parametrize(("method", "parameters"), ASSUMED, ids=[method.__qualname__ for method, _ in ASSUMED])
def test_a_method_has_the_parameters_that_are_assumed(method: Callable[..., Any], parameters: list[str]) -> None:
    assert list(inspect.signature(method).parameters) == parameters


def test_the_driver_has_the_attributes_that_its_input_thread_reads() -> None:
    source = inspect.getsource(LinuxDriver.__init__)
    assert "self.fileno = " in source
    assert "self.exit_event = Event()" in source
    assert "self.run_input_thread()" in inspect.getsource(LinuxDriver)


def test_only_the_linux_driver_is_replaced() -> None:
    assert internals.paste_driver(LinuxDriver) is internals.PasteDriver
    assert internals.paste_driver(HeadlessDriver) is HeadlessDriver


def test_a_control_sequence_reaches_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(HeadlessDriver, "write", lambda driver, data: written.append(data))

    async def ring() -> None:
        app = App[None]()
        internals.write_to_terminal(app, "no terminal yet")
        async with app.run_test():
            internals.write_to_terminal(app, "\a")

    asyncio.run(ring())
    assert written.count("\a") == 1
    assert "no terminal yet" not in written


class Topics(App[None]):
    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Markdown()


def test_the_anchor_of_every_heading_is_the_one_that_textual_goes_to() -> None:
    async def missed() -> list[str]:
        app, found = Topics(), []
        async with app.run_test():
            for name in ORDER:
                lines = [line for line in read_topic(name).markdown.splitlines() if line.startswith("#")]
                await app.query_one(Markdown).update("\n\n".join(lines))  # the text between takes seconds
                headings = dict.fromkeys(line[3:] for line in lines if line.startswith("## "))
                go = app.query_one(Markdown).goto_anchor
                found += [f"{name}: {text}" for text in headings if not go(internals.heading_anchor(text))]
        return found

    assert asyncio.run(missed()) == []
