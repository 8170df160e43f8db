"""The report: one self-contained HTML page about a policy."""

__all__ = ["comparison_document", "diagnosis_document", "map_examples", "render_report", "write_report"]

from vbtta.report.documents import comparison_document, diagnosis_document
from vbtta.report.html import render_report, write_report
from vbtta.report.maps import map_examples
