"""``report.html``: one file that explains a run, without a network; or several runs side by side."""

from verl_rc.report.page.page import PageOptions, build_page
from verl_rc.report.page.write import REPORT, Report, Request, write_report

__all__ = ["REPORT", "PageOptions", "Report", "Request", "build_page", "write_report"]
