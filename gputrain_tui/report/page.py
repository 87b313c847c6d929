"""Pages of runs: one HTML file each, that shows a report or a comparison with charts, and asks for nothing else."""

from __future__ import annotations

import html
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import msgspec

from gputrain_tui.report.report_fields import RunReport
from gputrain_tui.report.run_charts import RunCharts

FILES = Path(__file__).with_name("page_files")


def page_html(title: str, data: str, script: str) -> str:
    """Return a page of ``data``, which is JSON by ``json_text``, drawn by a script of ``page_files``.

    Text of a run is in it as JSON only, which its script sets as text, never as markup. The policy of the page allows
    its own style and script, by their hashes, and nothing from anywhere else.
    """
    style, *scripts = ((FILES / name).read_text(encoding="utf-8") for name in ("page.css", "charts.js", script))
    code = "".join(scripts)
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(code)}; base-uri 'none'; form-action 'none'"
    )
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(title)}</title>",
            f"<style>{style}</style>",
            "<main><noscript>This page draws its charts with a script of its own.</noscript></main>",
            f'<script type="application/json" id="data">{data}</script>',
            f"<script>{code}</script>",
            "</html>",
        )
    )


def report_page(report: RunReport, charts: RunCharts) -> str:
    """Return the page of a run."""
    return page_html(report.id, page_data(report, charts), "page.js")


def page_data(report: RunReport, charts: RunCharts) -> str:
    """Return report and charts as JSON for a page."""
    return json_text({"report": report, "charts": charts})


def json_text(data: object) -> str:
    """Return data as JSON that cannot end the element in which it stands."""
    text = msgspec.json.encode(data).decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
