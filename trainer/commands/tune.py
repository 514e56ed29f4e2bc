from __future__ import annotations

import json
import sys

from common.terminal import write_line
from trainer.search.options import TuneOptions


def run(options: TuneOptions) -> None:
    from trainer.search.search import search

    recipe, results = search(options, announce=lambda line: write_line(line, sys.stderr))
    print(json.dumps({"recipe": str(recipe)} | results, ensure_ascii=False) if options.as_json else recipe)
