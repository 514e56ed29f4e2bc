"""The decoder, its loss, and the memory and operations that both take."""
