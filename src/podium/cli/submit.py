"""`podium submit` and the commands about jobs. Loads nothing heavy: the work is in `commands/submit.py`."""

from pathlib import Path
from typing import Annotated

import typer

from podium.errors import UserError

submit_app = typer.Typer(
    help="Hand a training, or `study STUDY.yaml`, to Slurm, Kubernetes or hosts reached by ssh.",
    no_args_is_help=True,
)

Words = Annotated[
    list[str],
    typer.Argument(metavar="RECIPE|study STUDY.yaml [KEY=VALUE ...]", help="What to train, as for `podium train`."),
]
SiteName = Annotated[
    str | None,
    typer.Option(help="Site: a file in ~/.config/podium/sites, a shipped one, or a path.", show_default="TARGET"),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be written and run; do nothing.")]
Out = Annotated[str | None, typer.Option(help="Folder of the run there.", show_default="the next free one in runs/")]
Nodes = Annotated[str | None, typer.Option(help="Nodes: 2, or 1-4 for as many as there are.", show_default="derived")]
PerNode = Annotated[
    int | None, typer.Option("--tasks-per-node", min=1, help="Instances on each.", show_default="derived")
]
Time = Annotated[str | None, typer.Option(help="Time limit: 2:00:00, 90m, 12h.", show_default="the site's")]
Requeues = Annotated[
    int | None, typer.Option(min=0, max=10_000, help="How often it may go on by itself.", show_default="the site's")
]
AtOnce = Annotated[
    int | None, typer.Option(min=1, max=4096, help="Runs of a study at the same time.", show_default="all")
]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="A job's name, or its number at its target.")]


@submit_app.command("slurm")
def slurm(
    words: Words,
    site: SiteName = None,
    out: Out = None,
    nodes: Nodes = None,
    per_node: PerNode = None,
    time: Time = None,
    requeues: Requeues = None,
    at_once: AtOnce = None,
    dry_run: DryRun = False,
) -> None:
    """Submit a batch job that takes any allocation and continues by itself."""
    from podium.commands.submit import submit
    from podium.submit.target import Wishes

    wishes = Wishes(out, _nodes(nodes), per_node, _seconds(time), requeues, at_once)
    submit("slurm", words, site, wishes, dry_run=dry_run)


@submit_app.command("kubernetes")
def kubernetes(
    words: Words,
    site: SiteName = None,
    out: Out = None,
    nodes: Annotated[str | None, typer.Option("--pods", help="Pods.", show_default="derived")] = None,
    per_node: Annotated[
        int | None, typer.Option("--instances-per-pod", min=1, help="Instances in each.", show_default="derived")
    ] = None,
    requeues: Requeues = None,
    at_once: AtOnce = None,
    dry_run: DryRun = False,
) -> None:
    """Submit a job of pods."""
    from podium.commands.submit import submit
    from podium.submit.target import Wishes

    wishes = Wishes(out, _nodes(nodes), per_node, None, requeues, at_once)
    submit("kubernetes", words, site, wishes, dry_run=dry_run)


@submit_app.command("ssh")
def ssh(
    words: Words,
    site: SiteName = None,
    out: Out = None,
    hosts: Annotated[
        str | None, typer.Option(help="Hosts with the instances on each: a:4,b:4.", show_default="the site's")
    ] = None,
    send_code: Annotated[
        bool, typer.Option("--send-code", help="Send the files of a workload of your own, too.")
    ] = False,
    at_once: AtOnce = None,
    dry_run: DryRun = False,
) -> None:
    """Start a training, or a study, on hosts that ssh reaches, which goes on when you log out."""
    from podium.commands.submit import submit
    from podium.submit.target import Wishes

    wishes = Wishes(out, hosts=hosts, send_code=send_code, at_once=at_once)
    submit("ssh", words, site, wishes, dry_run=dry_run)


def jobs() -> None:
    """List what was submitted from here, and how it is doing."""
    from podium.commands.submit import jobs

    jobs()


def status(job: JobName) -> None:
    """Show how a submitted job is doing."""
    from podium.commands.submit import status

    status(job)


