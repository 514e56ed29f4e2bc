"""What a process runs on: host, GPUs, memory, versions."""
