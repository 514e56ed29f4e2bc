from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from common.command_line import command_text
from common.errors import ConfigError, PreparedDataError
from common.settings.model import Place
from common.targets import new_folder
from common.untrusted import digest_run_file
from trainer.commands.evaluate import EvaluateOptions
from trainer.commands.run_options import CheckpointOptions
from trainer.compression import Method


class CompressOptions(CheckpointOptions):
    """Writes a smaller copy of the model of a checkpoint as a new run, and compares both.

    The new run works with `generate`, `evaluate`, `export` and `train --init`. It cannot be continued.
    """

    method: Method = Field(
        description="int8, int4: fewer bits for each weight; prune: the smallest weights become zero; prune-2-4: the "
        "smaller two of four neighbouring weights become zero."
    )
    output: Annotated[Path, Place(metavar="DIR", target="folder")] = Field(
        description="Directory of the new run. It must not exist."
    )
    group_size: int = Field(32, ge=2, le=1 << 16, description="Number of columns of a matrix that share a scale with int4.")
    share: float = Field(0.5, gt=0, lt=1, description="Share of the weights of each matrix that prune sets to zero.")
    data: Annotated[Path | None, Place(metavar="DIR")] = Field(
        None, description="Prepared data for the perplexity. Without it, the data of the run is used if it is there."
    )
    limit: Annotated[int | None, Place(metavar="N")] = Field(
        None, ge=1, description="Number of validation rows for the perplexity. Without it, as many rows as in the run."
    )
    as_json: Annotated[bool, Place("--json")] = Field(False, description="Print one JSON object instead of the table.")

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        for name, method in (("group_size", "int4"), ("share", "prune")):
            if name in self.model_fields_set and self.method != method:
                raise ValueError(
                    f"--{name} has an effect only with --method {method}, and the method is {self.method}; leave it out"
                )
        return self


_NOTE = "note        only the files are smaller: in memory the weights are fp32 again, so the speed is about the same"
_NOTE_OF_ZEROS = "note        a later training changes all weights, also those that are zero now"


def run(options: CompressOptions) -> None:
    from trainer.commands.saved_model import check_is_decoder
    from trainer.compression.comparison import Measured, table
    from trainer.compression.methods import Compression
    from trainer.interop.import_model import write_untrained
    from trainer.model.saved_decoder import open_decoder
    from trainer.runs.layout import RECORD
    from trainer.runs.record import COMPRESSED, Compressed, write_record
    from trainer.runs.saved_run import SavedRun

    output, saved = options.output, SavedRun(options.run)
    if output.exists() or output.is_symlink():
        raise ConfigError(f"{output} exists already; name a new folder (--output)")
    if saved.record.status == COMPRESSED:
        raise ConfigError(f"{options.run}: it is compressed already; name the run that it was made from")
    check_is_decoder(saved, "only that can be compressed", trust_code=options.trust_code)
    source = open_decoder(saved, options.checkpoint)
    compression = Compression(options.method, options.group_size, options.share)
    stored = compression.stored(source.weights)
    perplexity = _perplexity(options, options.run, options.checkpoint)
    facts = compression.to_json() | {
        "record": digest_run_file(source.run, RECORD),
        "step": source.step,
        "average": source.is_average,
        "weights": source.weights_digest,
        **({} if source.record.generation is None else {"generation": source.record.generation}),
    }
    with new_folder(output) as folder:
        write_untrained(
            folder,
            source.config.as_language_model.model_copy(update={"run": output}),
            source.tokenizer,
            stored,
            status=COMPRESSED,
            source=facts,
            data_digest=source.data_digest or "",
            chat_template=None if source.chat_template is None else source.chat_template.source,
        )
        num_bytes = [
            sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) for tensors in (source.weights, stored)
        ]
        before = Measured(num_bytes[0], perplexity)
        after = Measured(num_bytes[1], _perplexity(options, folder, "latest"))
        comparison = {"before": asdict(before), "after": asdict(after)}
        compressed = Compressed.model_validate(facts | {"comparison": comparison})
        write_record(folder, SavedRun(folder).record.changed(compressed=compressed))
    if options.as_json:
        print(json.dumps(facts | comparison | {"output": str(output)}, ensure_ascii=False))
        return
    notes = f"{_NOTE}\n{_NOTE_OF_ZEROS}" if options.method.startswith("prune") else _NOTE
    print(
        f"{table(before, after)}\n{notes}\nwritten     {output}\nnext        {command_text('generate', output, '--prompt', 'The ')}"
    )


def _perplexity(options: CompressOptions, run: Path, checkpoint: str) -> float | None:
    """Return the perplexity on the validation data, None if the run names data that is not there or has pairs of answers."""
    from data_pipeline.dataset.manifest import read_manifest
    from trainer.commands.evaluate import evaluate_run
    from trainer.runs.saved_run import SavedRun

    words = {"run": run, "checkpoint": checkpoint, "data": options.data, "limit": options.limit, "as_json": True}
    try:
        if read_manifest(SavedRun(run).data_folder(options.data)).has_pairs:
            if options.data is None:
                return None
            raise ConfigError(f"{options.data} has preference pairs, and a worse answer is no text to predict; name other data")
        evaluated = evaluate_run(EvaluateOptions.model_validate(words | {"trust_code": options.trust_code}), as_language=True)
        return float(json.loads(evaluated)["perplexity"])
    except PreparedDataError:
        if options.data is not None:
            raise
        return None
