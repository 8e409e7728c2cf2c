"""The TF_CONFIG resolver: the cluster description of a TensorFlow job."""

from __future__ import annotations

import json
from typing import Any

from ...core import SettingsError
from .resolver import CHIEF, EVALUATOR, SERVER, WORKER, Environ, Host, ResolvedCluster, Resolver

_ROLES = (CHIEF, "master", WORKER, SERVER, EVALUATOR)
_REMEDY = (
    'write {"cluster": {"chief": ["host1:2222"], "worker": ["host2:2222"]}, "task": {"type": "worker", "index": 0}}'
)


class TfConfig(Resolver):
    """Resolver that reads the addresses of chief, workers, parameter servers and evaluators; each counts as a host."""

    name = "TF_CONFIG"

    def is_present(self, environ: Environ) -> bool:
        return bool(environ.get("TF_CONFIG", "").strip()) and environ["TF_CONFIG"].strip() != "{}"

    def read(self, environ: Environ) -> ResolvedCluster:
        config = _parsed(environ["TF_CONFIG"])
        tasks = _tasks(config)
        role, index = _task(config)
        mine = next((host for number, host in tasks.get(role, []) if number == index), None)
        if mine is None:
            have = ", ".join(f"{name} 0 to {len(hosts) - 1}" for name, hosts in tasks.items())
            raise SettingsError(
                f"the task in TF_CONFIG must be one of its cluster ({have})",
                got=f"{role} {index}",
                remedy="correct the task",
            )
        # Hosts that train come first, because the first host is the rendezvous.
        hosts = tuple(host for name in (CHIEF, WORKER, SERVER, EVALUATOR) for _, host in tasks.get(name, []))
        if hosts[0].role not in (CHIEF, WORKER):
            raise SettingsError(
                "the cluster in TF_CONFIG must have a chief or a worker", got=", ".join(tasks), remedy=_REMEDY
            )
        return ResolvedCluster(
            source=self.name,
            hosts=hosts,
            here=hosts.index(mine),
            address=hosts[0].name,
            port=hosts[0].port,
            variables=("TF_CONFIG",),
        )


def _parsed(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError("TF_CONFIG must be valid JSON", got=str(error)[:200], remedy=_REMEDY) from None
    if not isinstance(config, dict) or not isinstance(config.get("cluster"), dict) or not config["cluster"]:
        raise SettingsError("TF_CONFIG must have a cluster", got=_brief(text), remedy=_REMEDY)
    return config


def _tasks(config: dict[str, Any]) -> dict[str, list[tuple[int, Host]]]:
    """Return, by role, the numbers and hosts of the tasks in the cluster, sorted by number."""
    found: dict[str, list[tuple[int, Host]]] = {}
    for role, addresses in config["cluster"].items():
        if role not in _ROLES:
            raise SettingsError(
                f"the role of a task must be one of {', '.join(_ROLES)}",
                got=repr(role),
                remedy="correct the cluster in TF_CONFIG",
            )
        if not isinstance(addresses, (list, dict)):
            raise SettingsError(f"TF_CONFIG must list the addresses of {role}", got=repr(addresses), remedy=_REMEDY)
        # A sparse cluster description, which lists only some tasks, has their numbers as keys.
        pairs = addresses.items() if isinstance(addresses, dict) else enumerate(addresses)
        name = CHIEF if role == "master" else role
        found.setdefault(name, []).extend((_index(n), _host(str(text), name)) for n, text in pairs)
    if len(found.get(CHIEF, [])) > 1:
        raise SettingsError(
            "a cluster must have one chief",
            got=", ".join(str(host) for _, host in found[CHIEF]),
            remedy="make the others workers",
        )
    return {role: sorted(tasks, key=lambda task: task[0]) for role, tasks in found.items() if tasks}


def _task(config: dict[str, Any]) -> tuple[str, int]:
    task = config.get("task")
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
        raise SettingsError("TF_CONFIG must name the task of this process", got=repr(task), remedy=_REMEDY)
    return CHIEF if task["type"] == "master" else str(task["type"]), _index(task["index"])


def _index(value: Any) -> int:
    if isinstance(value, bool) or not str(value).isdecimal():
        raise SettingsError("the index of a task must be a whole number", got=repr(value), remedy="correct TF_CONFIG")
    return int(value)


def _host(text: str, role: str) -> Host:
    name, _, port = text.rpartition(":")
    if not name or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingsError(
            "addresses in TF_CONFIG must be written HOST:PORT", got=f"{text!r} of {role}", remedy="correct that address"
        )
    return Host(name.strip("[]"), role=role, port=int(port))


def _brief(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."
