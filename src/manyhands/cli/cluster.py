"""Command `manyhands cluster`: print the members of the cluster, the source of this information, and problems."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import SettingsError, as_task, format_duration, format_rate, resolve_options
from .generated_options import with_options
from .options import Devices, Json, Params, add_command
from .screen import only_json, print_json, stdout
from .target import load_task, parse_params

if TYPE_CHECKING:
    from ..distributed import Reach, Survey
    from ..launcher import ResolvedCluster

Target = Annotated[
    str | None,
    typer.Argument(metavar="FILE.py[:name]", help="Task whose data is compared between the hosts.", show_default=False),
]
Meet = Annotated[
    bool,
    typer.Option(
        "--meet",
        help="Connect to the other hosts, on which the same command runs, compare them, and measure the links.",
    ),
]
Seconds = Annotated[float, typer.Option(help="Seconds to wait for a host.", show_default=True)]

EXAMPLES = (
    "manyhands cluster",
    "srun manyhands cluster train.py --meet",
    "manyhands cluster --on hosts.txt --json",
)
UNREACHED = "{} cannot be reached: {}; look at its name, its network and its firewall"


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, cluster, EXAMPLES)


@with_options(Devices)
def cluster(
    target: Target = None,
    params: Params = None,
    meet: Meet = False,
    timeout: Seconds = 30.0,
    as_json: Json = False,
    *,
    given: dict[str, Any],
) -> None:
    """Print the members of the cluster that torchrun, SLURM, Kubernetes, MPI, TF_CONFIG or a hosts file describes.

    Every host is checked for reachability. With --meet, and the same command on all hosts, their versions, clocks and
    data are compared, and the network interface for the traffic is chosen by measurement. The exit code is 1 if there
    is a problem.
    """
    from ..distributed import reach, this_host
    from ..launcher import described, launched

    environ, no_task = _with_any_task(os.environ)
    on = resolve_options((Devices,), given).of(Devices).on
    found = described(on, environ)
    joining, unfit = _joining(on, environ, found)
    with only_json(as_json):
        data = _digest(target, params) if target is not None else ""
    survey = None
    if meet and launched(on, per_host=True) is not None:
        survey = _meet(on, data, timeout)
    hosts = [] if found is None else [host for host in found.hosts if host.name]
    probes = (
        [] if found is None or survey is not None else [reach(h.name, h.port or found.port, timeout) for h in hosts]
    )
    warnings = _warnings(found, probes, survey, meet) + unfit + no_task
    facts = {**_as_dict(found, probes, survey, warnings, data), "joining": joining}
    if survey is None or found is None or found.standing is None or found.standing.rank == 0:
        print_json(facts) if as_json else _show(found, facts, this_host())
    if [text for text in warnings if "is here too" not in text]:
        raise typer.Exit(1)


def _with_any_task(environ: Mapping[str, str]) -> tuple[Mapping[str, str], list[str]]:
    """Return the environment with a task added to TF_CONFIG if that names none, and a warning about it.

    A cluster can thereby be inspected from a machine that is not one of its members. Any other environment is returned
    unchanged, without a warning.
    """
    try:
        config = json.loads(environ.get("TF_CONFIG", ""))
        if "task" in config:
            return environ, []
        role = next(name for name in ("chief", "master", "worker", "ps", "evaluator") if config["cluster"].get(name))
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        return environ, []
    config["task"] = {"type": role, "index": 0}
    warning = (
        f"TF_CONFIG does not say which task this is: it is shown as {role} 0 sees it, and nothing can be trained so"
    )
    return {**environ, "TF_CONFIG": json.dumps(config)}, [warning]


def _joining(
    on: str | None, environ: Mapping[str, str], found: ResolvedCluster | None
) -> tuple[dict[str, str], list[str]]:
    """Return how hosts on which a scheduler starts one process each would authenticate, and problems with that.

    Both are empty if hosts do not join in this way.
    """
    from ..launcher import CHIEF, TOKEN_VARIABLE, WORKER, tls_here, whole_host

    if found is None or found.standing is not None or found.host.role not in (CHIEF, WORKER):
        return {}, []
    join = whole_host(on, environ)
    if join is None:
        return {}, []
    try:
        tls_here(join.tls).check()
    except SettingsError as error:
        return {"token": TOKEN_VARIABLE, "tls": join.tls}, [str(error)]
    return {"token": TOKEN_VARIABLE, "tls": join.tls}, []


def _digest(target: str, params: list[str] | None) -> str:
    """Return a digest of the data of a task, which hosts compare."""
    from ..data import as_source, data_digest

    task = as_task(load_task(target), parse_params(params or []))
    return data_digest(as_source(task.data, collate=task.collate))


def _meet(on: str | None, data: str, timeout: float) -> Survey:
    """Connect to the ranks of the launched job, and return the comparison of the hosts and the measured links."""
    from ..distributed import survey
    from ..launcher import join_launched

    world = join_launched(on, timeout, per_host=True)
    assert world is not None
    try:
        return survey(world, data)
    finally:
        world.close()


def _warnings(found: ResolvedCluster | None, probes: list[Reach], survey: Survey | None, meet: bool) -> list[str]:
    warnings = [] if found is None else list(found.warnings)
    warnings += [UNREACHED.format(probe.host, probe.why) for probe in probes if probe.seconds is None]
    warnings += survey.warnings if survey is not None else ()
    if meet and survey is None:
        warnings.append("there are no other hosts to connect to, because this process was started alone")
    return warnings


def _as_dict(
    found: ResolvedCluster | None, probes: list[Reach], survey: Survey | None, warnings: list[str], data: str
) -> dict[str, Any]:
    return {
        "source": None if found is None else found.source,
        "read": [] if found is None else list(found.variables),
        "hosts": [] if found is None else [dataclasses.asdict(host) for host in found.hosts],
        "here": None if found is None else found.here,
        "meeting": None if found is None else f"{found.address}:{found.port}",
        "standing": None if found is None or found.standing is None else dataclasses.asdict(found.standing),
        "reach": [dataclasses.asdict(probe) for probe in probes],
        "ranks": [] if survey is None else [dataclasses.asdict(one) for one in survey.ranks],
        "links": [] if survey is None else [dataclasses.asdict(link) for link in survey.links],
        "interface": {} if survey is None else {host: link.interface for host, link in survey.chosen.items()},
        "data": data,
        "warnings": warnings,
    }


def _show(found: ResolvedCluster | None, facts: dict[str, Any], host: str) -> None:
    from rich.text import Text

    console = stdout()
    for line in _lines(found, facts, host):
        console.print(Text(line), soft_wrap=True)
    for text in facts["warnings"]:
        console.print(Text(text, style="yellow"), soft_wrap=True)


def _lines(found: ResolvedCluster | None, facts: dict[str, Any], host: str) -> list[str]:
    if found is None:
        data = [f"data: {facts['data']}"] if facts["data"] else []
        return [f"no cluster: this program was started by hand on {host}, and uses this machine's devices", *data]
    probes = {probe["host"]: probe for probe in facts["reach"]}
    lines = [f"{found.source}, read from {', '.join(found.variables)}"]
    for index, one in enumerate(found.hosts):
        mark = "*" if index == found.here else " "
        devices = "" if one.num_devices is None else f"  {one.num_devices} ranks"
        lines.append(f"{mark} host {index}  {one}  {one.role}{devices}{_answer(probes.get(one.name))}")
    standing = found.standing
    if standing is not None:
        lines.append(
            f"this process is rank {standing.rank} of {standing.size}, number {standing.local_rank} of its host"
        )
    else:
        lines.append("this process represents its whole host")
    lines.append(f"ranks meet at {found.address}:{found.port}")
    if by := facts["joining"]:
        tls = f", under TLS with the certificate in {by['tls']}" if by["tls"] else ", without TLS"
        lines.append(f"hosts join by the token in {by['token']}{tls}")
    chosen = facts["interface"]
    for link in facts["links"]:
        speed = f"{format_rate(link['bytes_per_second'])}, {format_duration(link['seconds'])}"
        mark = ", chosen" if chosen.get(link["host"]) == link["interface"] else ""
        lines.append(f"{link['host']} reaches {link['address']} by {link['interface']}: {speed}{mark}")
    return [*lines, f"data: {facts['data']}"] if facts["data"] else lines


def _answer(probe: dict[str, Any] | None) -> str:
    if probe is None:
        return ""
    if probe["seconds"] is None:
        return "  no answer"
    return f"  answers in {1e6 * probe['seconds']:.0f} µs by {probe['interface']}"
