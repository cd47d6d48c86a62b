"""`podium train`, `resume` and `topology`: alone in this process, as one instance of many, or as their launcher."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from podium import __version__
from podium.checkpoints.reading import go_back
from podium.commands.placing import is_range, limits_of, place_instances
from podium.distributed.instances import Instances
from podium.distributed.lost import InstanceLost
from podium.errors import Interrupted, UserError
from podium.kernels.registry import missing as missing_kernels
from podium.launch.environment import Place, find_host_index, find_place
from podium.launch.plan import Limits, plan_launch, ssh_commands
from podium.launch.secret import take_secret
from podium.machine.device import device_identity, device_name, num_devices, resolve_device, use_device
from podium.machine.memory import divide_memory
from podium.machine.numerics import numerics_variables
from podium.recipe.loading import Recipe, load_recipe, recipe_with
from podium.recipe.overrides import parse_override
from podium.runs import observer_code, own_code
from podium.runs.folder import Run, check_free, next_free_folder, open_run
from podium.runs.recipe_changes import ALSO, CARRIED_BY, may_change
from podium.topology import (
    Topology,
    resolve_threads,
    usable_cores,
)
from podium.train import resume as resume_training
from podium.train import train as train_recipe
from podium.training.stop_request import StopRequest, resume_continues
from podium.ui.console import keep_traceback, log_path, only_warned, say, show_table, warn
from podium.workloads.registry import explain_own

#: the training itself, as one instance of several
Body = Callable[[Topology, Instances], Run | None]


def train(
    name: str,
    overrides: list[str],
    out: Path | None,
    num_instances: str | None,
    hosts: str | None,
    join: bool,
    stop: StopRequest,
    secret_file: Path | None = None,
    *,
    goes_on: bool = False,
) -> None:
    """Train in a new folder; where the command `goes_on`, continue the run that the folder holds already."""
    if goes_on and out is None:
        raise UserError("--continue needs --out: the folder of the run, whether it exists or not")
    place, secret = find_place(os.environ), take_secret(secret_file, os.environ)
    # Under a launcher all instances choose before they meet, and instance 0 creates the folder after: they agree.
    folder = out or next_free_folder(Path("runs"), name)
    if place is not None:
        restarted = place.attempt > 0 or goes_on

        def load() -> tuple[Recipe, Body]:
            if restarted and out is None:
                raise UserError("the launcher has restarted the instances: give --out, so that they find their run")
            recipe = load_recipe(name, overrides)
            return recipe, lambda topo, them: train_recipe(recipe, folder, topo, them, stop, again=restarted)

        run_as_instance(place, stop, load, secret)
    recipe = load_recipe(name, overrides)
    exists = goes_on and Run(folder).recipe_file.exists()
    if not join and not exists:
        check_free(folder)
    if hosts is None and recipe.engine.tune != "off":
        from podium.tune.tuner import tuned

        chosen, num_instances = tuned(name, overrides, recipe, num_instances)
        if chosen != overrides:
            overrides, recipe = chosen, load_recipe(name, chosen)
    topology = place_instances(recipe, num_instances, hosts)
    if topology.num_instances == 1 and hosts is None and not is_range(num_instances):
        if exists:
            _tell_end(resume_training(Run(folder), recipe, topology, stop=stop, again=True))
        else:
            _tell_end(train_recipe(recipe, folder, topology, stop=stop))
        return
    with _launching(Run(folder), stop):
        words = ["train", name, *overrides, "--out", str(folder), *stop.flags(), *(["--continue"] if goes_on else [])]
        goal = Goal(folder, limits_of(recipe, num_instances), is_open=hosts is not None and is_range(num_instances))
        if launch_instances(recipe, topology, words, hosts, join, secret, goal, started_again=goes_on):
            _tell_end(Run(folder))


def resume(
    path: Path,
    overrides: list[str],
    num_instances: str | None,
    hosts: str | None,
    join: bool,
    stop: StopRequest,
    update: int | None = None,
    secret_file: Path | None = None,
    accept_changes: bool = False,
    *,
    quiet: bool = False,
) -> None:
    """Continue a run on any number of instances; from the checkpoint of `update`, where one is given.

    `accept_changes`: even where its recipe is no longer the one that the checkpoint was written with. `quiet`: print
    nothing about its end.
    """
    tell_end = _tell_nothing if quiet else _tell_end
    stop.advice = resume_continues(path)
    place, secret = find_place(os.environ), take_secret(secret_file, os.environ)
    if place is not None:
        restarted = place.attempt > 0

        def load() -> tuple[Recipe, Body]:
            run, recipe = _run_to_continue(path, overrides)
            if place.index == 0 and not restarted:
                _go_back(run, update)
            return recipe, lambda topo, them: resume_training(
                run, recipe, topo, them, stop, again=restarted, accept_changes=accept_changes
            )

        run_as_instance(place, stop, load, secret)
    run, recipe = _run_to_continue(path, overrides)
    _go_back(run, update)
    topology = place_instances(recipe, num_instances, hosts)
    if topology.num_instances == 1 and hosts is None and not is_range(num_instances):
        tell_end(resume_training(run, recipe, topology, stop=stop, accept_changes=accept_changes))
        return
    with _launching(run, stop):
        accepted = ["--accept-changes"] if accept_changes else []
        words = ["resume", str(path), *overrides, *own_code.CHOICE.flags(), *accepted, *stop.flags()]
        limits, is_open = limits_of(recipe, num_instances), hosts is not None and is_range(num_instances)
        goal = Goal(run.path, limits, is_open=is_open, overrides=tuple(overrides))
        if launch_instances(recipe, topology, words, hosts, join, secret, goal):
            tell_end(Run(path))


def _run_to_continue(path: Path, overrides: list[str]) -> tuple[Run, Recipe]:
    run = open_run(path)
    run.records()  # damaged ones are told while nothing has been trained yet
    own_code.check_unchanged(run.path, own_code.names_in(run.tree()), run.environment())
    recipe = run.recipe()
    changed = dict(parse_override(text, type(recipe)) for text in overrides)
    for key in changed:
        if not may_change(key):
            raise UserError(
                f"{key} cannot change when a run continues, only {', '.join(ALSO)} and keys of "
                f"{' and '.join(CARRIED_BY)} can: `podium train` begins a new one"
            )
    if recipe.log.observers and "log.observers" not in changed:
        changed["log.observers"] = observer_code.names_to_use(run.path, recipe.log.observers, run.environment())
    return run, recipe_with(recipe, changed) if changed else recipe


def _go_back(run: Run, update: int | None) -> None:
    if update is not None:
        with run.locked():
            for removed in go_back(run.checkpoints, update):
                say(f"removed {removed}, which is after update {update}")


def topology(name: str, overrides: list[str], num_instances: str | None, hosts: str | None) -> None:
    """Draw which host and instance carries which replicas and stages."""
    recipe = load_recipe(name, overrides)
    found, device, per_device = (
        place_instances(recipe, num_instances, hosts),
        recipe.engine.device,
        recipe.launch.instances_per_device,
    )
    if num_devices(device):
        places = range(max(found.host_sizes))
        shown = tuple(str(resolve_device(device, place, per_device)) for place in places)
        found = replace(found, local_devices=shown)
    show_table(found.table())


@dataclass(frozen=True)
class Goal:
    """The training that instances are started for, and how they may come and go."""

    run: Path
    limits: Limits
    #: whether other hosts may come though one is named
    is_open: bool = False
    #: keys of the run's recipe that this launch changes
    overrides: tuple[str, ...] = ()


def launch_instances(
    recipe: Recipe,
    topology: Topology,
    arguments: list[str],
    hosts: str | None,
    join: bool,
    secret: bytes | None,
    goal: Goal | None = None,
    *,
    started_again: bool = False,
) -> bool:
    """Run the instances of a command to the end, on all hosts; return whether this is the first host. `goal`: the
    training that they make, if it is one."""
    from podium.launch import agent
    from podium.launch.addresses import local_names

    cores = len(usable_cores())
    threads = resolve_threads(recipe.engine.threads, cores, topology.num_replicas * topology.num_stages)
    command = (sys.executable, "-m", "podium", *arguments)
    index = find_host_index(os.environ) if join else None
    plan = plan_launch(topology, local_names(), recipe.launch.port, command, index, started_again=started_again)
    if goal is not None:
        plan = replace(plan, limits=goal.limits, is_open=goal.is_open, overrides=goal.overrides)
    _check_enough_devices(recipe, len(plan.instances))
    if len(plan.instances) * threads > cores:
        warn(
            f"{len(plan.instances)} instances × {threads} threads share the {cores} cores of this host "
            "and will slow each other down"
        )
    others = {}
    if hosts and not join:
        whole = (*command, "--hosts", hosts, "--instances", str(topology.num_instances))
        others = ssh_commands(plan, recipe.launch.ssh, str(Path.cwd()), whole)
    agent.launch(plan, recipe.launch, others, secret, goal.run if goal is not None else None)
    return plan.host_index == 0


def _check_enough_devices(recipe: Recipe, num_local: int) -> None:
    devices, per_device = num_devices(recipe.engine.device), recipe.launch.instances_per_device
    if devices and num_local > devices * per_device:
        raise UserError(
            f"{num_local} instances on this host, which has {devices} {'device' if devices == 1 else 'devices'} for "
            f"them: start fewer, or let them share with launch.instances_per_device={-(-num_local // devices)}"
        )


def _tell_end(run: Run) -> None:
    """Print the last lines of a training and, where it was planned, what was predicted beside what was measured."""
    from podium.commands.plan_grades import show_grades
    from podium.commands.run_end import print_summary
    from podium.plan.history import grade

    print_summary(run)
    with only_warned("the run is complete"):
        if (graded := grade(run.summary(), str(run.path))) is not None:
            show_grades(graded)


def _tell_nothing(run: Run) -> None:
    """Leave the end of a training to what is done with it."""


@contextmanager
def _launching(run: Run, stop: StopRequest) -> Iterator[None]:
    """End a launch on signals that come before there are instances; ignore one that comes after the run is complete."""
    import podium.launch.agent  # noqa: F401 (loaded before signals may raise)

    stop.answer_at_once()
    try:
        yield
    except Interrupted:
        if run.summary().get("state") != "done":
            raise


@contextmanager
def _own_errors_told() -> Iterator[None]:
    """Raise what a user's code raised as an error that is told in their words, and after which nothing is restarted."""
    try:
        yield
    except InstanceLost:
        raise
    except Exception as error:
        shown = explain_own(error)
        if shown is None:
            raise
        if log_path() is not None:
            keep_traceback()
        raise shown from error


