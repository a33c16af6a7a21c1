"""Reports: one self-contained HTML page for a run or a sweep, from what storage knows of it."""

from eagleray.platform.report.facts import RunFacts, masked, read_facts
from eagleray.platform.report.figures import Summary, SweepSummary, summarize
from eagleray.platform.report.goodput import Goodput, goodput
from eagleray.platform.report.page import REPORT, render_report, write_report

__all__ = [
    "REPORT",
    "Goodput",
    "RunFacts",
    "Summary",
    "SweepSummary",
    "goodput",
    "masked",
    "read_facts",
    "render_report",
    "summarize",
    "write_report",
]
