"""Numbers: how many there are, and the diagnosis' thresholds, each with a unit, a reason, a use, and a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import gputrain_tui.diagnosis

FOLDER = Path(gputrain_tui.diagnosis.__file__).parent
TABLE = FOLDER / "thresholds.py"
UNITS = {"s", "share", "%", "ratio", "correlation", "deviations"} | {
    "rows", "blocks", "samples", "steps", "events", "windows", "ranks",
}  # fmt: skip
TESTS = {
    node.name
    for path in Path(__file__).parent.glob("test_diagnosis*.py")
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef)
}


def rows() -> dict[str, tuple[ast.Call, str]]:
    """Return the call and the docstring of each threshold by name."""
    body = ast.parse(TABLE.read_text()).body
    return {
        ast.unparse(entry.targets[0]): (
            entry.value,
            text.value.value if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) else "",
        )
        for entry, text in zip(body, [*body[1:], None], strict=True)
        if isinstance(entry, ast.Assign)
        and isinstance(entry.value, ast.Call)
        and ast.unparse(entry.value.func) == "threshold"
    }  # type: ignore[return-value]


ROWS = rows()


@pytest.mark.parametrize("name", sorted(ROWS))
def test_a_threshold_has_a_unit_a_reason_and_a_test_that_exists(name: str) -> None:
    call, reason = ROWS[name]
    assert ast.literal_eval(call.args[1]) in UNITS
    assert len(reason) > 20
    assert f"test_{ast.literal_eval(call.args[2])}" in TESTS


def test_every_threshold_is_used() -> None:
    used = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for path in FOLDER.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load)
    }
    assert set(ROWS) - used == set()


def test_no_module_of_the_diagnosis_has_a_number_of_its_own() -> None:
    number = re.compile(r"^_?[A-Z][A-Z_0-9]*\b[^=]*= *-?[0-9.]", re.MULTILINE)
    assert {path.name: number.findall(path.read_text()) for path in FOLDER.glob("*.py")} == {
        path.name: [] for path in FOLDER.glob("*.py")
    }


def test_the_modules_have_at_most_300_numbers() -> None:
    """Each is one more thing to know: one that follows from another, or that nobody would miss, goes."""
    number = re.compile(r"^[A-Z_0-9]+(?:: [A-Za-z]+)? = -?[0-9].*", re.MULTILINE)
    root = FOLDER.parents[1]
    files = [path for package in ("gputrain_tui", "trainer") for path in (root / package).rglob("*.py")]
    numbers = [line for path in files for line in number.findall(path.read_text(encoding="utf-8"))]
    assert 100 < len(numbers) <= 300