def logs(
    job: JobName, follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False
) -> None:
    """Print what a submitted job has printed."""
    from podium.commands.submit import logs

    logs(job, follow=follow)


def cancel(job: JobName) -> None:
    """Have a submitted job save and end."""
    from podium.commands.submit import cancel

    cancel(job)


def _nodes(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    least, dash, most = text.partition("-")
    counts = [least, most] if dash else [least, least]
    if not all(count.isdecimal() and 1 <= int(count) <= 100_000 for count in counts) or int(counts[0]) > int(counts[1]):
        raise UserError(f"expected a number of nodes, such as 2, or the least and the most, such as 1-4, not {text!r}")
    return int(counts[0]), int(counts[1])


def _seconds(text: str | None) -> float | None:
    """Return a time as Slurm writes it (2:00:00, 1-12:00:00) or as recipes do (90m)."""
    if text is None:
        return None
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    try:
        if ":" in text and len(parts) <= 3:
            seconds = sum(int(part) * unit for part, unit in zip(reversed(parts), (1, 60, 3600), strict=False))
            seconds += 86400 * int(days) if dash else 0
        else:
            seconds = int(float(text[:-1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[text[-1]])
        if seconds > 0:
            return float(seconds)
    except (ValueError, KeyError, OverflowError):
        pass
    raise UserError(f"--time {text[:80]}: expected a time such as 2:00:00, 90m, 12h or 2d")


attempt_app = typer.Typer(help="What batch scripts ask before and after they start instances.", hidden=True)
Folder = Annotated[Path, typer.Argument()]
NodeNames = Annotated[str, typer.Option(help="Nodes of the allocation, divided by commas or spaces.")]


@attempt_app.command("begin")
def begin(job: Folder, run: Folder, nodes: NodeNames) -> None:
    """Say how many instances to start, and where."""
    from podium.commands.attempt import begin

    begin(job, run, nodes.replace(",", " ").split())


@attempt_app.command("end")
def end(job: Folder, run: Folder, code: Annotated[int, typer.Argument()], nodes: NodeNames) -> None:
    """Say what follows."""
    from podium.commands.attempt import end

    end(job, run, code, nodes.replace(",", " ").split())


@attempt_app.command("prepare")
def prepare(study: Folder) -> None:
    """Write the recipes of a study that was sent here."""
    from podium.commands.attempt import prepare

    prepare(study)


@attempt_app.command("collect")
def collect(study: Folder) -> None:
    """Take in the runs of a study that have ended."""
    from podium.commands.attempt import collect

    collect(study)


@attempt_app.command("element")
def element(
    definition: Folder,
    study: Folder,
    number: Annotated[int, typer.Option(min=0, envvar="JOB_COMPLETION_INDEX")],
    instances: Annotated[int, typer.Option(min=1)],
) -> None:
    """Train one run of a study, or continue it."""
    from podium.commands.attempt import element

    raise typer.Exit(element(definition, study, number, instances))


on_host_app = typer.Typer(help="What `podium submit ssh` asks on every host.", hidden=True)
Host = Annotated[str, typer.Argument()]


@on_host_app.command("check")
def check(run: Folder, host: Host) -> None:
    """Say what must fit before a training starts here."""
    from podium.commands.on_host import check

    check()


@on_host_app.command("start")
def start(run: Folder, host: Host) -> None:
    """Start this host's part of a run."""
    from podium.commands.on_host import start

    start(run, host)


@on_host_app.command("share")
def share(study: Folder, host: Host, at_once: Annotated[int, typer.Option(min=1)]) -> None:
    """Train this host's share of a study."""
    from podium.commands.on_host import share

    raise typer.Exit(share(study, host, at_once))


@on_host_app.command("state")
def state(run: Folder, host: Host) -> None:
    """Say whether this host's part is there."""
    from podium.commands.on_host import state

    state(run, host)


@on_host_app.command("stop")
def stop(run: Folder, host: Host) -> None:
    """Have this host's part save and end."""
    from podium.commands.on_host import stop

    stop(run, host)
