"""Judges whether a run is healthy: guard, alert rules, convergence."""
