"""Command `manyhands launch`: run a script with a custom training loop, one process per device."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ..core import SettingsError, resolve_options
from ..options import Recovery
from .generated_options import with_options
from .interrupts import Interrupts
from .options import Devices, Distribution, SeveralHosts, add_command
from .script import run_main, run_script
from .target import require_file

Script = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT.py", help="Script with a training loop that uses [bold]mh.hand()[/].", show_default=False
    ),
]
Args = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", help="Arguments of the script, after --.", show_default=False),
]


Role = Annotated[
    str | None,
    typer.Option(
        metavar="ROLE",
        help="Role of this process with parameter servers: [bold]chief[/], [bold]ps[/], [bold]worker[/] or "
        "[bold]evaluator[/], in the cluster of TF_CONFIG.",
        show_default=False,
    ),
]
Index = Annotated[
    int | None, typer.Option(metavar="N", help="Index of this process within its role, from 0.", show_default=False)
]

GROUPS = (Distribution, Devices, SeveralHosts, Recovery)

EXAMPLES = (
    "manyhands launch train.py --on 'cpu*2'",
    "manyhands launch train.py --hosts 4 --join host1:7777 --token-file token   (on every host)",
    "manyhands launch train.py --on cuda:0,1 --strategy mirrored,accumulate=2 -- --lr 0.1",
    "manyhands launch train.py --role ps --index 0",
)


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, launch, EXAMPLES, ignore_unknown_options=True)


@with_options(*GROUPS)
def launch(
    script: Script,
    args: Args = None,
    role: Role = None,
    index: Index = None,
    *,
    given: dict[str, Any],
) -> None:
    """Run a script on every device, each as one rank of the same job.

    In the script [bold]hand = mh.hand()[/] provides the rank, its part of the data and the collectives. The same script
    runs under plain Python as the only rank. Lines that a rank prints are prefixed with its number. With one device
    the script runs in this process, so a debugger works.

    Ctrl-C or a SIGTERM ends a loop over [bold]hand.batches[/] after its step. A script without such a loop, or whose
    ranks wait in a collective, is terminated after some seconds.

    If a rank or a host fails, all ranks restart the script; hand.restore resumes from the last hand.save, and mh.fit
    resumes its run. Three restarts in a row without a new step end the job with exit code 70.

    With --role this process is one member of the cluster that TF_CONFIG describes, for a script whose mh.fit trains
    with mh.ParameterServer. Servers and workers exit when the chief's fit ends. All members need the same secret in
    MANYHANDS_TOKEN, which [bold]manyhands token FILE[/] creates.

    Unknown options are passed to the script. Put -- before options of the script that share a name with these.
    """
    settings = resolve_options(GROUPS, given)
    path = Path(script)
    require_file(path)
    _require_compiles(path)
    import manyhands as mh

    if role is None and index is not None:
        raise SettingsError(
            "--index must be given together with --role",
            got=f"--index {index} alone",
            remedy="add the role, for example --role ps",
        )
    if role is not None:
        os.environ["TF_CONFIG"] = _with_task(os.environ.get("TF_CONFIG", ""), role, index or 0)
        run_main(str(path.resolve()), list(args or []))
        return
    rank = functools.partial(run_script, script=str(path.resolve()), args=list(args or []))
    with Interrupts() as interrupts:
        strategy = settings.of(Distribution).strategy
        place = settings.of(SeveralHosts).place(settings.of(Devices).on, path, str(strategy), *(args or []))
        mh.launch(rank, strategy, on=place, timeout=settings.of(Recovery).timeout)
    if interrupts.exit_code:
        raise typer.Exit(interrupts.exit_code)


def _with_task(config: str, role: str, index: int) -> str:
    """Return the TF_CONFIG `config` with this process's task, which `role` and `index` name.

    Raises:
        SettingsError: `config` describes no cluster, or the cluster has no such task.
    """
    try:
        cluster = json.loads(config)["cluster"]
    except (ValueError, KeyError, TypeError):
        raise SettingsError(
            "--role needs a TF_CONFIG that describes the cluster",
            got=repr(config[:80]) if config else "no TF_CONFIG",
            remedy='set it to {"cluster": {"chief": ["HOST:PORT"], "ps": [...], "worker": [...]}}',
        ) from None
    have = {name: len(hosts) for name, hosts in cluster.items()} if isinstance(cluster, dict) else {}
    if index not in range(have.get(role, 0)):
        there = ", ".join(f"{name} 0 to {count - 1}" if count > 1 else f"{name} 0" for name, count in have.items())
        raise SettingsError(
            f"--role and --index must name a task of the cluster in TF_CONFIG ({there})",
            got=f"--role {role} --index {index}",
            remedy="name one of these tasks, or add this one to TF_CONFIG",
        )
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})


def _require_compiles(path: Path) -> None:
    """Raise SettingsError if a script has a syntax error; called before processes are started."""
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        got = f"{getattr(error, 'msg', error)} at {path}:{line}" if line else str(error)
        raise SettingsError("the script must be valid Python", got=got, remedy="correct that line") from None
