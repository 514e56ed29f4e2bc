"""Renders reports about prepared data: report, page, data card, and text for the terminal."""
