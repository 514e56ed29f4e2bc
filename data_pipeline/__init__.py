"""Prepares text for training: reads, filters, deduplicates, tokenizes and packs it. `prepare` tells the whole story."""
