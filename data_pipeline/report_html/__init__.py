"""The report of a preparation as one HTML page."""

from data_pipeline.report_html.page import render_report

__all__ = ["render_report"]
