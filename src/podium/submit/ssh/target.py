"""Hosts that ssh reaches as a target: checked first, then started, watched and ended together.

Every host starts its own part (`podium train --join`) and goes on when this command ends. They meet at the first one,
by a secret made for the run, which goes through ssh's standard input.
"""

import json
import os
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from podium.errors import UserError
from podium.launch.addresses import local_names
from podium.launch.secret import VARIABLE as SECRET
from podium.launch.secret import new_secret
from podium.machine.bounded_files import parse_mapping
from podium.recipe.loading import Recipe, to_yaml
from podium.runs.folder import JOB
from podium.submit.container import podium_words
from podium.submit.progress import summary_of
from podium.submit.records import JobRecord, check_name, free_name, now
from podium.submit.shell import Shell
from podium.submit.site import Site, site_from_tree
from podium.submit.slurm.watch import status_of_study
from podium.submit.ssh.checks import check_hosts
from podium.submit.ssh.code import code_to_send
from podium.submit.ssh.hosts import HostPart, parse_hosts
from podium.submit.ssh.study import shares, study_files
from podium.submit.studies import log_words, runs_of_study
from podium.submit.target import Prepared, Request, State, Status
from podium.topology import build_topology
from podium.ui.visible import visible

_STATES: dict[str, State] = {"done": "done", "interrupted": "interrupted", "failed": "failed", "running": "interrupted"}


class SshTarget:
    """Jobs on hosts that ssh reaches."""

    def prepare(self, request: Request) -> Prepared:
        """Check the hosts, and return what is written and started on them."""
        site, wishes, recipe = request.site, request.wishes, request.recipe
        if site.container is not None and site.container.runtime == "docker":
            raise UserError(
                "what docker runs ends with the command that started it: for hosts by ssh, use apptainer or shifter, "
                "or name Podium on the hosts as podium in the site"
            )
        parts = parse_hosts(wishes.hosts, site)
        if request.kind == "run":
            _check_counts(recipe, parts)
            if wishes.at_once is not None:
                raise UserError("--at-once is for the runs of a study")
        study = shares(request, parts) if request.kind == "study" else {}
        files = study_files(request) if study else {}
        name = check_name(PurePosixPath(wishes.out).name) if wishes.out else free_name(request.what, set())
        above = _shell(parts[0], site).absolute(site.ssh.folder)
        folder = above / (wishes.out or f"runs/{name}")
        # What is sent along is not there yet: the hosts compare it themselves as they meet.
        code, tree = code_to_send(recipe, folder) if wishes.send_code else ({}, recipe.tree())
        sent = {} if code else {"recipe": to_yaml(tree)}
        answers = {part.host: _ask(part, site, "check", folder, sent) for part in parts}
        notes = check_hosts(recipe, parts, answers, site.ssh.clock_difference)
        tree["engine"]["threads"] = _threads(recipe, parts, answers)
        notes += [f"{part.host}: {_runs(num)} at a time" for part, num in study.items()]
        files |= {f"{JOB}/recipe.yaml": to_yaml(tree), f"{JOB}/hosts.json": _hosts_file(parts), **code}
        commands = [tuple(_shell(part, site).words(_words(part, site, "start", folder))) for part in parts]
        return Prepared(name, folder, files, tuple(commands), tuple(notes))

    def submit(self, request: Request, prepared: Prepared) -> JobRecord:
        """Write the files and start every host's part; of a failure nothing is left running."""
        site, parts = request.site, parse_hosts(request.wishes.hosts, request.site)
        study = shares(request, parts) if request.kind == "study" else {}
        parts = list(study) or parts
        # Hosts of a study share its folder; a file server may show it later to those that have looked for it before.
        for part in parts[:1] if study else parts:
            shell = _shell(part, site)
            if shell.names_in(prepared.folder):
                raise UserError(f"{prepared.folder} on {part.host} is not empty: choose another folder with --out")
        environment = _environment(site)
        begun: list[HostPart] = []
        try:
            for part in parts:
                if part is parts[0] or not study:
                    _shell(part, site).write_new(prepared.folder, prepared.files)
                    begun.append(part)
                else:
                    _check_shared(part, parts[0], site, prepared)
            for part in parts:
                hosts = {one.address: one.instances for one in parts}
                wanted = {"at_once": study[part]} if study else {"hosts": hosts}
                _ask(part, site, "start", prepared.folder, {**wanted, "environment": environment})
        except UserError:
            for part in parts if study else begun:
                with suppress(UserError):
                    _ask(part, site, "stop", prepared.folder, {})
            for part in begun:
                _shell(part, site).remove(prepared.folder / JOB)
            raise
        return JobRecord(
            name=prepared.name,
            target="ssh",
            kind=request.kind,
            id=parts[0].host,
            folder=str(prepared.folder),
            site=site.tree(),
            submitted=now(),
            words=[request.what, *request.words],
            facts={"hosts": ",".join(f"{part.host}:{part.instances}" for part in parts)},
        )

    def status(self, job: JobRecord) -> Status:
        """Return how the hosts' parts are doing, with what the run says."""
        site, parts = _of(job)
        folder = PurePosixPath(job.folder)
        answers = {part.host: _ask(part, site, "state", folder, {}) for part in parts}
        going = [host for host, answer in answers.items() if answer.get("pid") is not None]
        if job.kind == "study":
            states = [("RUNNING", "", ", ".join(going))] if going else []
            return status_of_study(states, runs_of_study(_shell(parts[0], site), job.folder))
        summary = summary_of(_shell(parts[0], site), folder)
        updates, total = summary.get("updates"), summary.get("total_updates")
        codes = {host: answer.get("code") for host, answer in answers.items() if answer.get("code") is not None}
        ended: State = _STATES.get(str(summary.get("state")), "failed")
        return Status(
            "running" if going else ended,
            "" if going else ", ".join(f"{host}: exit code {code}" for host, code in codes.items()),
            ", ".join(going),
            updates if isinstance(updates, int) else None,
            total if isinstance(total, int) else None,
        )

    def logs(self, job: JobRecord, *, follow: bool) -> Iterator[bytes]:
        """Yield the log of the first host, where the lead is; of a study, those of its runs."""
        site, parts = _of(job)
        if job.kind == "study":
            yield from self._logs_of_study(job, follow=follow)
            return
        shell, path = _shell(parts[0], site), shlex.quote(f"{job.folder}/{JOB}/log-{parts[0].address}")
        if not follow:
            yield shell.read(PurePosixPath(job.folder) / JOB / f"log-{parts[0].address}") or b""
            return
        pid = _ask(parts[0], site, "state", PurePosixPath(job.folder), {}).get("pid")
        until = f"--pid={int(pid)} -F" if isinstance(pid, int) else ""
        yield from shell.stream(["sh", "-c", f"exec tail -n +1 -s 0.5 {until} -- {path} 2>/dev/null"])

    def _logs_of_study(self, job: JobRecord, *, follow: bool) -> Iterator[bytes]:
        """Yield what the runs print; `follow`: as long as any host trains."""
        site, parts = _of(job)
        shell, folder = _shell(parts[0], site), PurePosixPath(job.folder)
        if not follow:
            yield from shell.stream(log_words(job.folder))
            return
        skipped: tuple[str, ...] = ()
        for part in parts:
            pid = _ask(part, site, "state", folder, {}).get("pid")
            if isinstance(pid, int):
                yield from _shell(part, site).stream(log_words(job.folder, *skipped, f"--pid={pid}", "-F"))
                skipped = ("-n", "0")

    def cancel(self, job: JobRecord) -> None:
        """Have every host's part save and end."""
        site, parts = _of(job)
        if job.kind == "study":  # whose hosts know nothing of each other
            for part in parts:
                _ask(part, site, "stop", PurePosixPath(job.folder), {})
            return
        # They agree on when to stop: a second signal would find those of the other hosts as they end.
        for part in parts:
            if _ask(part, site, "stop", PurePosixPath(job.folder), {}).get("stopped"):
                return


