"""The watchdog as a program. It is started as an isolated script (`python -I -S FILE`), so it adds this package to the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from trainer.watchdog.watch import main

main(sys.argv[1:])
