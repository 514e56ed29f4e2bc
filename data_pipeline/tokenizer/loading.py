from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from common.child_process import child_environment, inherited_limit
from common.errors import ConfigError, PreparedDataError
from common.files import UnusableFileError, parse_json, read_input, write_atomic
from data_pipeline.tokenizer.base import MAX_TOKENIZER_BYTES, ByteTokenizer, CharacterTokenizer, Tokenizer
from data_pipeline.tokenizer.huggingface import HuggingFaceTokenizer, with_added_tokens, without_dropout
from data_pipeline.tokenizer.model_file import with_added_pieces
from data_pipeline.tokenizer.sentence_pieces import SentencePieceTokenizer
from data_pipeline.tokenizer.special import SIBLINGS, LibraryTokenizer, read_siblings

_KINDS = {f"{kind}.model": kind for kind in ("bpe", "unigram", "sentencepiece")} | {
    one.file_name: one.kind for one in (HuggingFaceTokenizer, CharacterTokenizer, ByteTokenizer)
}
_CHILD = Path(__file__).with_name("trial_child.py")
_CPU_S = 10  # the largest common tokenizers, with 256,000 pieces, take 2 s (November 2026)
_WALL_S = 120.0  # enough on a busy machine
_MEMORY_BYTES = 2 << 30
_MEMORY_PER_BYTE = 16
_TERSE = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0", "OMP_NUM_THREADS": "1"}


def load_tokenizer(directory: Path, *, trial: bool = True) -> Tokenizer:
    """Follow no links. Without `trial` it is not loaded in a separate process first: this preparation has loaded it before."""
    for file_name, kind in _KINDS.items():
        path = directory / file_name
        if path.is_file():
            try:
                return _open(kind, path, {}, below=directory, is_own=True, trial=trial)
            except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                raise PreparedDataError(f"{path}: not a tokenizer that can be read ({error}); run `prepare` again") from None
    raise PreparedDataError(
        f"{directory}: no tokenizer in it; restore it from a copy, or run `prepare` again if this is prepared data"
    )


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for file_name, content in sorted(tokenizer.files().items(), key=lambda item: item[0] == tokenizer.file_name):
        write_atomic(directory / file_name, content)


def open_supplied(path: Path, chosen: Mapping[str, str]) -> Tokenizer:
    """Open a `tokenizer.json`, a `.model`, or a folder with one, of a run or data too. `chosen` names special tokens by role."""
    file, is_own = _locate(path)
    if is_own:
        if chosen:
            raise ConfigError(
                f"tokenizer.{next(iter(chosen))}_token is set, and tokenizer.path = {path} is a folder whose tokenizer is used as "
                "it is; leave the setting out"
            )
        try:
            return load_tokenizer(file.parent)
        except (PreparedDataError, UnusableFileError, OSError) as error:
            raise ConfigError(f"tokenizer.path: {error}") from None
    try:
        kind = "huggingface" if file.suffix == ".json" else "sentencepiece"
        tokenizer = _open(kind, file, chosen, below=path if path.is_dir() else None)
        assert isinstance(tokenizer, LibraryTokenizer)
        tokenizer.check()
        return tokenizer
    except OSError as error:
        raise ConfigError(f"tokenizer.path: {file} cannot be read: {error.strerror}") from None
    except UnusableFileError as error:
        raise ConfigError(f"tokenizer.path: {error}; copy the files themselves (cp -rL)") from None
    except ValueError as error:
        raise ConfigError(f"tokenizer.path: {file} cannot be used: {error}") from None