def _check_counts(recipe: Recipe, parts: list[HostPart]) -> None:
    """Raise UserError, with the counts that are possible, where these instances cannot carry the recipe."""
    addresses, sizes = tuple(part.address for part in parts), tuple(part.instances for part in parts)
    batch, parallel = recipe.batch, recipe.parallel
    build_topology(
        batch.num_replicas, sum(sizes), addresses, parallel.num_stages, parallel.stage_layers, sizes, recipe.blocks
    )


def _check_shared(part: HostPart, first: HostPart, site: Site, prepared: Prepared) -> None:
    """Raise UserError where a host does not see the folder that the first one has written."""
    name = f"{JOB}/hosts.json"
    if (_shell(part, site).read(prepared.folder / name) or b"").decode() != prepared.files[name]:
        raise UserError(
            f"{part.host} does not see {prepared.folder} of {first.host}: the hosts of a study share its folder "
            "(ssh.folder in the site, or --out)"
        )


def _runs(count: int) -> str:
    return f"{count} run{'' if count == 1 else 's'}"


def _shell(part: HostPart, site: Site) -> Shell:
    """Return the shell of a host; this one needs no ssh."""
    return Shell(None if part.address in local_names() else part.host, site.ssh.ssh)


def _words(part: HostPart, site: Site, what: str, folder: PurePosixPath) -> list[str]:
    here = _shell(part, site).host is None
    podium = podium_words(site, [str(folder)], here=here)
    script = 'mkdir -p -- "$1" && cd -- "$1" && shift && exec "$@"'
    return ["sh", "-c", script, "sh", str(folder.parent), *podium, "on-host", what, str(folder), part.address]


def _ask(part: HostPart, site: Site, what: str, folder: PurePosixPath, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Ask a host's Podium, and return its answer; what it must not show comes on its standard input."""
    shell, asked = _shell(part, site), time.time()
    output = shell.run(_words(part, site, what, folder), json.dumps(wanted).encode())
    if output.code:
        raise UserError(f"{part.host}: {output.reason.removeprefix('podium: ')}")
    try:
        found = parse_mapping(output.text.strip().splitlines()[-1].encode())
    except (ValueError, IndexError):
        raise UserError(f"{part.host}: Podium gave no answer ({visible(output.reason)})") from None
    return {**found, "asked": asked, "answered": time.time()}


def _threads(recipe: Recipe, parts: list[HostPart], answers: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the threads of the recipe, settled: the same on all hosts, however many cores each has."""
    if isinstance(recipe.engine.threads, int):
        return recipe.engine.threads
    return min(max(1, int(answers[part.host]["cores"]) // part.instances) for part in parts)


def _hosts_file(parts: list[HostPart]) -> str:
    # Of this job alone: by it, hosts see whether they share a folder.
    hosts = [f"{part.host}:{part.instances}" for part in parts]
    return json.dumps({"hosts": hosts, "number": secrets.token_hex(8)}) + "\n"


def _environment(site: Site) -> dict[str, str]:
    missing = [name for name in site.secrets if not os.environ.get(name)]
    if missing:
        raise UserError(f"{missing[0]}, which the site names as a secret, is not set: export {missing[0]}=… first")
    own = {name: os.environ[name] for name in site.secrets}
    return {**site.environment, SECRET: new_secret().decode(), **own}


def _of(job: JobRecord) -> tuple[Site, list[HostPart]]:
    site = site_from_tree(job.site)
    return site, parse_hosts(job.facts.get("hosts"), site)
