"""`podium plan --measure-network --hosts a,b`: one instance on each host, started as those of a training."""

import datetime
import os
from pathlib import Path

from podium.commands.train import launch_instances, run_as_instance
from podium.distributed.instances import Instances
from podium.errors import UserError
from podium.launch.environment import find_place
from podium.launch.secret import take_secret
from podium.plan.between_hosts import recalled, save, sum_seconds
from podium.plan.network import Network
from podium.recipe.loading import Recipe, load_recipe, recipe_with
from podium.topology import Topology, build_topology
from podium.training.stop_request import StopRequest


def measure_network(
    name: str, overrides: list[str], hosts: str, *, join: bool, secret_file: Path | None
) -> Network | None:
    """Measure the network between hosts through the launcher; return it on the first one, None on the others. In an
    instance, does not return."""
    place, secret = find_place(os.environ), take_secret(secret_file, os.environ)
    names = tuple(host.strip() for host in hosts.split(","))
    if len(names) < 2 or len(names) & (len(names) - 1) or not all(names):
        raise UserError(f"--hosts {hosts}: a network is measured between 2, 4, 8 or more hosts, given by name")
    recipe = _one_each(load_recipe(name, overrides), len(names))

    def measured(topology: Topology, instances: Instances) -> None:
        seconds = sum_seconds(instances)
        if instances.index == 0:
            save(topology.hosts, seconds, datetime.date.today().isoformat())

    if place is not None:
        run_as_instance(place, StopRequest(), lambda: (recipe, measured), secret)
    topology = build_topology(len(names), len(names), names)
    words = ["plan", name, *overrides, "--measure-network", "--hosts", hosts]
    first = launch_instances(recipe, topology, words, hosts, join, secret)
    return recalled(names) if first else None


def _one_each(recipe: Recipe, num_hosts: int) -> Recipe:
    """Return the recipe with one replica, and no more than one instance, for each host."""
    return recipe_with(recipe, {"batch.replicas": num_hosts, "batch.scaling": "weak", "parallel.stages": 1})
