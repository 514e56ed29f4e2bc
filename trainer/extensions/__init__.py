"""Extensions: Python files of the user with hooks, a loss or a model."""
