"""What a run came to, for people: `report.html` and `training_metrics.png` of one run, a page that compares several.

Reads a run's directory and changes nothing but these files. Works on a run that is finished, stopped, killed or still going on.
"""

from trainer.report.write import report_at_end, write_comparison, write_report

__all__ = ["report_at_end", "write_comparison", "write_report"]
