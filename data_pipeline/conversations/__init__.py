"""Turns conversations and preference pairs into token ids: chat templates, loss masks, pairs."""
