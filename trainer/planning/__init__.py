"""What a training will do, before it begins: its length, its memory, its checkpoints and its time."""
