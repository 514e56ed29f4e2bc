"""litdata's `optimize` with a token loader: python litdata_optimize.py TEXT.jsonl TOKENIZER.model OUT WORKERS"""

import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import orjson
import sentencepiece
import torch
from litdata import TokensLoader, optimize

_RANGES = 16


def tokens_of(bounds: tuple[int, int], text: str, tokenizer: str):
    processor = sentencepiece.SentencePieceProcessor(model_file=tokenizer)
    with Path(text).open("rb") as file:
        file.seek(bounds[0])
        if bounds[0]:
            file.readline()
        while file.tell() <= bounds[1] and (line := file.readline()):
            yield torch.tensor(processor.encode(orjson.loads(line)["text"]), dtype=torch.uint16)


def main(text: str, tokenizer: str, output: str, workers: int) -> None:
    size = Path(text).stat().st_size
    borders = [size * number // _RANGES for number in range(_RANGES + 1)]
    optimize(
        fn=partial(tokens_of, text=text, tokenizer=tokenizer),
        inputs=list(pairwise(borders)),
        output_dir=output,
        num_workers=workers,
        chunk_bytes="64MB",
        item_loader=TokensLoader(block_size=2048),
    )


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
