"""Pages about finished runs: `report.html`, `training_metrics.png`, and a comparison of several runs."""

from trainer.report.write import report_at_end, write_comparison, write_report

__all__ = ["report_at_end", "write_comparison", "write_report"]
