"""Command `manyhands plan`: predict the cost of every strategy for a task, on this machine or on other hardware."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import option, resolve_options
from .generated_options import with_options
from .options import Devices, Json, Params, Target, add_command, require_places
from .screen import note, only_json, print_json
from .target import load_task, parse_params

if TYPE_CHECKING:
    from ..planning import Comparison, Plan

EXAMPLES = (
    "manyhands plan digits.py",
    "manyhands plan gpt.py --cluster '8 hosts x 8 H100, 400Gb/s, $2/h' --precision bf16 --html plan.html",
    "manyhands plan gpt.py --cluster '8 A100' --cluster '2 hosts x 8 V100, 100Gb/s'",
    "manyhands plan digits.py --save plan.toml && manyhands fit digits.py --strategy plan.toml",
)

Clusters = Annotated[
    list[str] | None,
    typer.Option(
        "--cluster",
        metavar="TEXT|FILE.toml",
        help="Hardware to plan for, such as '8 hosts x 8 H100, 400Gb/s'; several clusters are compared. "
        "By default the devices of this machine, which are measured.",
        show_default=False,
    ),
]
Precision = Annotated[str, typer.Option(help="fp32 or bf16.")]
Lossy = Annotated[bool, typer.Option("--lossy", help="Also consider methods that change the mathematics.")]
Tries = Annotated[int, typer.Option(help="Number of best strategies that are measured here for a few steps.")]
Networks = Annotated[int, typer.Option(help="Plan for this many networks: stacked, packed, or one per device.")]
Noise = Annotated[
    float | None,
    typer.Option(
        metavar="SAMPLES",
        help="Gradient noise scale, for the time to a target loss by batch size; it is measured without --cluster.",
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class PlanFiles:
    """Files: where the result is written."""

    save: Path | None = option(
        None, "Write the chosen strategy, for --strategy FILE.toml.", metavar="FILE.toml", in_files=False
    )
    html: Path | None = option(None, "Write a web page with the table and the curve.", metavar="FILE", in_files=False)
    svg: Path | None = option(None, "Write the curve as SVG.", metavar="FILE", in_files=False)
    log: Path | None = option(
        None, "Add the result to the event log in this folder, for the dashboard.", metavar="FOLDER", in_files=False
    )

    def write(self, found: Plan | Comparison) -> None:
        """Write the files that were requested."""
        best = found.best.plan
        if self.save is not None:
            note(f"wrote {found.best.save(self.save)}")
        if self.html is not None:
            found.save_html(self.html)
            note(f"wrote {self.html}")
        if self.svg is not None:
            best.save_svg(self.svg)
            note(f"wrote {self.svg}")
        if self.log is not None:
            found.log(self.log)
            note(f"logged in {self.log}")


def add(app: typer.Typer) -> None:
    """Add the command to the application."""
    add_command(app, plan, EXAMPLES)


@with_options(Devices, PlanFiles)
def plan(
    target: Target,
    params: Params = None,
    cluster: Clusters = None,
    precision: Precision = "fp32",
    lossy: Lossy = False,
    tries: Tries = 3,
    networks: Networks = 1,
    noise: Noise = None,
    json: Json = False,
    *,
    given: dict[str, Any],
) -> None:
    """Predict time and memory of every strategy for a task, and the number of devices at which scaling saturates.

    On this machine the best strategies are measured for a few steps. Data of other hardware comes from a catalogue.
    """
    options = resolve_options((Devices, PlanFiles), given)
    on, files = options.of(Devices).on, options.of(PlanFiles)
    require_places(save=files.save, html=files.html, svg=files.svg)
    with only_json(json):
        task = load_task(target)
        import manyhands as mh

        hardware = cluster[0] if cluster is not None and len(cluster) == 1 else cluster
        words = parse_params(params or [])
        found = mh.plan(
            task, hardware, on=on, params=words, precision=precision, lossy=lossy, tries=tries, networks=networks
        )
        if noise is not None:
            found = found.with_noise(noise)
    if json:
        print_json(found.to_dict())
    else:
        found.show()
    files.write(found)
