"""Restrict web addresses to the host that the user named and to the hosts in `limits.allowed_hosts`.

Otherwise a redirect or a name server could make this machine train on pages of its private network (request forgery).
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from common.errors import SourceError
from common.redaction import redacted
from data_pipeline.sources.formats import printable

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_REMEDY = "if you trust it, add it to limits.allowed_hosts"


@dataclass(frozen=True)
class GuardedClient:
    """Creates the client sessions of fsspec's web store. Equal instances share a store, so this class has no state."""

    allowed: tuple[str, ...]

    async def __call__(self, **options: Any) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_request_redirect.append(self._check_redirect)
        if "connector" not in options:
            options["connector"] = aiohttp.TCPConnector(resolver=_GuardedResolver(self.allowed))
        return aiohttp.ClientSession(**options | {"trace_configs": [*options.get("trace_configs", ()), trace]})

    async def _check_redirect(self, _session: object, _context: object, params: aiohttp.TraceRequestRedirectParams) -> None:
        headers = params.response.headers
        if not (location := headers.get("Location") or headers.get("URI")):
            return
        start = printable(redacted(str(params.url)))
        try:
            target = params.url.join(URL(location))
        except ValueError:
            raise SourceError(f"{start}: the server redirects to an invalid address") from None
        if not (may_redirect(params.url, target) or _is_allowed(target.host or "", self.allowed)):
            place = printable(str(target.origin())) if target.absolute else "an address without a host"
            raise SourceError(f"{start}: the server redirects to another host, {place}; {_REMEDY}, or name that address itself")


def may_redirect(start: URL, target: URL) -> bool:
    if start.host != target.host:
        return False
    ports = (start.port, target.port)
    return (start.scheme == target.scheme and ports[0] == ports[1]) or (
        start.scheme == "http" and target.scheme == "https" and (ports == (80, 443) or ports[0] == ports[1])
    )


def is_public(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF) if found in _NAT64 else found.ipv4_mapped or found.sixtofour
        if inner is not None:
            found = inner
    return found.is_global and not found.is_multicast


def _is_allowed(host: str, allowed: tuple[str, ...]) -> bool:
    return any(fnmatchcase(host.lower(), pattern.lower()) for pattern in allowed)


class _GuardedResolver(AbstractResolver):
    """Drops addresses of private networks, except for local names and allowed hosts."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = allowed
        self._inner = aiohttp.DefaultResolver()

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        name = host.rstrip(".").lower()
        is_local = "." not in name or name.endswith(".localhost")  # not a public name: the user means a machine of the network
        if is_local or _is_allowed(host, self._allowed):
            return found
        public = [one for one in found if is_public(one["host"])]
        if not public:
            addresses = ", ".join(sorted({one["host"] for one in found}))
            raise SourceError(f"{printable(host)}: this name resolves to {addresses}, which is not a public address; {_REMEDY}")
        return public

    async def close(self) -> None:
        await self._inner.close()
