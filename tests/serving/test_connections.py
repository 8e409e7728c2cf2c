"""Eviction of connections when there are too many, also under attacks from many addresses."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from manyhands.serving.connections import ConnectionBudget, Crowd, Slot, network_of
from manyhands.serving.http_listener import HttpListener
from manyhands.serving.limits import Limits


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.1", "192.0.2.0/24"),
        ("192.0.2.255", "192.0.2.0/24"),
        ("192.0.3.1", "192.0.3.0/24"),
        ("127.0.0.1", "127.0.0.0/24"),
        ("127.0.1.1", "127.0.1.0/24"),
        ("2001:db8:0:1::1", "2001:db8:0:1::/64"),
        ("2001:db8:0:1:ffff:ffff:ffff:ffff", "2001:db8:0:1::/64"),
        ("2001:db8:0:2::1", "2001:db8:0:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:192.0.2.9", "192.0.2.0/24"),
        ("::1", "::/64"),
        ("", ""),
        ("/run/socket", "/run/socket"),
    ],
)
def test_addresses_are_grouped_by_network(address: str, network: str) -> None:
    assert network_of(address) == network


class Clients:
    """Slots of a budget whose eviction is noted."""

    def __init__(self, most: int, most_per_network: int = 1000, most_handshakes: int = 1000) -> None:
        self.budget = ConnectionBudget(most, most_per_network, most_handshakes)
        self.evicted: list[Slot] = []

    def come(self, address: str) -> Slot:
        slot = Slot(address, lambda: self._evict(slot))
        assert self.budget.enter(slot)
        return slot

    def ask(self, slot: Slot) -> Slot:
        self.budget.begin_request(slot)
        self.budget.end_request(slot)
        return slot

    def _evict(self, slot: Slot) -> None:
        self.evicted.append(slot)
        self.budget.leave(slot)


def test_new_connections_of_the_largest_network_are_evicted_first() -> None:
    clients = Clients(most=16)
    used = [clients.ask(clients.come("10.0.0.1")) for _ in range(8)]
    alone = clients.come("10.0.1.1")
    flood = [clients.come(f"10.0.2.{number}") for number in range(40)]
    assert clients.evicted == flood[:33]
    assert alone in clients.budget
    assert all(slot in clients.budget for slot in used)


def test_idle_connections_of_a_flood_are_evicted_before_new_clients() -> None:
    """Where clients that have completed a request hold almost all connections, these give way, not new ones."""
    clients = Clients(most=16)
    flood = [clients.ask(clients.come("10.0.2.1")) for _ in range(15)]
    honest = clients.ask(clients.come("10.0.0.1"))
    new = [clients.come("10.0.1.1"), clients.come("10.0.1.2")]
    assert clients.evicted == flood[:2]
    assert honest in clients.budget
    clients.ask(new[0])
    assert new[0] in clients.budget


def test_connections_with_a_request_in_flight_are_never_evicted() -> None:
    clients = Clients(most=2, most_per_network=2)
    slots = [clients.come("10.0.0.1") for _ in range(2)]
    for slot in slots:
        clients.budget.begin_request(slot)
    for address in ("10.0.0.2", "10.0.9.9"):
        assert not clients.budget.enter(Slot(address, lambda: pytest.fail("it never entered")))
    clients.budget.end_request(slots[1])
    clients.come("10.0.0.3")
    assert clients.evicted == [slots[1]]


def test_network_over_its_connection_limit_evicts_its_own_connections() -> None:
    clients = Clients(most=100, most_per_network=4)
    other = clients.come("10.0.1.1")
    slots = [clients.come(f"10.0.0.{number}") for number in range(6)]
    assert clients.evicted == slots[:2]
    assert other in clients.budget


def test_new_handshake_over_the_limit_evicts_another_handshake() -> None:
    clients = Clients(most=100, most_handshakes=3)
    slots = [clients.come(address) for address in ("10.0.0.1", "10.0.1.1", "10.0.1.2", "10.0.2.1")]
    for slot in slots:
        clients.budget.begin_handshake(slot)
    assert clients.evicted == [slots[1]]
    clients.budget.end_handshake(slots[2])
    clients.budget.begin_handshake(clients.come("10.0.1.3"))
    assert clients.evicted == [slots[1]]


def test_oldest_slot_of_the_largest_network_is_tracked_after_random_changes() -> None:
    chance, crowd, slots = random.Random(1), Crowd(), list[Slot]()
    for _ in range(3000):
        if slots and chance.random() < 0.48:
            slot = slots.pop(chance.randrange(len(slots)))
            crowd.discard(slot)
            crowd.discard(slot)
        else:
            slots.append(Slot(f"10.0.{chance.randrange(6)}.1", lambda: None))
            crowd.add(slots[-1])
            crowd.add(slots[-1])
        counts = Counter(slot.network for slot in slots)
        assert len(crowd) == len(slots)
        oldest = crowd.oldest()
        if oldest is None:
            assert not slots
        else:
            assert counts[oldest.network] == max(counts.values())
            assert oldest is next(slot for slot in slots if slot.network == oldest.network)


async def connect(port: int, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))


REQUEST = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"


def test_flood_from_many_addresses_of_one_network_evicts_no_other_client() -> None:
    """Each of the addresses has a single connection; counted one by one, they would be the smallest clients."""

    async def run() -> list[bytes]:
        listener = HttpListener(lambda request: request.answer(200, b"done"), Limits(connections=24))
        port = await listener.open("127.0.0.1", 0)
        clients = [await connect(port, "127.0.0.1") for _ in range(8)]
        for reader, writer in clients[:4]:
            writer.write(REQUEST)
            await reader.readuntil(b"done")
        while len(listener.budget) < 8:
            await asyncio.sleep(0.001)
        flood = [await connect(port, f"127.0.7.{number}") for number in range(1, 100)]
        # The last of them is among those that stay; by its answer all of them have been accepted.
        flood[-1][1].write(REQUEST)
        await flood[-1][0].readuntil(b"done")
        answers = []
        for reader, writer in clients:
            writer.write(REQUEST)
            answers.append(await reader.readuntil(b"done"))
        for _, writer in (*clients, *flood):
            writer.close()
        listener.close()
        return answers

    answers = asyncio.run(asyncio.wait_for(run(), 60))
    assert len(answers) == 8


def test_connections_of_one_network_are_capped_at_the_per_network_limit() -> None:
    async def run() -> tuple[int, bool]:
        limits = Limits(connections=64, connections_per_address=8)
        listener = HttpListener(lambda request: request.answer(200, b"done"), limits)
        port = await listener.open("127.0.0.1", 0)
        flood = [await connect(port, f"127.0.7.{number}") for number in range(1, 41)]
        flood[-1][1].write(REQUEST)
        await flood[-1][0].readuntil(b"done")
        ended = [await reader.read() for reader, _ in flood[:32]]
        num = len(listener.budget)
        for _, writer in flood:
            writer.close()
        listener.close()
        return num, any(ended)

    assert asyncio.run(asyncio.wait_for(run(), 60)) == (8, False)
