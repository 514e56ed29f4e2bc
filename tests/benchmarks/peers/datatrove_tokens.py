"""datatrove's DocumentTokenizer: python datatrove_tokens.py TEXT.jsonl tokenizer.json OUT WORKERS"""

import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer


def main(text: str, tokenizer: str, output: str, workers: int) -> None:
    """Tokenize. `text` is a folder with one file for each worker."""
    LocalPipelineExecutor(
        pipeline=[
            JsonlReader(text),
            DocumentTokenizer(f"{output}/tokens", tokenizer_name_or_path=tokenizer, eos_token="<eos>", shuffle_documents=False),
        ],
        tasks=workers,
        workers=workers,
        logging_dir=f"{output}/logs",
    ).run()


if __name__ == "__main__":
    Path(sys.argv[3]).mkdir(parents=True)
    main(*sys.argv[1:4], int(sys.argv[4]))
