"""Uses a trained model: text, scores, benchmarks."""
