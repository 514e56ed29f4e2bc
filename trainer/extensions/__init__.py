"""Extensions: Python files of the user with hooks, a loss, a model or a training step."""
