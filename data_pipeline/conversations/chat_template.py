"""Chat templates, Jinja programs in `chat_template.jinja`: the text form of a conversation, and the special tokens in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from common.errors import ConfigError, PreparedDataError
from common.files import UnusableFileError, parse_json, read_input
from data_pipeline.config import ChatConfig, TokenizerConfig
from data_pipeline.tokenizer import NamedToken, Tokenizer, open_supplied, supplied_files
from data_pipeline.tokenizer.base import CONFIG_FILE, OWN_NAMES

TEMPLATE_FILE = "chat_template.jinja"
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_MORE_TEMPLATES = "additional_chat_templates"  # the folder for those with other names than default
_MAX_BYTES = 1 << 20
_MAX_CONFIG_BYTES = 64 << 20
_NAMED = Path(__file__).parent


@dataclass(frozen=True)
class ChatTemplate:
    source: str
    variables: Mapping[str, str]  # values that the template can use, such as `bos_token`
    special: tuple[NamedToken, ...]  # names that stand for the tokens in a text; the ids are not used here

    @staticmethod
    def of(source: str, tokenizer: Tokenizer) -> ChatTemplate:
        variables = {f"{role}_token": name for role, name in tokenizer.role_names.items()}
        return ChatTemplate(source, variables, tokenizer.named_tokens)

    @cached_property
    def _tokens(self) -> dict[str, NamedToken]:
        return {token.name: token for token in self.special if token.name}

    @cached_property
    def _lengths(self) -> dict[str, list[int]]:
        found: dict[str, set[int]] = {}
        for name in self._tokens:
            found.setdefault(name[0], set()).add(len(name))
        return {first: sorted(lengths, reverse=True) for first, lengths in found.items()}

    @cached_property
    def _first(self) -> re.Pattern[str]:
        return re.compile(f"[{''.join(map(re.escape, self._lengths))}]" if self._lengths else r"(?!)")

    def names_in(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield start and name of each special token in a text, from left to right. The longest name at a place wins."""
        end = 0
        while found := self._first.search(text, end):
            start = found.start()
            names = (text[start : start + length] for length in self._lengths[found[0]])
            name = next((name for name in names if name in self._tokens), None)
            if name is not None:
                yield start, name
            end = start + len(name or found[0])

    def special_in(self, text: str) -> list[tuple[int, int]]:
        """Return start and end of each special token in a text, with the white space that it takes."""
        spans: list[tuple[int, int]] = []
        taken = 0
        for place, name in self.names_in(text):
            if (span := self._tokens[name].span(text, place, taken)) is not None:
                spans.append(span)
                taken = span[1]
        return spans


def chosen_template(chat: ChatConfig, tokenizer: TokenizerConfig, extra_special: Iterable[str] = ()) -> ChatTemplate | None:
    """Return the template of the settings, before a tokenizer is trained; None if there is none."""
    if not chat.is_on:
        return None
    source = template_source(chat, tokenizer)
    if tokenizer.path is not None:
        return ChatTemplate.of(source, open_supplied(tokenizer.path, tokenizer.chosen_names))
    names = dict.fromkeys((*OWN_NAMES.values(), *tokenizer.extra_special, *extra_special))
    variables = {f"{role}_token": name for role, name in OWN_NAMES.items()}
    return ChatTemplate(source, variables, tuple(NamedToken(name, -1) for name in names))


def template_source(chat: ChatConfig, tokenizer: TokenizerConfig) -> str:
    if chat.template != "tokenizer":
        return (_NAMED / f"{chat.template}.jinja").read_text(encoding="utf-8")
    assert tokenizer.path is not None  # the settings check it
    folder = supplied_files(tokenizer.path)[0].parent
    try:
        return _source_in(folder)
    except FileNotFoundError:
        raise ConfigError(
            f"chat.template = tokenizer: {folder} has neither a {TEMPLATE_FILE} nor a chat_template in its {CONFIG_FILE}; add one "
            "of them, or name a built-in template"
        ) from None
    except OSError as error:
        raise ConfigError(f"chat.template: a file in {folder} cannot be read: {error.strerror}") from None
    except (UnusableFileError, ValueError) as error:
        raise ConfigError(f"chat.template = tokenizer: {error}; correct the file, or name a built-in template") from None


def saved_template(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    path = folder / TEMPLATE_FILE
    try:
        return ChatTemplate.of(read_input(path, _MAX_BYTES, below=folder).decode(), tokenizer)
    except FileNotFoundError:
        return None
    except (OSError, UnusableFileError, UnicodeDecodeError) as error:
        raise PreparedDataError(f"{path}: the chat template cannot be read ({error}); restore the file from a copy") from None


def published_template(directory: Path) -> str | None:
    """Return the template in the directory of a published model, in which no link is followed; None if there is none."""
    try:
        return _source_in(directory, below=directory)
    except FileNotFoundError:
        return None
    except (OSError, UnusableFileError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{directory}: its chat template cannot be read ({reason}); correct the file, or remove it") from None


def _source_in(folder: Path, below: Path | None = None) -> str:
    """Return the template in the folder of a supplied tokenizer; FileNotFoundError if there is none."""
    if (folder / TEMPLATE_FILE).is_file():
        paths = {_DEFAULT: folder / TEMPLATE_FILE, _WITH_TOOLS: folder / _MORE_TEMPLATES / f"{_WITH_TOOLS}.jinja"}
        return _joined({name: read_input(path, _MAX_BYTES, below=below).decode() for name, path in paths.items() if path.is_file()})
    config: Any = parse_json(read_input(folder / CONFIG_FILE, _MAX_CONFIG_BYTES, below=below))
    found = config.get("chat_template") if isinstance(config, dict) else None
    named = found if isinstance(found, list) else [{"name": _DEFAULT, "template": found}]
    templates: dict[str, Any] = {
        str(one.get("name")): one["template"] for one in named if isinstance(one, dict) and one.get("template") is not None
    }
    if _DEFAULT not in templates:
        raise FileNotFoundError
    if not all(isinstance(one, str) and len(one.encode()) <= _MAX_BYTES for one in templates.values()):
        raise ValueError(f"the chat_template in {folder / CONFIG_FILE} is not a text of at most {_MAX_BYTES} bytes")
    return _joined(templates)


def _joined(templates: Mapping[str, str]) -> str:
    """Return one template that uses the one for tools if there are tools, as transformers does, and else the default.

    An expression stands at each border, because a tag alone would take the white space beside it. The end of a line at the end of a
    template is not part of it.
    """
    default, with_tools = templates[_DEFAULT], templates.get(_WITH_TOOLS)
    if with_tools is None:
        return default
    bodies = (f"{{{{ '' }}}}{one.removesuffix(chr(10))}{{{{ '' }}}}" for one in (with_tools, default))
    return "{% if tools %}" + "{% else %}".join(bodies) + "{% endif %}"
