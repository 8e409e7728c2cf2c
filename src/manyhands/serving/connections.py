"""Eviction of connections when a listener has too many: clients are counted by network, from accept on."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable
from functools import lru_cache

NETWORK_BITS = {4: 24, 6: 64}
"""Leading bits of an address that one client controls all addresses of: a subnet of IPv4, a subscriber of IPv6."""
NEW_SHARE = 8
"""One of this many connections may be new before new ones give way to those that have completed a request."""


@lru_cache(4096)
def network_of(address: str) -> str:
    """Return the network that an address is counted for: its /24 for IPv4, its /64 for IPv6.

    Loopback addresses are grouped as all others are. A text that is no address is a group of its own.

    >>> network_of("192.0.2.7"), network_of("2001:db8::1:2:3:4"), network_of("::ffff:192.0.2.7")
    ('192.0.2.0/24', '2001:db8::/64', '192.0.2.0/24')
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return str(ipaddress.ip_network((parsed, NETWORK_BITS[parsed.version]), strict=False))


class Slot:
    """The place of one connection in a budget, from accept to close.

    Attributes:
        network: The client's network.
        evict: Closes the connection and makes the slot leave its budget.
    """

    __slots__ = ("evict", "has_completed", "network")

    def __init__(self, address: str, evict: Callable[[], None]) -> None:
        self.network, self.evict = network_of(address), evict
        self.has_completed = False
        """Whether a request of this connection was answered."""


class Crowd:
    """Slots by network. Every operation takes the same time for any number of slots and networks."""

    def __init__(self) -> None:
        self._slots: dict[str, dict[Slot, None]] = {}
        self._networks: dict[int, dict[str, None]] = {}
        """Networks by their number of slots; those that have had that number for the longest time first."""
        self._largest = 0
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._slots.get(slot.network, ())

    def num_of(self, network: str) -> int:
        """Return the number of slots of a network."""
        return len(self._slots.get(network, ()))

    def add(self, slot: Slot) -> None:
        """Add a slot as the newest of its network; one that is here already stays where it is."""
        slots = self._slots.setdefault(slot.network, {})
        if slot not in slots:
            slots[slot] = None
            self._num += 1
            self._move(slot.network, len(slots) - 1, len(slots))

    def discard(self, slot: Slot) -> None:
        """Remove a slot if it is here."""
        slots = self._slots.get(slot.network)
        if slots is not None and slot in slots:
            del slots[slot]
            self._num -= 1
            self._move(slot.network, len(slots) + 1, len(slots))
            if not slots:
                del self._slots[slot.network]

    def oldest(self, network: str | None = None) -> Slot | None:
        """Return the oldest slot of a network, or else of the network with the most slots; None if there is none."""
        if network is None:
            network = next(iter(self._networks.get(self._largest, ())), "")
        return next(iter(self._slots.get(network, ())), None)

    def _move(self, network: str, before: int, after: int) -> None:
        if before:
            del self._networks[before][network]
            if not self._networks[before]:
                del self._networks[before]
        if after:
            self._networks.setdefault(after, {})[network] = None
        if after > self._largest or self._largest not in self._networks:
            # The number of a network changes by one, and so does the largest of them.
            self._largest = after


class ConnectionBudget:
    """The connections that a listener has, and which of them is evicted for another one.

    A connection is new until its first request is answered, whether it has sent nothing, is in the TLS handshake or
    sends its first request. Those that have completed a request are idle between requests; one whose request is being
    answered is never evicted. New connections give way first, unless they are few: otherwise clients that come while
    others hold idle connections would never get to their first request. Of either kind the oldest one of the
    network that has the most gives way.

    Args:
        most: The number of connections.
        most_per_network: The number of those from one network.
        most_handshakes: The number of those in a TLS handshake.
    """

    def __init__(self, most: int, most_per_network: int, most_handshakes: int) -> None:
        self._most, self._most_per_network, self._most_handshakes = most, most_per_network, most_handshakes
        self._networks: Counter[str] = Counter()
        self._slots: set[Slot] = set()
        self._new, self._idle, self._handshakes = Crowd(), Crowd(), Crowd()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._slots

    def enter(self, slot: Slot) -> bool:
        """Count a connection that was accepted, and evict one if there are too many.

        Returns False if the request of every connection is being answered, so that none can be evicted.
        """
        if self._networks[slot.network] >= self._most_per_network:
            has_capacity = self._evict(self._most_per_network, slot.network)
        else:
            has_capacity = len(self._slots) < self._most or self._evict(self._most)
        if has_capacity:
            self._slots.add(slot)
            self._networks[slot.network] += 1
            self._new.add(slot)
        elif not self._networks[slot.network]:
            del self._networks[slot.network]
        return has_capacity

    def leave(self, slot: Slot) -> None:
        """Count a connection no longer; one that has left already may leave again."""
        if slot not in self._slots:
            return
        self._slots.remove(slot)
        for crowd in (self._new, self._idle, self._handshakes):
            crowd.discard(slot)
        self._networks[slot.network] -= 1
        if not self._networks[slot.network]:
            del self._networks[slot.network]

    def begin_handshake(self, slot: Slot) -> None:
        """Count a connection as one in the TLS handshake, and evict another one of these if there are too many."""
        if len(self._handshakes) >= self._most_handshakes:
            oldest = self._handshakes.oldest()
            assert oldest is not None
            oldest.evict()
        self._handshakes.add(slot)

    def end_handshake(self, slot: Slot) -> None:
        """Count a connection no longer as one in the TLS handshake."""
        self._handshakes.discard(slot)

    def begin_request(self, slot: Slot) -> None:
        """Keep a connection, whose request is being answered, from being evicted."""
        (self._idle if slot.has_completed else self._new).discard(slot)

    def end_request(self, slot: Slot) -> None:
        """Make a connection whose request was answered the newest of those that wait for another one."""
        slot.has_completed = True
        if slot in self._slots:
            self._idle.add(slot)

    def touch(self, slot: Slot) -> None:
        """Make a connection whose calls are answered the newest of those that may be evicted."""
        self._new.discard(slot)
        self._idle.discard(slot)
        self.end_request(slot)

    def _evict(self, most: int, network: str | None = None) -> bool:
        num_new = len(self._new) if network is None else self._new.num_of(network)
        new, idle = self._new.oldest(network), self._idle.oldest(network)
        slot = idle if idle is not None and num_new <= max(1, most // NEW_SHARE) else new
        if slot is None:
            return False
        slot.evict()
        return True