def _open(
    kind: str, file: Path, chosen: Mapping[str, str], *, below: Path | None, is_own: bool = False, trial: bool = True
) -> Tokenizer:
    """A link is followed only for a tokenizer's file that the user has named itself (`below` is None)."""
    content = read_input(file, MAX_TOKENIZER_BYTES, below=below)
    beside = read_siblings(
        {path.name: read_input(path, MAX_TOKENIZER_BYTES, below=file.parent) for path in _with_siblings(file)[1:]}
    )
    tokenizer: Tokenizer
    if kind in (CharacterTokenizer.kind, ByteTokenizer.kind):
        values = parse_json(content)
        extra = values.get("extra", ())
        tokenizer = ByteTokenizer(extra) if kind == ByteTokenizer.kind else CharacterTokenizer(values["pieces"], extra)
    else:
        if trial:
            try_out(kind, content)
        if kind == HuggingFaceTokenizer.kind:
            if not is_own:
                content = with_added_tokens(without_dropout(content, file), beside)
            tokenizer = HuggingFaceTokenizer(content, chosen, beside.names)
        else:
            content = content if is_own else with_added_pieces(content, beside)
            tokenizer = SentencePieceTokenizer(content, kind, chosen, beside.names if kind == "sentencepiece" else {})
    if is_own:
        tokenizer.use_as(beside.config)
        return tokenizer
    if isinstance(tokenizer, HuggingFaceTokenizer):
        tokenizer.adds_bos = tokenizer.library_adds_bos  # the file decides, as in transformers
    else:
        tokenizer.adds_bos = beside.config.get("add_bos_token") is not False
    return tokenizer


def try_out(kind: str, content: bytes) -> None:
    """Load a file in a separate process. ValueError if it fails, takes too much time or memory, or makes far too many tokens."""
    memory_bytes = _MEMORY_BYTES + _MEMORY_PER_BYTE * len(content)
    request = {"kind": kind, "seconds": _CPU_S, "memory_bytes": memory_bytes}
    try:
        done = subprocess.run(
            [sys.executable, "-P", str(_CHILD)],
            input=json.dumps(request).encode() + b"\n" + content,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=child_environment() | _TERSE,
            timeout=_WALL_S,
            check=False,
            start_new_session=True,  # a stop of the whole group is answered by this process, and is no fault of the file
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"it was not loaded in {_WALL_S:.0f} s") from None
    if done.stdout != b"ok" and (limit := inherited_limit(memory_bytes, _CPU_S)):
        raise ValueError(f"it could not be tried out under {limit}, an existing limit of this process; raise the limit")
    if -done.returncode in (signal.SIGXCPU, signal.SIGKILL):
        raise ValueError(f"loading and using it takes more than {_CPU_S} s of processor time, or more memory than there is")
    if done.returncode < 0:
        raise ValueError(f"the library that loads it was ended by {signal.Signals(-done.returncode).name}")
    answer = done.stdout.decode("utf-8", "replace")
    if answer != "ok":
        library = "tokenizers" if kind == "huggingface" else "SentencePiece"
        raise ValueError(f"{library} cannot read it: {answer or f'its process ended with status {done.returncode}'}")


def supplied_files(path: Path) -> list[Path]:
    """Return the files that `open_supplied` reads: the tokenizer's file, then the files beside it that name special tokens."""
    return _with_siblings(_locate(path)[0])


def _locate(path: Path) -> tuple[Path, bool]:
    """Return the tokenizer's file, and whether `path` is the folder of a run or of prepared data, whose tokenizer it is."""
    if any((path / name).is_file() for name in ("record.json", "manifest.json")):
        for name in _KINDS:
            if (path / "tokenizer" / name).is_file():
                return path / "tokenizer" / name, True
    if not path.is_dir():
        if path.suffix not in (".json", ".model"):
            raise ConfigError(f"tokenizer.path: {path} is not a tokenizer.json, SentencePiece .model, or folder with one; name one")
        return path, False
    candidates = [path / HuggingFaceTokenizer.file_name, *sorted(path.glob("*.model"))]
    present = [file for file in candidates if file.is_file()]
    if not present:
        raise ConfigError(f"tokenizer.path: {path} holds no tokenizer.json or SentencePiece .model; name one that does")
    if present[0].suffix == ".model" and len(present) > 1:
        raise ConfigError(f"tokenizer.path: {path} holds {len(present)} SentencePiece models; name one of these files")
    return present[0], False


def _with_siblings(file: Path) -> list[Path]:
    siblings = [file.with_name(name) for name in SIBLINGS]
    return [file, *(path for path in siblings if path.is_file())]
