"""What fine-tuning adds to the training of a new model."""
