"""Where events go: a file, the terminal, TensorBoard, Weights & Biases, MLflow."""
