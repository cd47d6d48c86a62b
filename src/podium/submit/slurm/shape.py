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

    @property
    def minutes(self) -> int:
        """Return its time as Slurm counts."""
        return max(1, math.ceil(self.time_s / 60))


def find_shape(recipe: Recipe, site: Site, wishes: Wishes) -> Shape:
    """Return what to ask for; raise UserError where the recipe cannot be carried by what is wished for."""
    replicas, stages = recipe.batch.num_replicas, recipe.parallel.num_stages
    threads = recipe.engine.threads if isinstance(recipe.engine.threads, int) else None
    room = site.node.devices or (max(1, site.node.cores // (threads or 1)) if site.node.cores else 1)
    most = min(site.max_instances or 10**6, replicas * stages)
    nodes = wishes.nodes or _nodes_needed(replicas, stages, wishes.per_node or room)
    per_node = wishes.per_node or _per_node(replicas, stages, nodes[1], room, most)
    if wishes.nodes is not None and wishes.per_node is not None and nodes[0] == nodes[1]:
        hosts = tuple(f"node {number + 1}" for number in range(nodes[1]))
        build_topology(replicas, nodes[1] * per_node, hosts, stages)  # says which counts are possible
    if site.max_instances is not None and nodes[1] * per_node > site.max_instances:
        raise UserError(f"{nodes[1]} × {per_node} instances are more than the {site.max_instances} of the site")
    cores = threads or (max(1, site.node.cores // per_node) if site.node.cores else 1)
    time_s = wishes.time_s or site.slurm.time
    lead = int(min(site.slurm.save_before_end, max(1, math.ceil(time_s / 60)) * 60 / 6))
    devices = min(per_node, site.node.devices)
    return Shape(nodes, per_node, cores, devices, threads or cores, time_s, lead)


def _nodes_needed(replicas: int, stages: int, room: int) -> tuple[int, int]:
    """Return one node, or as many as the stages of a replica need."""
    for count in range(1, stages + 1):
        if any(number <= count * room for number in possible_instances(replicas, stages, count)):
            return count, count
    raise UserError(f"nodes with room for {room} instances cannot carry {stages} stages: give --nodes")


def _per_node(replicas: int, stages: int, nodes: int, room: int, most: int) -> int:
    counts = [count for count in possible_instances(replicas, stages, nodes) if count <= min(nodes * room, most)]
    if not counts:
        build_topology(replicas, nodes * room, tuple(f"node {number + 1}" for number in range(nodes)), stages)
        raise UserError(f"{nodes} nodes cannot carry the recipe: give --tasks-per-node")
    return math.ceil(max(counts) / nodes)
