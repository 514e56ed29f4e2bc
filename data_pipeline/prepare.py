"""The preparation from start to end: find the input, read, drop duplicates, split, tokenize, select, pack, publish.

The result of each task is committed, so a preparation that was killed resumes with the unfinished tasks. Results are used in the
order of the tasks, so the number of workers does not change the data.
"""

from __future__ import annotations

import logging

from common.command_line import stop_on_signals
from common.storage_errors import naming
from data_pipeline.config import PrepareConfig
from data_pipeline.conversations.chat_template import chosen_template
from data_pipeline.dataset.layout import INPUTS, TOKENIZER
from data_pipeline.dataset.manifest import Manifest
from data_pipeline.dedup.duplicates import STAGES as DUPLICATES
from data_pipeline.dedup.duplicates import find_duplicates
from data_pipeline.execution.tasks import open_runner
from data_pipeline.publishing.fingerprint import EARLIER_VERSIONS, PIPELINE_VERSION, fingerprint_of, key_of_work, settings_of
from data_pipeline.publishing.ownership import exclusive
from data_pipeline.publishing.publish import Prepared, assemble, check_may_replace, reuse_finished
from data_pipeline.reports.totals import Results, make_report
from data_pipeline.sources.first_look import adapted
from data_pipeline.sources.formats import IgnoredFiles
from data_pipeline.sources.inputs import cut_into_partitions, find_inputs, remember_digests
from data_pipeline.stages import checks
from data_pipeline.stages.job import Job
from data_pipeline.stages.pack import pack_all
from data_pipeline.stages.read import keys_of, read_all, report_of_reading
from data_pipeline.stages.rejects import write_rejects
from data_pipeline.stages.select import bounds_of_sources, documents_of, labels_of, report_of_selection, select_all
from data_pipeline.stages.split import split_all
from data_pipeline.stages.tokenize import report_of_tokens, tokenize_all
from data_pipeline.stages.train_quality import train_quality, trained_reference
from data_pipeline.stages.train_tokenizer import train_on_sample, with_bos_of_supplied

logger = logging.getLogger(__name__)


def prepare(config: PrepareConfig) -> Manifest:
    """Data that is already prepared is not prepared again."""
    output = config.output
    with stop_on_signals(), naming(output), exclusive(output) as folder:
        ignored = IgnoredFiles()
        inputs = find_inputs(config, output / INPUTS, ignored)
        config = adapted(config, inputs)
        checks.check_settings(inputs, config)
        remember_digests(inputs, output / INPUTS)
        as_given, config = config, with_bos_of_supplied(config)
        settings = settings_of(config)
        identities = [file.identity for file in inputs]
        fingerprint = fingerprint_of(settings, identities)
        for version in (PIPELINE_VERSION, *(() if config.replace else EARLIER_VERSIONS)):
            known = fingerprint_of(settings, identities, version)
            if (finished := reuse_finished(output, known, rejects=config.keep_rejects)) is not None:
                if version != PIPELINE_VERSION:
                    logger.info("it was prepared by version %d of the pipeline; --replace true prepares it again", version)
                return finished
            if config is not as_given and not config.replace:  # before tokenizers decided about bos, each document had one
                known = fingerprint_of(settings_of(as_given), identities, version)
                if (finished := reuse_finished(output, known, rejects=config.keep_rejects)) is not None:
                    logger.info("it was prepared with tokenizer.add_bos = true; --replace true prepares it again")
                    return finished
        check_may_replace(output, fingerprint, settings, identities, replace=config.replace)

        partitions = cut_into_partitions(inputs, config.partition_bytes)
        with open_runner(config, stage_names(config), len(partitions)) as run:
            work = folder.start_work(key_of_work(fingerprint, config))  # a refusal from here on removes it
            job = Job(config, partitions, work, run)
            chat = chosen_template(config.chat, config.tokenizer, job.special_tokens)
            read = read_all(job, chat)
            checks.check_rejected(partitions, read, config)
            duplicates = find_duplicates(run, keys_of(read), config.dedup, work)
            split = split_all(job, read, duplicates)
            checks.check_split(read, duplicates, split, config)
            tokenizer = train_on_sample(job, split, chat)
            classifier = train_quality(job, split)
            tokenized = tokenize_all(job, split)
            bounds = bounds_of_sources(job, tokenized)
            selected = select_all(job, tokenized, bounds)
            checks.check_selected(selected, config)
            rejects = write_rejects(job, read, selected, bounds)
            documents = documents_of(job, tokenized, selected)
            packed = pack_all(
                run,
                config.row_length,
                config.packing,
                tokenizer,
                documents,
                work,
                list(labels_of(selected)),
                has_pairs=config.has_pairs,
            )

        by_split = [(task.split, result) for task, result in packed]
        report = make_report(Results(partitions, read, duplicates, split, tokenized, bounds, selected, by_split), config)
        report |= report_of_reading(read, ignored) | report_of_selection(job, selected)
        report |= report_of_tokens(config, tokenizer, classifier, tokenized)
        prepared = Prepared(
            settings=settings,
            inputs=[file.identity for file in inputs],
            partitions=[partition.identity for partition in partitions],
            tokenizer=tokenizer,
            tokenizer_folder=work / TOKENIZER,
            documents=documents,
            packed=packed,
            report=report,
            timings=run.progress.summary(),
            reference=trained_reference(job),
            has_mask=any(of_source.has_mask for of_source in job.of_sources.values()),
        )
        return assemble(prepared, output, work, rejects)


def stage_names(config: PrepareConfig) -> list[str]:
    return [
        "read",
        *DUPLICATES,
        "split",
        *(["sample"] if config.tokenizer.is_trained else []),
        "train",
        *(["reference"] if config.quality.measures_perplexity else []),
        *(["classifier"] if config.quality.good else []),
        "tokenize",
        *(["weigh"] if config.balance.by != "none" else []),
        "select",
        *(["rejects"] if config.keep_rejects == "all" else []),
        "pack",
    ]
