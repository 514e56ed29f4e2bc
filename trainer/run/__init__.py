"""What a run knows of itself besides tensors."""
