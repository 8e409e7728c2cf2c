"""`manyhands launch`: a person's own loop, a process per device."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Annotated

import typer

from ..core import SettingsError, resolve_settings
from .interrupts import Interrupts
from .options import Hosts, HostsSettings, JoinAt, On, Strategy, TlsFolder, TokenFile, add_verb
from .script import run_main, run_script
from .target import require_file

Script = Annotated[
    str, typer.Argument(metavar="SCRIPT.py", help="A script whose loop uses [bold]mh.hand()[/].", show_default=False)
]
Args = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", help="The script's own arguments; all of them after --.", show_default=False),
]


Role = Annotated[
    str | None,
    typer.Option(
        metavar="ROLE",
        help="This process's part among parameter servers: [bold]chief[/], [bold]ps[/], [bold]worker[/] or "
        "[bold]evaluator[/], in the cluster of TF_CONFIG.",
        show_default=False,
    ),
]
Index = Annotated[
    int | None, typer.Option(metavar="N", help="Which one of its role it is, from 0.", show_default=False)
]

EXAMPLES = (
    "manyhands launch train.py --on 'cpu*2'",
    "manyhands launch train.py --hosts 4 --join host1:7777 --token-file token   (on every host)",
    "manyhands launch train.py --on cuda:0,1 --strategy mirrored,accumulate=2 -- --lr 0.1",
    "manyhands launch train.py --role ps --index 0",
)


def add(app: typer.Typer) -> None:
    """Registers the verb."""
    add_verb(app, launch, EXAMPLES, ignore_unknown_options=True)


def launch(
    script: Script,
    args: Args = None,
    strategy: Strategy = None,
    on: On = None,
    hosts: Hosts = None,
    join: JoinAt = None,
    token_file: TokenFile = None,
    tls: TlsFolder = None,
    role: Role = None,
    index: Index = None,
) -> None:
    """Run your own script on every device, each as one rank of the same job.

    In the script [bold]hand = mh.hand()[/] gives the rank, its part of the data and the collectives; the same script
    runs under plain Python as the only rank. Lines that a rank prints are marked with its number. With one device
    the script runs in this process, so a debugger works.

    Ctrl-C or a SIGTERM ends a loop over [bold]hand.batches[/] after its step; a script that does not look, or whose
    ranks stand in a collective, is ended after some seconds.

    When a rank or a host is lost, all ranks begin the script anew; hand.restore goes on from the last hand.save, an
    mh.fit with its run. Three times in a row without a new step end it with exit code 70.

    With --role the script, whose mh.fit trains with mh.ParameterServer, is run here as one member of the cluster that
    TF_CONFIG describes; servers and workers end when the chief's fit does. All of them need the same secret in
    MANYHANDS_TOKEN: [bold]manyhands token FILE[/] makes one.

    Options that are not ours go to the script; put -- before those that share a name with ours.
    """
    given = {"strategy": strategy, "on": on, "hosts": hosts, "join": join, "token_file": token_file, "tls": tls}
    settings = resolve_settings(HostsSettings, given).values
    path = Path(script)
    require_file(path)
    _require_compiles(path)
    from .. import verbs

    if role is None and index is not None:
        raise SettingsError("--index needs --role", got=f"--index {index} alone", remedy="add --role ps, say")
    if role is not None:
        os.environ["TF_CONFIG"] = _with_task(os.environ.get("TF_CONFIG", ""), role, index or 0)
        run_main(str(path.resolve()), list(args or []))
        return
    rank = functools.partial(run_script, script=str(path.resolve()), args=list(args or []))
    with Interrupts() as interrupts:
        verbs.launch(rank, settings.strategy, on=settings.place(path, *(args or [])))
    if interrupts.exit_code:
        raise typer.Exit(interrupts.exit_code)


def _with_task(config: str, role: str, index: int) -> str:
    """TF_CONFIG with this process's own part in it."""
    try:
        cluster = json.loads(config)["cluster"]
    except (ValueError, KeyError, TypeError):
        raise SettingsError(
            "--role names a part of the cluster in TF_CONFIG",
            got=repr(config[:80]) if config else "no TF_CONFIG",
            remedy='set it to {"cluster": {"chief": ["HOST:PORT"], "ps": [...], "worker": [...]}}',
        ) from None
    have = {name: len(hosts) for name, hosts in cluster.items()} if isinstance(cluster, dict) else {}
    if index not in range(have.get(role, 0)):
        there = ", ".join(f"{name} 0 to {count - 1}" if count > 1 else f"{name} 0" for name, count in have.items())
        raise SettingsError(
            f"--role and --index name one of the cluster in TF_CONFIG: {there}",
            got=f"--role {role} --index {index}",
            remedy="name one of these, or add it to TF_CONFIG",
        )
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})


def _require_compiles(path: Path) -> None:
    """Finds a slip of the pen before any process is started."""
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        got = f"{getattr(error, 'msg', error)} at {path}:{line}" if line else str(error)
        raise SettingsError("the script must be Python", got=got, remedy="mend that line") from None
