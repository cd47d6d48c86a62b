"""How many instances a command starts, on which hosts, and between which numbers they may come and go."""

import re
from dataclasses import replace

from podium.errors import UserError
from podium.launch.plan import Limits
from podium.machine.device import num_devices
from podium.recipe.loading import Recipe
from podium.topology import (
    Topology,
    auto_instances,
    build_topology,
    parse_hosts,
    possible_instances,
    resolve_threads,
    usable_cores,
)


def is_range(num_instances: str | None) -> bool:
    """Return whether `--instances` is given as a range: 2..8."""
    return num_instances is not None and ".." in num_instances


def place_instances(recipe: Recipe, num_instances: str | None, hosts: str | None) -> Topology:
    """Return a topology with as many instances as asked for: the minimum that stages and hosts allow where nothing is
    said, of a range as many as there are cores for."""
    fewest, most = _parsed(num_instances)
    names, sizes = parse_hosts(hosts, fewest if fewest == most else None) if hosts else (("this host",), ())
    num_replicas, num_stages = recipe.batch.num_replicas, recipe.parallel.num_stages
    if is_range(num_instances):
        _check_can_regroup(recipe, hosts)
    if sizes:
        if num_instances == "auto":
            raise UserError(f"--instances auto does not go with --hosts {hosts}, which gives numbers of instances")
        count = sum(sizes)
        if is_range(num_instances) and not (fewest or 1) <= count <= (most or count):
            raise UserError(f"--instances {num_instances} does not fit --hosts {hosts}, which names {count} instances")
    elif fewest is not None and fewest == most:
        count = fewest
    elif num_instances is None:
        count = next(iter(possible_instances(num_replicas, num_stages, len(names), recipe.blocks)), num_stages)
    else:
        count = _by_cores(recipe, len(names))
        if fewest is not None and most is not None:
            count = _in_range(recipe, num_instances, fewest, most, count, len(names))
    return build_topology(num_replicas, count, names, num_stages, recipe.parallel.stage_layers, sizes, recipe.blocks)


def limits_of(recipe: Recipe, num_instances: str | None) -> Limits:
    """Return between which numbers the instances of a run may come and go."""
    counts = possible_instances(recipe.batch.num_replicas, recipe.parallel.num_stages, 1, recipe.blocks)
    fewest, most = _parsed(num_instances) if is_range(num_instances) else (1, None)
    largest = max(counts, default=1)
    limits = Limits(fewest or 1, min(most or largest, largest), counts.__contains__)
    return replace(limits, at_once=recipe.launch.spare_copies) if recipe.parallel.shard == "optimiser" else limits


def _parsed(num_instances: str | None) -> tuple[int | None, int | None]:
    """Return the smallest and the largest number that `--instances` names; None where it leaves that open."""
    if num_instances in (None, "auto"):
        return None, None
    match = re.fullmatch(r"([1-9]\d{0,5})(?:\.\.([1-9]\d{0,5}))?", num_instances)
    if match is None:
        raise UserError(f"--instances {num_instances}: expected a number, a range such as 2..8, or auto")
    fewest, most = int(match[1]), int(match[2] or match[1])
    if fewest > most:
        raise UserError(f"--instances {num_instances}: the range ends before it begins")
    return fewest, most


def _by_cores(recipe: Recipe, num_hosts: int) -> int:
    num_replicas, num_stages = recipe.batch.num_replicas, recipe.parallel.num_stages
    cores = len(usable_cores())
    threads = resolve_threads(recipe.engine.threads, cores, num_replicas * num_stages)
    if devices := num_devices(recipe.engine.device):
        cores, threads = devices * recipe.launch.instances_per_device, 1
    return auto_instances(num_replicas, cores * num_hosts, threads, num_stages, num_hosts, recipe.blocks)


def _in_range(recipe: Recipe, text: str, fewest: int, most: int, by_cores: int, num_hosts: int) -> int:
    """Return as many instances of the range as there are cores for, at least the smallest number that is possible."""
    counts = possible_instances(recipe.batch.num_replicas, recipe.parallel.num_stages, num_hosts, recipe.blocks)
    inside = [count for count in counts if fewest <= count <= most]
    if not inside:
        shown = f"{counts[0]} to {counts[-1]}" if counts else "none"
        raise UserError(f"--instances {text}: no number in it can carry the recipe's replicas (possible: {shown})")
    return max((count for count in inside if count <= by_cores), default=inside[0])


def _check_can_regroup(recipe: Recipe, hosts: str | None) -> None:
    """Raise UserError where instances cannot come and go, as each holds a part of the state."""
    has_copies = recipe.parallel.shard == "optimiser" and recipe.launch.spare_copies > 0 and hosts is None
    reasons = {
        "parallel.stages": recipe.parallel.num_stages > 1,
        f"parallel.shard={recipe.parallel.shard}": recipe.parallel.shard != "none" and not has_copies,
        f"engine.reduction={recipe.engine.reduction}": recipe.engine.reduction != "exact",
        f"engine.device={recipe.engine.device}": num_devices(recipe.engine.device) > 0,
    }
    if (reason := next((key for key, holds in reasons.items() if holds), None)) is not None:
        raise UserError(
            f"--instances with a range does not go with {reason}: instances come and go only where each has the whole "
            "state in memory or, on one host, spare copies of its shards: give one number"
        )
