from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from common.settings.model import Options, Place


class FolderOptions(Options):
    directory: Annotated[Path, Place(metavar="DIR", positional=True)] = Field(description="Folder that `prepare` has written.")
