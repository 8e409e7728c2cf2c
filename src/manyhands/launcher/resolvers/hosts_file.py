"""The hosts file resolver: one line per host, in the format of mpirun."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from ...core import SettingsError
from .resolver import Environ, Host, ResolvedCluster, Resolver, port_of

_LINE = re.compile(
    r"(?P<name>[A-Za-z0-9_.-]+)(?::(?P<colon>\d+))?(?:\s+(?:slots|max_slots|devices)\s*=\s*(?P<slots>\d+))?"
)


def is_hosts_file(on: object) -> bool:
    """Return whether `on=` names a hosts file rather than devices.

    >>> is_hosts_file("hosts.txt"), is_hosts_file("cpu*2")
    (True, False)
    """
    return isinstance(on, str) and "," not in on and (on.endswith((".txt", ".hosts")) or Path(on).is_file())


class HostsFile(Resolver):
    """Resolver that reads lines such as `host1`, `host1:4` or `host1 slots=4`, where 4 is a number of devices.

    # starts a comment. The ranks rendezvous at the first host. `is_here` returns whether a name is this machine's.
    """

    def __init__(self, path: str | Path, is_here: Callable[[str], bool]) -> None:
        self.path, self._is_here = Path(path), is_here
        self.name = f"the hosts file {self.path}"

    def is_present(self, environ: Environ) -> bool:
        return self.path.is_file()

    def read(self, environ: Environ) -> ResolvedCluster:
        hosts = tuple(self._hosts())
        here = [index for index, host in enumerate(hosts) if self._is_here(host.name)]
        if len(here) != 1:
            got = "none of " + ", ".join(map(str, hosts)) if not here else ", ".join(str(hosts[i]) for i in here)
            raise SettingsError(
                f"{self.name} must name this machine exactly once",
                got=got,
                remedy="write its name or its address on exactly one line",
            )
        return ResolvedCluster(
            source=self.name,
            hosts=hosts,
            here=here[0],
            address=hosts[0].name,
            port=port_of(environ),
            variables=(str(self.path),),
        )

    def _hosts(self) -> list[Host]:
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(
                "a hosts file must be readable text", got=str(error), remedy="correct its path"
            ) from None
        found = []
        for number, line in enumerate(lines, 1):
            text = line.split("#")[0].strip()
            if not text:
                continue
            match = _LINE.fullmatch(text)
            slots = match and (match["slots"] or match["colon"])
            if match is None or slots == "0":
                raise SettingsError(
                    "a line of a hosts file must be HOST, HOST:4 or HOST slots=4",
                    got=f"{text!r} in line {number} of {self.path}",
                    remedy="correct that line",
                )
            found.append(Host(match["name"], int(slots) if slots else None))
        if not found:
            raise SettingsError(
                "a hosts file must name at least one host", got=f"none in {self.path}", remedy="write one host per line"
            )
        return found
