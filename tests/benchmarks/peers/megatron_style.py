"""An ordered builder like that of Megatron-LM: a pool encodes lines, and this process appends their ids to one file and an index.

python megatron_style.py TEXT.jsonl TOKENIZER.model|tokenizer.json OUT WORKERS
"""

import multiprocessing
import sys
from pathlib import Path

import numpy as np
import orjson

_encode = None


def begin(path: str) -> None:
    global _encode  # noqa: PLW0603 - one tokenizer for each process
    if path.endswith(".json"):
        from tokenizers import Tokenizer  # noqa: PLC0415

        tokenizer = Tokenizer.from_file(path)
        _encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    else:
        import sentencepiece  # noqa: PLC0415

        _encode = sentencepiece.SentencePieceProcessor(model_file=path).encode


def encode(line: bytes) -> np.ndarray:
    return np.array(_encode(orjson.loads(line)["text"]), np.uint16)


def main(text: str, tokenizer: str, output: str, workers: int) -> None:
    folder = Path(output)
    folder.mkdir(parents=True)
    lengths = []
    with (
        Path(text).open("rb") as lines,
        multiprocessing.Pool(workers, begin, (tokenizer,)) as pool,
        (folder / "data.bin").open("wb") as file,
    ):
        for ids in pool.imap(encode, lines, chunksize=32):
            file.write(ids.tobytes())
            lengths.append(len(ids))
    np.save(folder / "lengths.npy", np.array(lengths, np.int64))
    print(sum(lengths))


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
