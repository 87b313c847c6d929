"""The JSON Schemas of ``report`` and ``compare`` say what each field holds."""

from __future__ import annotations

import json

import msgspec
import pytest

from gputrain_tui import cli
from gputrain_tui.report.field_docs import described_schema
from gputrain_tui.report.report_fields import RunReport
from gputrain_tui.report.run_comparison import RunComparison


@pytest.mark.parametrize("kind", [RunReport, RunComparison])
def test_every_field_of_a_schema_has_its_description_and_keeps_its_type(kind: type[msgspec.Struct]) -> None:
    schema, plain = described_schema(kind), msgspec.json.schema(kind)
    assert schema["$defs"].keys() == plain["$defs"].keys()
    for title, definition in schema["$defs"].items():
        for name, field in definition["properties"].items():
            described = dict(field)
            text = described.pop("description", "")
            assert text, f"{title}.{name}"
            assert "``" not in text
            assert described == plain["$defs"][title]["properties"][name]


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "--schema"]) == 0
    report = json.loads(capsys.readouterr().out)["$defs"]["RunReport"]["properties"]
    assert report["best_valid"]["description"] == "The best validation, by `train.best_metric`."
