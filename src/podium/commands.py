"""`podium train`, `resume` and `topology`: alone in this process, as one instance of many, or as their launcher."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from podium import __version__
from podium import train as training
from podium.checkpoint import go_back
from podium.console import say, show_table, warn
from podium.data.hdf5 import share_memory
from podium.engine.instances import Instances
from podium.errors import Interrupted, UserError
from podium.inspect_run import tell_end
from podium.interrupt import StopRequest, resume_continues
from podium.launch.plan import plan_launch, ssh_commands
from podium.recipe import Recipe, load_recipe, parse_override, recipe_with
from podium.run import Run, check_free, next_free_folder, open_run
from podium.topology import (
    Place,
    Topology,
    auto_instances,
    build_topology,
    find_place,
    possible_instances,
    resolve_threads,
    usable_cores,
)
from podium.tune.command import tuned


def train(
    name: str,
    overrides: list[str],
    out: Path | None,
    num_instances: str | None,
    hosts: str | None,
    join: bool,
    stop: StopRequest,
) -> None:
    """Trains in a new folder."""
    recipe = load_recipe(name, overrides)
    place = find_place(os.environ)
    # Under a launcher all instances choose before they meet, and instance 0 makes the folder after: they agree.
    folder = out or next_free_folder(Path("runs"), name)
    if place is not None:
        again = place.attempt > 0
        if again and out is None:
            raise UserError("the launcher has started the instances anew: give --out, so that they find their run")
        _as_instance(
            place, recipe, stop, lambda topo, them: training.train(recipe, folder, topo, them, stop, again=again)
        )
        return
    if not join:
        check_free(folder)
    if hosts is None:
        overrides, num_instances = tuned(name, overrides, recipe, num_instances)
        recipe = load_recipe(name, overrides)
    topology = _topology(recipe, num_instances, hosts)
    if topology.num_instances == 1 and hosts is None:
        tell_end(training.train(recipe, folder, topology, stop=stop))
        return
    with _launching(Run(folder), stop):
        _launch(recipe, topology, ["train", name, *overrides, "--out", str(folder)], folder, hosts, join)


#: sections that say how a training is carried, not what is learnt: a run may continue with others
_CARRIED_BY = ("parallel", "launch")


def resume(
    path: Path,
    overrides: list[str],
    num_instances: str | None,
    hosts: str | None,
    join: bool,
    stop: StopRequest,
    update: int | None = None,
) -> None:
    """Continues a run on any number of instances; from the checkpoint of `update`, where one is given."""
    stop.advice = resume_continues(path)
    run = open_run(path)
    changed = dict(parse_override(text) for text in overrides)
    for key in changed:
        if key.partition(".")[0] not in _CARRIED_BY:
            raise UserError(
                f"{key} cannot change when a run continues, only keys of {' and '.join(_CARRIED_BY)} can: "
                "`podium train` begins a new one"
            )
    recipe = recipe_with(run.recipe(), changed) if changed else run.recipe()
    place = find_place(os.environ)
    if update is not None and (place is None or (place.index == 0 and place.attempt == 0)):
        with run.locked():
            for removed in go_back(run.checkpoints, update):
                say(f"removed {removed}, which is after update {update}")
    if place is not None:
        again = place.attempt > 0
        _as_instance(
            place, recipe, stop, lambda topo, them: training.resume(run, recipe, topo, them, stop, again=again)
        )
        return
    topology = _topology(recipe, num_instances, hosts)
    if topology.num_instances == 1 and hosts is None:
        tell_end(training.resume(run, recipe, topology, stop=stop))
        return
    with _launching(run, stop):
        _launch(recipe, topology, ["resume", str(path), *overrides], path, hosts, join)


def topology(name: str, overrides: list[str], num_instances: str | None, hosts: str | None) -> None:
    """Draws who carries what."""
    show_table(_topology(load_recipe(name, overrides), num_instances, hosts).table())


def _topology(recipe: Recipe, num_instances: str | None, hosts: str | None) -> Topology:
    """As many instances as asked for; where nothing is asked, as few as the stages and hosts allow."""
    names = tuple(name.strip() for name in hosts.split(",")) if hosts else ("this host",)
    if not all(names):
        raise UserError(f"--hosts {hosts}: expected names separated by commas")
    num_replicas, num_stages = recipe.batch.num_replicas, recipe.parallel.num_stages
    if num_instances is None:
        count = next(iter(possible_instances(num_replicas, num_stages, len(names))), num_stages)
    elif num_instances == "auto":
        cores = len(usable_cores())
        threads = resolve_threads(recipe.engine.threads, cores, num_replicas * num_stages)
        count = auto_instances(num_replicas, cores * len(names), threads, num_stages, len(names))
    elif num_instances.isdecimal() and int(num_instances) > 0:
        count = int(num_instances)
    else:
        raise UserError(f"--instances {num_instances}: expected a number or auto")
    return build_topology(num_replicas, count, names, num_stages, recipe.parallel.stage_layers)


def _launch(
    recipe: Recipe, topology: Topology, arguments: list[str], folder: Path, hosts: str | None, join: bool
) -> None:
    from podium.launch import local

    cores = len(usable_cores())
    threads = resolve_threads(recipe.engine.threads, cores, topology.num_replicas * topology.num_stages)
    if topology.instances_per_host * threads > cores:
        warn(
            f"{topology.instances_per_host} instances × {threads} threads share {cores} cores of this host: "
            "they will slow each other down"
        )
    command = (sys.executable, "-m", "podium", *arguments)
    plan = plan_launch(topology, local.local_names(), recipe.launch.port, command)
    others = {}
    if hosts and not join:
        whole = (*command, "--hosts", hosts, "--instances", str(topology.num_instances))
        others = ssh_commands(plan, recipe.launch.ssh, str(Path.cwd()), whole)
    local.launch(plan, recipe.launch, others)
    if plan.host_index == 0:
        tell_end(Run(folder))


@contextmanager
def _launching(run: Run, stop: StopRequest) -> Iterator[None]:
    """Around a launch: signals before there are instances end it; one after the run is complete changes nothing."""
    import podium.launch.local  # noqa: F401 (loaded before signals may raise)

    stop.answer_at_once()
    try:
        yield
    except Interrupted:
        if run.summary().get("state") != "done":
            raise


def _as_instance(place: Place, recipe: Recipe, stop: StopRequest, body: Callable[[Topology, Instances], Run]) -> None:
    from podium.launch.failures import was_requested
    from podium.launch.instance import take_place

    if place.launch_folder is not None:
        stop.process = os.getppid()  # Podium's launcher, whose time limit goes on when it starts instances anew
        # torch's agent sends signals of its own, to those that are left when one is lost
        stop.speaks = partial(was_requested, Path(place.launch_folder))
    facts = {
        "podium": __version__,
        "torch": torch.__version__,
        "recipe_sha256": recipe.sha256(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
    }
    share_memory(place.local_count)

    def run(topology: Topology, instances: Instances) -> None:
        done = body(topology, instances)
        if instances.index == 0 and place.launch_folder is None:
            tell_end(done)

    code = take_place(place, facts, recipe.batch.num_replicas, recipe.parallel, recipe.launch.timeout, run)
    if place.count > 1:
        # Everything is written. Torn down in order, threads of torch's groups, which may wait for instances that are
        # gone, would now and then abort the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)
