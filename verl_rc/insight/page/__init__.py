"""``report.html``: one file that explains a run, without a network; or several runs side by side."""

from verl_rc.insight.page.page import build_page
from verl_rc.insight.page.write import Report, ReportRequest, write_report

__all__ = ["Report", "ReportRequest", "build_page", "write_report"]
