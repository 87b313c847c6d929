"""Calls after the import of a module."""

from __future__ import annotations

import importlib
import sys

import pytest

from trainer.telemetry.instrument.started_process import after_import


def test_each_of_several_callers_is_called_once_and_the_module_keeps_its_loader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before, called = list(sys.meta_path), list[int]()
    for number in range(3):
        after_import("colorsys", lambda number=number: called.append(number))  # type: ignore[misc]
    module = importlib.import_module("colorsys")
    assert called == [0, 1, 2]
    assert type(module.__loader__).__name__ == type(sys.modules["json"].__loader__).__name__
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    assert sys.meta_path == before
