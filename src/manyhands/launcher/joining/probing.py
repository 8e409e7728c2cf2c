"""Probing: hosts that have joined measure the ways between them, and the fastest one carries what ranks exchange."""

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Sequence
from typing import Any

from ...distributed import MeasuredLink, measured, our_addresses, serving
from .channel import Channel, Message, ProtocolError

MAX_MEASURED = 8
"""Hosts that measure, one after the other; the rest take the way that was best for these."""
MARGIN = 1.25
"""Another way must be so much faster than the one by which hosts joined: measurements are noisy."""
ANSWER_SECONDS = 30.0
CHOSEN = "GLOO_SOCKET_IFNAME"
"""Names the interface where a person has chosen one."""


def candidates(joined: str) -> list[str]:
    """Addresses of this host that may carry the traffic: private ones, where the one that hosts joined at is private.

    What ranks say to each other is not sealed, so it never moves from a private network to a public one.
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
    """What the other hosts measure, one after the other; one that cannot say is passed over."""
    found: list[MeasuredLink] = []
    with serving(list(addresses), secrets.token_bytes(16)) as (ways, token):
        for channel in channels[:MAX_MEASURED]:
            channel.send("probe", ways=[list(way) for way in ways], key=token.hex())
            try:
                found += _links(channel.wait_for("links", seconds=ANSWER_SECONDS)["found"])
            except (OSError, ProtocolError):
                continue
    return found


def answer(channel: Channel, asked: Message, host: str) -> None:
    """Measures the ways that the first host named, and tells it."""
    ways = [(str(address), int(port)) for address, port in asked["ways"]]
    found = measured(host, ways, bytes.fromhex(asked["key"]))
    channel.send("links", found=[[x.host, x.interface, x.address, x.seconds, x.bytes_per_second] for x in found])


def chosen(links: Sequence[MeasuredLink], joined: str) -> str:
    """The address whose slowest way is the fastest; the one where hosts joined, unless another is clearly better.

    >>> ways = [Link("b", "eth0", "10.0.0.1", 1e-4, 1e6), Link("b", "eth1", "10.1.0.1", 1e-4, 1e9)]
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


def said(links: Sequence[MeasuredLink], address: str) -> list[str]:
    """A line per way, with the one that is used marked."""
    return [f"{link}{', chosen' if link.address == address else ''}" for link in links]


def _links(values: list[Any]) -> list[MeasuredLink]:
    try:
        return [MeasuredLink(str(h), str(i), str(a), float(s), float(rate)) for h, i, a, s, rate in values]
    except (TypeError, ValueError):
        raise ProtocolError("links of another shape") from None
