"""datatrove's filters, near-duplicates and tokens: python datatrove_chain.py TEXT_FOLDER tokenizer.json OUT WORKERS"""

import sys
from pathlib import Path

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.filters import C4QualityFilter, FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.pipeline.writers import JsonlWriter


def main(text: str, tokenizer: str, output: str, workers: int) -> None:
    """Run the chain. `text` is a folder with one file for each worker."""
    minhash = MinhashConfig()
    stages = [
        (
            workers,
            [
                JsonlReader(text),
                GopherRepetitionFilter(),
                GopherQualityFilter(),
                C4QualityFilter(filter_no_terminal_punct=False),
                FineWebQualityFilter(),
                JsonlWriter(f"{output}/kept", compression=None),
            ],
        ),
        (workers, [JsonlReader(f"{output}/kept"), MinhashDedupSignature(output_folder=f"{output}/signatures", config=minhash)]),
        (
            minhash.num_buckets,
            [MinhashDedupBuckets(input_folder=f"{output}/signatures", output_folder=f"{output}/buckets", config=minhash)],
        ),
        (1, [MinhashDedupCluster(input_folder=f"{output}/buckets", output_folder=f"{output}/remove", config=minhash)]),
        (
            workers,
            [
                JsonlReader(f"{output}/kept"),
                MinhashDedupFilter(input_folder=f"{output}/remove"),
                DocumentTokenizer(f"{output}/tokens", tokenizer_name_or_path=tokenizer, eos_token="<eos>", shuffle_documents=False),
            ],
        ),
    ]
    for number, (tasks, pipeline) in enumerate(stages):
        LocalPipelineExecutor(pipeline=pipeline, tasks=tasks, workers=workers, logging_dir=f"{output}/logs/{number}").run()


if __name__ == "__main__":
    Path(sys.argv[3]).mkdir(parents=True)
    main(*sys.argv[1:4], int(sys.argv[4]))
