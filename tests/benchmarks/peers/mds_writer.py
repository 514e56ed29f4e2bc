"""mosaicml-streaming's MDSWriter, one writer per process: python mds_writer.py TEXT.jsonl TOKENIZER.model OUT WORKERS"""

import multiprocessing
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

import numpy as np
import orjson
import sentencepiece

try:
    import torchvision  # noqa: F401
except RuntimeError:  # the registry's wheel is built for torch with CUDA; writing does not use it
    for _name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[_name] = module_from_spec(ModuleSpec(_name, None))
    sys.modules["torchvision.datasets"].VisionDataset = type("VisionDataset", (), {})
    sys.modules["torchvision.transforms.functional"].to_tensor = None
from streaming import MDSWriter

_ROW = 2048


def write_range(text: str, tokenizer: str, output: str, begin: int, end: int) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=tokenizer)
    waiting = np.empty(0, np.uint16)
    with Path(text).open("rb") as file, MDSWriter(out=output, columns={"tokens": "ndarray:uint16"}, size_limit="64mb") as writer:
        file.seek(begin)
        if begin:
            file.readline()
        while file.tell() <= end and (line := file.readline()):
            waiting = np.concatenate([waiting, np.array(processor.encode(orjson.loads(line)["text"]), np.uint16)])
            whole = len(waiting) // _ROW * _ROW
            for row in waiting[:whole].reshape(-1, _ROW):
                writer.write({"tokens": row})
            waiting = waiting[whole:]


def main(text: str, tokenizer: str, output: str, workers: int) -> None:
    size = Path(text).stat().st_size
    borders = [size * number // workers for number in range(workers + 1)]
    processes = [
        multiprocessing.Process(
            target=write_range, args=(text, tokenizer, f"{output}/{number}", borders[number], borders[number + 1])
        )
        for number in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
