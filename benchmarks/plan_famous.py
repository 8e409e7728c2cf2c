"""Three famous points of saturation, under the assumptions of their time, and what would be reached there today.

TensorFlow's first reports: neural translation 6 times as fast on 8 GPUs as on one, Inception 32 times on 50, RankBrain
300 times on 500 machines. What they ran on is not published in full; what is assumed is listed here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from manyhands.core import StrategySpec
from manyhands.costs import Servers, link
from manyhands.planning import Cluster, Workload, estimate

from .plan_published import CLOCK, timed

BUSY = 0.2
"""How far steps of machines that others use too differ, as a part of them: shared clusters of 2016."""


@dataclass(frozen=True)
class Famous:
    """A published run: what was published, and what is assumed."""

    name: str
    num_devices: int
    speedup: float
    assumed: str
    seconds: float
    """Of a step of one device."""
    megabytes: float
    """Of what is exchanged in a step, both ways."""
    cluster: Cluster
    servers: Servers
    today: Cluster

    def predicted(self) -> float:
        """The speed-up of that time."""
        return self._speedup(self.cluster, self.seconds, self.servers)

    def nowadays(self) -> float:
        """The speed-up on given devices, ten times as fast, with all-reduces overlapped by backward."""
        return self._speedup(self.today, self.seconds / 10, None)

    def _speedup(self, cluster: Cluster, seconds: float, servers: Servers | None) -> float:
        network = timed(seconds, [self.megabytes * 1e6 / 16] * 16)
        many = Workload(networks={"fp32": network}, batch_size=self.num_devices)
        alone = estimate(replace(many, batch_size=1), cluster, StrategySpec()).seconds
        together = estimate(many, cluster, StrategySpec(replicas=self.num_devices), servers=servers)
        return self.num_devices * alone / together.seconds


def cluster(hosts: int, per_host: int, inside: str, network: str, gbits: float, spread: float) -> Cluster:
    """Clocks, connected."""
    way = link(network, gbits * 1e9 / 8) if hosts > 1 else None
    return Cluster(hosts=hosts, per_host=per_host, chip=CLOCK, inside=link(inside), network=way, spread=spread)


POINTS = (
    Famous(
        "translation",
        8,
        6.0,
        "8 GPUs behind one PCIe switch, 400 MB of dense parameters in the host's memory, 1 s a step on one GPU",
        1.0,
        400.0,
        cluster(1, 8, "PCIe 3", "Ethernet", 10, 0.02),
        Servers(count=1, hottest=1.0, way=link("PCIe 3"), task_rate=link("PCIe 3").rate, waits=True),
        cluster(1, 8, "NVLink 4", "InfiniBand", 400, 0.02),
    ),
    Famous(
        "Inception",
        50,
        32.0,
        "50 machines with a GPU each on a shared cluster, 10 Gb/s, 17 servers, 95 MB, 2 s a step, steps differ by 20%",
        2.0,
        95.0,
        cluster(50, 1, "PCIe 3", "Ethernet", 10, BUSY),
        Servers(count=17, hottest=1 / 17, way=link("Ethernet", 1.25e9), waits=True),
        cluster(7, 8, "NVLink 4", "InfiniBand", 400, 0.02),
    ),
    Famous(
        "RankBrain",
        500,
        300.0,
        "500 machines on a shared cluster, 10 Gb/s, 50 servers, 2 MB of tables' rows, 1 s a step, steps differ by 20%",
        1.0,
        2.0,
        cluster(500, 1, "PCIe 3", "Ethernet", 10, BUSY),
        Servers(count=50, hottest=1 / 50, way=link("Ethernet", 1.25e9), waits=True),
        cluster(63, 8, "NVLink 4", "InfiniBand", 400, 0.02),
    ),
)
