"""Removes secrets, and names of hosts, users and folders, from text for strangers."""

from __future__ import annotations

import os
import pwd
import re
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from common.redaction import HIDDEN, redacted, secrets_of

__all__ = ["Redactor", "redactor_here"]

_SECRET_WORD = r"(?:key|token|secret|pass|passwd|password|passphrase|credential|authorization|cookie)"
_SECRET_NAME = re.compile(rf"{_SECRET_WORD}s?(?:_|$)", re.IGNORECASE)
"""The end of a word in the name of a variable: TOKENIZERS_PARALLELISM holds no secret."""
_ASSIGNED = re.compile(
    rf"((?:[\w-]*{_SECRET_WORD})[\"']?\s*[=:]\s*)((?:bearer\s+|basic\s+)?(?:\"[^\"]*\"|'[^']*'|[^\s,;&\"']+))", re.IGNORECASE
)
_BEARER = re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE)
_KNOWN_FORM = re.compile(r"\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA|ASIA|ya29\.|eyJ)[\w.-]{8,}")
"""Beginnings by which services mark their keys."""
_URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s\"'<>`]*")
_HOME = re.compile(r"(?:/home|/Users|/export/home|/var/home)/[^/\s\"':;,]+|/root(?![\w.-])|[A-Za-z]:\\Users\\[^\\\s\"']+")
_ADDRESS = re.compile(
    r"(?<![\w.-])(?:\d{1,3}\.){3}\d{1,3}(?![\w-]|\.\d)"
    r"|(?<![\w:])(?:(?:[0-9A-Fa-f]{1,4}:){4,7}[0-9A-Fa-f]{1,4}|(?:[0-9A-Fa-f]{1,4}:){1,6}(?::[0-9A-Fa-f]{1,4}){1,6})(?![\w:])"
)
"""An IPv4 or IPv6 address. A time such as 12:34:56 is none."""
_MAIL = re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)*")
_GENERAL_NAMES = {"root", "trainer", "user", "ubuntu", "debian", "nobody", "admin", "localhost", "localhost.localdomain"}
"""Names that say nothing about a person or an organisation."""
_HOST_VARIABLES = (
    *("HOSTNAME", "HOST", "MASTER_ADDR", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", "SLURMD_NODENAME", "SLURM_JOB_NODELIST"),
    *("SLURM_SUBMIT_HOST", "SLURM_TOPOLOGY_ADDR", "SKYPILOT_NODE_IPS"),
)
_USER_VARIABLES = ("USER", "LOGNAME", "USERNAME", "SUDO_USER", "SLURM_JOB_USER")
_FEWEST_CHARS = 4
"""Shorter values are not treated as secrets: they occur inside many other words."""
_FEWEST_OF_URL = 6
"""As above, for parts of addresses, which may be ordinary words."""
_NO_SECRETS = {"true", "false", "none", "null", "auto", "default"}


@dataclass(frozen=True)
class Redactor:
    """What must not get into text for strangers."""

    secrets: tuple[str, ...] = ()
    """Values of variables of the environment that hold secrets."""
    hosts: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    homes: tuple[str, ...] = ()

    def without_secrets(self, text: str) -> str:
        """Return text without the values of secret variables; all else stays."""
        for secret in self.secrets:
            text = text.replace(secret, HIDDEN)
        return text

    def text(self, text: str) -> str:
        """Return text without secrets, addresses, names and home folders."""
        text = _URL.sub(lambda found: f"{found.group().partition('://')[0]}://<address>", redacted(self.without_secrets(text)))
        text = _ASSIGNED.sub(rf"\1{HIDDEN}", text)
        text = _BEARER.sub(rf"\1 {HIDDEN}", text)
        text = _KNOWN_FORM.sub(HIDDEN, text)
        for home in self.homes:
            text = text.replace(home, "<home>")
        text = _HOME.sub("<home>", text)
        text = _MAIL.sub("<address>", text)
        text = _ADDRESS.sub("<address>", text)
        for names, shown in ((self.hosts, "<host>"), (self.users, "<user>")):
            for name in names:
                text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}[0-9]*(?![A-Za-z0-9])", shown, text, flags=re.IGNORECASE)
        return text

    def value(self, value: Any) -> Any:
        """Return a value for JSON with all its texts redacted, and the names in its tables too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(name)): self.value(part) for name, part in value.items()}
        return [self.value(part) for part in value] if isinstance(value, list | tuple) else value


def redactor_here(variables: Mapping[str, str] = os.environ) -> Redactor:
    """Return the redactor for this machine, this user and these variables of the environment."""
    secrets = {value.strip() for name, value in variables.items() if _SECRET_NAME.search(name)}
    secrets |= {part for value in variables.values() if "://" in value for part in secrets_of(value) if len(part) >= _FEWEST_OF_URL}
    users = {variables.get(name, "") for name in _USER_VARIABLES}
    homes = {variables.get("HOME", "")}
    with suppress(KeyError):  # a user id without an entry in /etc/passwd
        entry = pwd.getpwuid(os.getuid())
        users.add(entry.pw_name)
        homes.add(entry.pw_dir)
    hosts = {socket.gethostname(), os.uname().nodename}
    for name in _HOST_VARIABLES:
        listed = re.sub(r"\[[^\]]*\]|:\d+$", " ", variables.get(name, ""))  # node[01-04] of Slurm, and ports
        hosts |= set(re.split(r"[\s,]+", listed))
    hosts |= {host.partition(".")[0] for host in hosts if not host.replace(".", "").isdecimal()}
    return Redactor(
        secrets=_longest_first(value for value in secrets if len(value) >= _FEWEST_CHARS and value.lower() not in _NO_SECRETS),
        hosts=_longest_first(hosts),
        users=_longest_first(users),
        homes=_longest_first(home.rstrip("/") for home in homes if home.count("/") > 0),
    )


def _longest_first(words: Iterable[str]) -> tuple[str, ...]:
    kept = {word for word in words if len(word) > 1 and word.lower() not in _GENERAL_NAMES}
    return tuple(sorted(kept, key=lambda word: (-len(word), word)))
