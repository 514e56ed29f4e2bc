from __future__ import annotations

import json
import sys
from typing import Annotated

from pydantic import Field

from common.settings.model import Place
from common.text import visible
from data_pipeline.commands.folder_options import FolderOptions


class InspectOptions(FolderOptions):
    """Shows a summary of prepared data, or one document."""

    as_json: Annotated[bool, Place("--json")] = Field(False, description="Print one JSON object.")
    document: Annotated[int | None, Place(metavar="ID")] = Field(
        None, description="Id of a document whose text is printed instead of the summary."
    )


def run(options: InspectOptions) -> None:
    from data_pipeline.dataset.manifest import read_manifest
    from data_pipeline.dataset.stored_documents import read_document
    from data_pipeline.reports.terminal import describe, malformed, summarise

    manifest = read_manifest(options.directory)
    if options.document is not None:
        text = read_document(options.directory, manifest, options.document).text
        print(visible(text) if sys.stdout.isatty() else text)
        return
    with malformed(options.directory):
        summary = summarise(manifest)
        shown = json.dumps(summary, indent=2) if options.as_json else describe(summary)
    print(shown)
