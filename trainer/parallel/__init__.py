"""Exchange of gradients and weights between ranks."""
