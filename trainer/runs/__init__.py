"""State and files of a run besides tensors: events, ledger, record, limits, folder with its lock."""
