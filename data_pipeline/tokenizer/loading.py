from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from common.errors import ConfigError, PreparedDataError
from common.files import UnusableFileError, parse_json, read_input, write_atomic
from data_pipeline.tokenizer.base import MAX_TOKENIZER_BYTES, Tokenizer
from data_pipeline.tokenizer.characters import ByteTokenizer, CharacterTokenizer
from data_pipeline.tokenizer.huggingface import HuggingFaceTokenizer
from data_pipeline.tokenizer.model_file import read_spec
from data_pipeline.tokenizer.sentence_pieces import SentencePieceTokenizer
from data_pipeline.tokenizer.special import SIBLINGS, names_in_siblings
from data_pipeline.tokenizer.trial import try_out

_Files = Mapping[str, bytes]
_BUILT_HERE = (CharacterTokenizer.file_name, ByteTokenizer.file_name)  # read without a third-party library


def load_tokenizer(directory: Path, *, trial: bool = True) -> Tokenizer:
    """Follow no links. Without `trial` it is not loaded in a separate process first: this preparation has loaded it before."""
    for file_name, build in _BUILDERS.items():
        path = directory / file_name
        if path.is_file():
            try:
                files = _read_with_siblings(path, below=directory)
                if trial and file_name not in _BUILT_HERE:
                    _try_out(path, files[file_name])
                return build(files)
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
    if (own := _own_folder(path)) is not None:
        if chosen:
            raise ConfigError(
                f"tokenizer.{next(iter(chosen))}_token is set, and tokenizer.path = {path} is a folder whose tokenizer is used as "
                "it is; leave the setting out"
            )
        try:
            return load_tokenizer(own)
        except (PreparedDataError, UnusableFileError, OSError) as error:
            raise ConfigError(f"tokenizer.path: {error}") from None
    file = _file_of(path)
    try:
        files = _read_with_siblings(file, below=path if path.is_dir() else None)
        _try_out(file, files[file.name])
        found = names_in_siblings(files)
        if file.suffix == ".json":
            tokenizer: HuggingFaceTokenizer | SentencePieceTokenizer = HuggingFaceTokenizer(files[file.name], chosen, found)
        else:
            tokenizer = SentencePieceTokenizer(files[file.name], "sentencepiece", chosen, found)
        tokenizer.check()
        return tokenizer
    except OSError as error:
        raise ConfigError(f"tokenizer.path: {file} cannot be read: {error.strerror}") from None
    except UnusableFileError as error:
        raise ConfigError(f"tokenizer.path: {error}; copy the files themselves (cp -rL)") from None
    except ValueError as error:
        raise ConfigError(f"tokenizer.path: {file} cannot be used: {error}") from None


def _try_out(file: Path, content: bytes) -> None:
    if file.suffix == ".json":
        try_out("huggingface", content)
    else:
        read_spec(content)  # its errors are more precise
        try_out("sentencepiece", content)


def supplied_files(path: Path) -> list[Path]:
    """Return the files that `open_supplied` reads: the tokenizer's file, then the files beside it that name special tokens."""
    own = _own_folder(path)
    return _with_siblings(_file_of(path) if own is None else next(file for name in _BUILDERS if (file := own / name).is_file()))


def _own_folder(path: Path) -> Path | None:
    own = path / "tokenizer"
    is_own = any((path / name).is_file() for name in ("record.json", "manifest.json"))
    return own if is_own and any((own / name).is_file() for name in _BUILDERS) else None


def _file_of(path: Path) -> Path:
    if not path.is_dir():
        if path.suffix not in (".json", ".model"):
            raise ConfigError(f"tokenizer.path: {path} is not a tokenizer.json, SentencePiece .model, or folder with one; name one")
        return path
    candidates = [path / HuggingFaceTokenizer.file_name, *sorted(path.glob("*.model"))]
    present = [file for file in candidates if file.is_file()]
    if not present:
        raise ConfigError(f"tokenizer.path: {path} holds no tokenizer.json or SentencePiece .model; name one that does")
    if present[0].suffix == ".model" and len(present) > 1:
        raise ConfigError(f"tokenizer.path: {path} holds {len(present)} SentencePiece models; name one of these files")
    return present[0]


def _read_with_siblings(file: Path, *, below: Path | None) -> _Files:
    """Return files by name. A link is followed only for a tokenizer's file that the user has named itself (`below` is None)."""
    files, beside = {file.name: read_input(file, MAX_TOKENIZER_BYTES, below=below)}, _with_siblings(file)[1:]
    return files | {path.name: read_input(path, MAX_TOKENIZER_BYTES, below=file.parent) for path in beside}


def _with_siblings(file: Path) -> list[Path]:
    siblings = [file.with_name(name) for name in SIBLINGS]
    return [file, *(path for path in siblings if path.is_file())]


def _characters(files: _Files) -> Tokenizer:
    content = parse_json(files[CharacterTokenizer.file_name])
    return CharacterTokenizer(content["pieces"], content.get("extra", ()))


_BUILDERS: dict[str, Callable[[_Files], Tokenizer]] = {
    "bpe.model": lambda files: SentencePieceTokenizer(files["bpe.model"], "bpe"),
    "unigram.model": lambda files: SentencePieceTokenizer(files["unigram.model"], "unigram"),
    "sentencepiece.model": lambda files: SentencePieceTokenizer(
        files["sentencepiece.model"], "sentencepiece", found=names_in_siblings(files)
    ),
    HuggingFaceTokenizer.file_name: lambda files: HuggingFaceTokenizer(
        files[HuggingFaceTokenizer.file_name], found=names_in_siblings(files)
    ),
    CharacterTokenizer.file_name: _characters,
    ByteTokenizer.file_name: lambda files: ByteTokenizer(parse_json(files[ByteTokenizer.file_name]).get("extra", ())),
}
