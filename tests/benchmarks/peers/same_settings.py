"""Runs a Python file with this project's settings of allocator and waiting threads: python same_settings.py FILE ARGUMENT …"""

import runpy
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[3])
from trainer.machine.before_torch import keep_memory, spin_briefly  # noqa: E402 - needs the path

keep_memory()
spin_briefly()
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
