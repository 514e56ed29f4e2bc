"""Prepares text for training: reads, filters, deduplicates, tokenizes and packs it. Start reading at `prepare`."""
