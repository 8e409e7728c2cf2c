"""Probing: hosts that have joined measure their links to the first host, and the ranks use the fastest one."""

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Sequence
from typing import Any

from ...distributed import MeasuredLink, measured, our_addresses, serving
from .channel import Channel, Message, ProtocolError

MAX_MEASURED = 8
"""Number of hosts that measure their links, one after the other; further hosts use the link that is best for these."""
MARGIN = 1.25
"""Factor by which a link must be faster than the one used for joining to replace it: measurements are noisy."""
ANSWER_SECONDS = 30.0
CHOSEN = "GLOO_SOCKET_IFNAME"
"""The environment variable with which the user selects an interface."""


def candidates(joined: str) -> list[str]:
    """Return the addresses of this host that ranks may use, beginning with `joined`, at which hosts have joined.

    Messages between ranks are not encrypted: if `joined` is private, only private addresses are returned. A choice by
    the user, GLOO_SOCKET_IFNAME, takes precedence.
    """
    ours = {address: name for address, name in our_addresses().items() if name != "lo"}
    if os.environ.get(CHOSEN):
        named = [address for address, name in ours.items() if name == os.environ[CHOSEN]]
        return named or [joined]
    if joined not in ours:
        return [joined]
    is_private = ipaddress.ip_address(joined).is_private
    others = [one for one in ours if one != joined and (ipaddress.ip_address(one).is_private or not is_private)]
    return [joined, *others]


def probe(channels: Sequence[Channel], addresses: Sequence[str]) -> list[MeasuredLink]:
    """Return the links that the other hosts measure to these addresses, one after the other; skip silent hosts."""
    found: list[MeasuredLink] = []
    with serving(list(addresses), secrets.token_bytes(16)) as (ways, token):
        for channel in channels[:MAX_MEASURED]:
            channel.send("probe", ways=[list(way) for way in ways], key=token.hex())
            try:
                found += _links(channel.wait_for("links", seconds=ANSWER_SECONDS)["found"])
            except (OSError, ProtocolError):
                continue
    return found


def answer(channel: Channel, request: Message, host: str) -> None:
    """Measure the links to the addresses that the first host listed, and send it the results."""
    ways = [(str(address), int(port)) for address, port in request["ways"]]
    found = measured(host, ways, bytes.fromhex(request["key"]))
    channel.send("links", found=[[x.host, x.interface, x.address, x.seconds, x.bytes_per_second] for x in found])


def chosen(links: Sequence[MeasuredLink], joined: str) -> str:
    """Return the address whose slowest link is the fastest; `joined` unless another address is faster by MARGIN.

    >>> ways = [MeasuredLink("b", "eth0", "10.0.0.1", 1e-4, 1e6), MeasuredLink("b", "eth1", "10.1.0.1", 1e-4, 1e9)]
    >>> chosen(ways, "10.0.0.1")
    '10.1.0.1'
    """
    hosts = {link.host for link in links}
    rates = {
        address: min(rates)
        for address in {link.address for link in links}
        if len(rates := [link.bytes_per_second for link in links if link.address == address]) == len(hosts)
    }
    best = max(rates, key=lambda address: rates[address], default=joined)
    return best if rates.get(best, 0.0) > MARGIN * rates.get(joined, 0.0) else joined


def describe_links(links: Sequence[MeasuredLink], address: str) -> list[str]:
    """Return one line per link, with the chosen address marked."""
    return [f"{link}{', chosen' if link.address == address else ''}" for link in links]


def _links(values: list[Any]) -> list[MeasuredLink]:
    try:
        return [MeasuredLink(str(h), str(i), str(a), float(s), float(rate)) for h, i, a, s, rate in values]
    except (TypeError, ValueError):
        raise ProtocolError("the message links has invalid values") from None
