"""Uses a trained model: writes text, scores text, runs benchmarks."""
