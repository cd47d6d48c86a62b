"""How many nodes and instances a job asks for. Pure: from the recipe, the site and what was wished for."""

import math
from dataclasses import dataclass

from podium.errors import UserError
from podium.recipe.loading import Recipe
from podium.submit.site import Site
from podium.submit.target import Wishes
from podium.topology import build_topology, possible_instances


@dataclass(frozen=True)
class Shape:
    """What a job asks for."""

    nodes: tuple[int, int]
    per_node: int
    cores_each: int
    devices_per_node: int
    #: what `engine.threads: auto` becomes: the same on however many nodes it then runs
    threads: int
    time_s: float
    #: seconds before the end of its time at which it saves
    lead_s: int
    #: instances that share a device
    per_device: int = 1

    @property
    def minutes(self) -> int:
        """Return its time as Slurm counts."""
        return max(1, math.ceil(self.time_s / 60))


def find_shape(recipe: Recipe, site: Site, wishes: Wishes) -> Shape:
    """Return what to ask for; raise UserError where the recipe cannot be carried by what is wished for."""
    threads = recipe.engine.threads if isinstance(recipe.engine.threads, int) else None
    # A training on processors leaves the devices of a node to others.
    devices = 0 if recipe.engine.device == "cpu" else site.node.devices
    per_device = recipe.launch.instances_per_device
    cores_for = max(1, site.node.cores // (threads or 1)) if site.node.cores else 1
    room = devices * per_device or cores_for
    most = min(site.max_instances or 10**6, recipe.batch.num_replicas * recipe.parallel.num_stages)
    nodes = wishes.nodes or _nodes_needed(recipe, wishes.per_node or room)
    per_node = wishes.per_node or _per_node(recipe, nodes[1], room, most)
    if devices and per_node > room:
        raise UserError(
            f"{per_node} instances on a node that has {_counted('device', devices)} (node.devices of the site): ask "
            f"for fewer, or let them share with launch.instances_per_device={-(-per_node // devices)}"
        )
    if wishes.nodes is not None and wishes.per_node is not None and nodes[0] == nodes[1]:
        _check(recipe, nodes[1], nodes[1] * per_node)
    if site.max_instances is not None and nodes[1] * per_node > site.max_instances:
        raise UserError(f"{nodes[1]} × {per_node} instances are more than the {site.max_instances} of the site")
    cores = threads or (max(1, site.node.cores // per_node) if site.node.cores else 1)
    time_s = wishes.time_s or site.slurm.time
    lead = int(min(site.slurm.save_before_end, max(1, math.ceil(time_s / 60)) * 60 / 6))
    num_devices = min(-(-per_node // per_device), devices)
    return Shape(nodes, per_node, cores, num_devices, threads or cores, time_s, lead, per_device)


def _nodes_needed(recipe: Recipe, room: int) -> tuple[int, int]:
    """Return one node, or as many as the stages of a replica need."""
    stages = recipe.parallel.num_stages
    for count in range(1, stages + 1):
        if any(number <= count * room for number in _possible(recipe, count)):
            return count, count
    raise UserError(f"nodes with room for {room} instances cannot carry {stages} stages: give --nodes")


def _per_node(recipe: Recipe, nodes: int, room: int, most: int) -> int:
    counts = [count for count in _possible(recipe, nodes) if count <= min(nodes * room, most)]
    if not counts:
        _check(recipe, nodes, nodes * room)
        raise UserError(f"{nodes} nodes cannot carry the recipe: give --tasks-per-node")
    return math.ceil(max(counts) / nodes)


def _possible(recipe: Recipe, nodes: int) -> list[int]:
    return list(possible_instances(recipe.batch.num_replicas, recipe.parallel.num_stages, nodes, recipe.blocks))


def _check(recipe: Recipe, nodes: int, count: int) -> None:
    """Raise UserError, with the counts that are possible, where these nodes cannot carry the recipe."""
    names = tuple(f"node {number + 1}" for number in range(nodes))
    build_topology(recipe.batch.num_replicas, count, names, recipe.parallel.num_stages, blocks=recipe.blocks)


def _counted(name: str, count: int) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"