def run_as_instance(
    place: Place, stop: StopRequest, load: Callable[[], tuple[Recipe, Body]], secret: bytes | None
) -> NoReturn:
    """Run what `load` returns as one instance of several, and end this process."""
    from podium.launch.failures import stop_was_requested
    from podium.launch.join import InstanceTask, take_place

    if place.launch_folder is not None:
        stop.process = os.getppid()  # Podium's launcher, whose time limit goes on when it restarts instances
        # the launcher sends signals of its own, to the remaining instances when one is lost
        stop.speaks = partial(stop_was_requested, Path(place.launch_folder))
    divide_memory(place.local_count)

    def load_task() -> InstanceTask:
        with _own_errors_told():
            recipe, body = load()
        per_device = recipe.launch.instances_per_device
        device = use_device(resolve_device(recipe.engine.device, place.local_index, per_device))
        facts = {
            "podium": __version__,
            "torch": torch.__version__,
            "recipe_sha256": recipe.sha256(),
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "numerics_variables": ", ".join("=".join(pair) for pair in numerics_variables(os.environ).items())
            or "none",
            "kernels": ", ".join(missing_kernels(recipe.engine.kernels)) or "none",
            "device": device_name(device),
            "device_identity": device_identity(device),
            "instances_per_device": per_device,
        }

        def run(topology: Topology, instances: Instances) -> None:
            with _own_errors_told():
                done = body(topology, instances)
            if done is not None and instances.index == 0 and place.launch_folder is None:
                _tell_end(done)

        return InstanceTask(facts, recipe.batch.num_replicas, recipe.parallel, recipe.launch.timeout, run, device)

    code = take_place(place, load_task, secret)
    if place.count > 1:
        # Everything is written. If torn down in order, threads of torch's groups, which may wait for instances that
        # are gone, would now and then abort the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)
