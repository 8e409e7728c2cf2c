"""Memory of requests: kept for later requests, and returned to the system after a burst."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from manyhands.serving.heap import MAX_TRIM_SECONDS, TRIM_SECONDS, Heap

BURST = """
import asyncio
from manyhands.serving import heap

async def main():
    heap.keep_memory()
    watch = heap.Heap()
    start = heap.resident_bytes()
    burst = [b"x" * 200_000 for _ in range(3000)]
    pins = burst[::300]
    await watch.trim()
    during = heap.resident_bytes()
    del burst
    freed = heap.resident_bytes()
    watch._next = 0.0
    await watch.trim()
    after = heap.resident_bytes()
    print([size - start >> 20 for size in (during, freed, after)], len(pins))

asyncio.run(main())
"""


def test_memory_of_a_burst_of_requests_is_returned_to_the_system() -> None:
    """In a program of its own, because the allocator's settings hold for the whole process."""
    done = subprocess.run([sys.executable, "-c", BURST], capture_output=True, text=True, check=True)
    during, freed, after = eval(done.stdout.rpartition(" ")[0])
    assert during > 500, "memory in use stays"
    assert freed > 400, "the allocator keeps what was freed below blocks in use, or nothing would be shown here"
    assert after < 100


def test_requests_to_trim_become_rare_while_they_return_nothing() -> None:
    async def trim_often() -> list[float]:
        heap, pauses = Heap(), []
        heap._most = 0
        for _ in range(9):
            heap._next = 0.0
            await heap.trim()
            pauses.append(heap._pause)
        return pauses

    pauses = asyncio.run(trim_often())
    assert pauses == sorted(pauses)
    assert pauses[0] >= TRIM_SECONDS
    assert pauses[-1] == MAX_TRIM_SECONDS
