"""Reports about runs: `report.html`, `training_metrics.png`, and a page that compares several runs."""

from trainer.report.write import report_at_end, write_comparison, write_report

__all__ = ["report_at_end", "write_comparison", "write_report"]
