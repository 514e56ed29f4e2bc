"""docs/guide/model-size.md: its tables are what the code chooses. `python -m tests.unit.test_model_size_page` prints them."""

import math
from pathlib import Path

from common.text import rate, size
from data_pipeline.tokenizer.training import VOCAB_SIZES, fitting_vocab_size
from trainer.runs.defaults import SHAPES, Facts, choose, tokens_per_weight

PAGE = Path(__file__).parents[2] / "docs/guide/model-size.md"
MACHINES = {"2 CPU cores": (0, 2), "16 CPU cores": (0, 16), "1 GPU": (1, 16), "8 GPUs": (8, 64)}
TEXTS = (10**7, 10**8, 10**9, 10**10)
MINUTES = (10, 600)
BYTES_PER_TOKEN = 3.5


def table(*rows: list[str]) -> str:
    head, *body = rows
    first, *lines = [f"| {' | '.join(row)} |" for row in (head, *body)]
    return "\n".join((first, f"|{'---|' * len(head)}", *lines))


def vocabularies() -> str:
    rows = [["more" if math.isinf(most) else f"up to {size(most)}", f"{number:,}"] for most, number in VOCAB_SIZES]
    return table(["training text", "vocabulary"], *rows)


def chosen(text: int, minutes: int, num_gpus: int, num_cores: int) -> str:
    facts = Facts(round(text / BYTES_PER_TOKEN), 256, fitting_vocab_size(text), num_gpus, num_cores, max(1, num_gpus))
    found = choose(facts, {"limits.minutes": minutes})
    return f"{found['model.layers']}x{found['model.width']}, {found['batch.global_batch_size']} rows"


def choices() -> str:
    rows = [
        [size(text), f"{minutes} min", *(chosen(text, minutes, *machine) for machine in MACHINES.values())]
        for text in TEXTS
        for minutes in MINUTES
    ]
    return table(["text", "time", *MACHINES], *rows)


def shapes() -> str:
    rows = []
    for layers, width, heads in SHAPES:
        matrices = layers * (4 * width * width + 3 * width * -(-width * 8 // 3 // 64) * 64)
        rows.append([str(layers), f"{width:,}", str(heads), rate(matrices), str(tokens_per_weight(matrices))])
    return table(["layers", "width", "heads", "weights without the embedding", "tokens for each weight"], *rows)


def test_the_tables_are_what_the_code_chooses() -> None:
    text = PAGE.read_text()
    for expected in (vocabularies(), shapes(), choices()):
        assert expected in text


if __name__ == "__main__":
    print(vocabularies(), shapes(), choices(), sep="\n\n")
