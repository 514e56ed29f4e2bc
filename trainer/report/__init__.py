"""Reports about runs: `report.html`, `training_metrics.png`, and a page that compares several runs."""
