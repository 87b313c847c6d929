"""The page of a run: one HTML file that shows its report and charts, and asks for nothing else."""

from __future__ import annotations

import html
from base64 import b64encode
from hashlib import sha256
from pathlib import Path

import msgspec

from gputrain_tui.report.run_charts import RunCharts
from gputrain_tui.report.run_report import RunReport

FILES = Path(__file__).with_name("page_files")


def page_html(report: RunReport, charts: RunCharts) -> str:
    """Return the page. Text of a run is in it as JSON only, which its script sets as text, never as markup.

    The policy of the page allows its own style and script, by their hashes, and nothing from anywhere else.
    """
    style, script = ((FILES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(report.id)}</title>",
            f"<style>{style}</style>",
            "<main><noscript>This page draws its charts with a script of its own.</noscript></main>",
            f'<script type="application/json" id="data">{page_data(report, charts)}</script>',
            f"<script>{script}</script>",
            "</html>",
        )
    )


def page_data(report: RunReport, charts: RunCharts) -> str:
    """Return report and charts as JSON that cannot end the element in which it stands."""
    text = msgspec.json.encode({"report": report, "charts": charts}).decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
