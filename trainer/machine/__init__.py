"""The machine of a process: host, GPUs, memory, versions."""
