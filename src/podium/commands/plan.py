"""`podium plan`: what a training will need, before it starts."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from podium.errors import UserError
from podium.plan import history, scaling
from podium.plan.between_hosts import recalled
from podium.plan.components import Components, recall, remember
from podium.plan.forecast import Forecast, changes, forecast, shape_of
from podium.plan.intervals import Interval
from podium.plan.network import Network, parse_network
from podium.plan.tables import Scaling, ScalingTable, read_table
from podium.recipe.loading import Recipe, load_recipe
from podium.topology import possible_instances
from podium.ui import console
from podium.ui.console import clock_text, number
from podium.ui.table import Table

_RANGE = re.compile(r"(?:batch\.)?replicas=(\d{1,7})\.\.(\d{1,7})")
_SHORT = re.compile(r"replicas=(.*)")
_MOST_REPLICAS = 1 << 20


@dataclass(frozen=True)
class Asked:
    """The options of the command."""

    recipe: str | None
    overrides: list[str]
    instances: int | None = None
    #: how many, or their names
    hosts: str | None = None
    per_host: int | None = None
    network: str | None = None
    measure: bool = False
    seconds: float = 20.0
    table: Path | None = None
    scaling: str = "weak"
    plot: Path | None = None
    measure_network: bool = False
    #: this host is one of those that measure their network, and another one plans
    join: bool = False
    secret_file: Path | None = None


def plan(asked: Asked) -> None:
    """Print the plan of a recipe, or of the table of times that is given."""
    if asked.plot is not None and asked.plot.exists():
        raise UserError(f"{asked.plot} already exists: choose another name")
    if asked.plot is not None and (asked.plot.suffix != ".png" or not asked.plot.parent.is_dir()):
        raise UserError(f"--plot {asked.plot}: expected a new .png file in a folder that exists")
    overrides, counts = _counts([*([asked.recipe] if asked.recipe and "=" in asked.recipe else []), *asked.overrides])
    name = None if asked.recipe and "=" in asked.recipe else asked.recipe
    if asked.table is not None:
        _plan_table(asked, name, overrides, counts)
        return
    if name is None:
        raise UserError("a recipe is missing: give one, or a table of times with --from, or --history")
    _plan_recipe(asked, name, overrides, counts)


def _counts(words: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return the overrides without `replicas=A..B`, and the counts that it stands for: A and its doubles up to B."""
    rest, counts = [], list[int]()
    for word in words:
        match = _RANGE.fullmatch(word)
        if match is None:
            rest.append(f"batch.{word}" if _SHORT.fullmatch(word) else word)
            continue
        first, last = int(match[1]), int(match[2])
        if not 1 <= first <= last <= _MOST_REPLICAS:
            raise UserError(f"{word}: expected a range such as replicas=1..1024, up to {_MOST_REPLICAS:,}")
        while first <= last:
            counts.append(first)
            first *= 2
    return rest, counts


# --- somebody's times ------------------------------------------------------------------------------------------------


def _plan_table(asked: Asked, name: str | None, overrides: list[str], counts: list[int]) -> None:
    assert asked.table is not None
    if asked.scaling not in ("weak", "strong"):
        raise UserError(f"--scaling {asked.scaling}: expected weak or strong")
    if asked.measure or asked.network is not None:
        raise UserError("--from predicts from the table alone: leave --measure and --network out")
    known = read_table(asked.table)
    if not counts:
        given = [_number(word) for word in overrides if word.startswith("batch.replicas=")]
        counts = given or [known.devices[-1] * factor for factor in (1, 2, 4, 8)]
    predicted = scaling.predict(known, counts, cast(Scaling, asked.scaling))
    epochs = _epochs(name, overrides) if name else None
    shown = [_shown(known, interval) for interval in predicted]
    what = "seconds per epoch" if known.kind == "seconds" else "samples/s"
    measured = dict(zip(known.devices, known.seconds, strict=True))
    rows = []
    for count, seconds, interval in zip(counts, predicted, shown, strict=True):
        row = [f"{count:,}", number(interval.value), _range(interval), _measured_text(known, measured.get(count))]
        row.append(_percent(_first_work(known) / (count * seconds.value)))
        if epochs is not None and known.kind == "seconds":
            row.append(number(epochs * seconds.value * count / 3600))
        rows.append(row)
    columns = ["devices", what, "nine of ten", "measured", "efficiency"]
    columns += ["device-hours"] if epochs is not None and known.kind == "seconds" else []
    far = math.log2(max(counts) / known.devices[-1])
    caption = f"{asked.scaling} scaling, from {len(known.devices)} counts up to {known.devices[-1]:,} devices"
    if far > 0:
        caption += f"; {max(counts):,} devices are {far:.1f} doublings beyond them"
    console.show_table(Table(str(asked.table), columns, rows, caption))
    if asked.plot is not None:
        from podium.plan.picture import draw_plan  # with matplotlib, which takes long to import

        values = [(n, _shown(known, Interval(s, s, s)).value) for n, s in measured.items()]
        console.say(f"wrote {draw_plan(asked.plot, str(asked.table), what, counts, shown, values)}")


def _first_work(known: ScalingTable) -> float:
    """Return the work of the smallest count, which efficiency is relative to."""
    return known.devices[0] * known.seconds[0]


def _shown(known: ScalingTable, seconds: Interval) -> Interval:
    return seconds if known.kind == "seconds" else seconds.mapped(lambda value: 1 / value)


def _measured_text(known: ScalingTable, seconds: float | None) -> str:
    return "" if seconds is None else number(seconds if known.kind == "seconds" else 1 / seconds)


def _number(word: str) -> int:
    text = word.partition("=")[2]
    if not (text.isdecimal() and 1 <= int(text) <= _MOST_REPLICAS):
        raise UserError(f"{word}: expected a number of replicas, or a range such as replicas=1..1024")
    return int(text)


def _epochs(name: str, overrides: Sequence[str]) -> float | None:
    length = load_recipe(name, [word for word in overrides if not word.startswith("batch.")]).train.length
    return length.amount if length.unit == "ep" else None


# --- a recipe --------------------------------------------------------------------------------------------------------


def _plan_recipe(asked: Asked, name: str, overrides: list[str], counts: list[int]) -> None:
    from podium.topology import build_topology, usable_cores
    from podium.training.build import threads_per_replica

    recipes = [load_recipe(name, [*overrides, f"batch.replicas={count}"]) for count in counts]
    # The largest count says how many threads an instance has where the recipe leaves that to the cores.
    recipe = recipes[-1] if recipes else load_recipe(name, overrides)
    _check_plannable(recipe)
    found_network = _measured_network(asked, name, overrides)
    if asked.measure_network and found_network is None:  # the first host plans
        return
    cores, threads = len(usable_cores()), threads_per_replica(recipe, None)
    per_host_most = asked.per_host or max(1, cores // threads)
    num_hosts = _num_hosts(asked.hosts)
    places = [_place(one, asked, num_hosts, per_host_most, ranged=bool(counts)) for one in recipes or [recipe]]
    for one, (instances, hosts) in zip(recipes or [recipe], places, strict=True):
        names = tuple(f"host {index}" for index in range(hosts))
        build_topology(one.batch.num_replicas, instances, names, blocks=one.blocks)  # raises, with what is possible
    per_host = max(-(-instances // hosts) for instances, hosts in places)
    network = found_network or _network(asked, max(hosts for _, hosts in places))
    parts = _components(asked, name, overrides, recipe, per_host)
    found = [
        forecast(parts, shape_of(one, parts, *place), network)
        for one, place in zip(recipes or [recipe], places, strict=True)
    ]
    for one, prediction in zip(recipes or [recipe], found, strict=True):
        shape = prediction.shape
        history.keep_plan(one.sha256(), shape.num_instances, shape.num_hosts, prediction.graded())
    if counts:
        _show_counts(asked, name, found, parts, network)
        return
    console.show_table(_whole_table(name, found[0], parts, network))
    console.show_table(_changes_table(parts, found[0], network, per_host_most))


def _check_plannable(recipe: Recipe) -> None:
    if recipe.parallel.num_stages > 1 or recipe.parallel.shard != "none":
        raise UserError(
            "plans are for instances that hold the whole model: add parallel.stages=1 and parallel.shard=none, or "
            "calibrate with a table of times (--from)"
        )


def _num_hosts(text: str | None) -> int:
    if text is None:
        return 0
    if text.isdecimal():
        if not 1 <= int(text) <= _MOST_REPLICAS:
            raise UserError(f"--hosts {text}: expected how many, or their names")
        return int(text)
    return len(text.split(","))


def _place(recipe: Recipe, asked: Asked, num_hosts: int, per_host: int, *, ranged: bool) -> tuple[int, int]:
    """Return (instances, hosts): those asked for, else as many as there are replicas, on as few hosts as carry them."""
    possible = possible_instances(recipe.batch.num_replicas, blocks=recipe.blocks)
    if ranged:
        most = asked.instances or possible[-1]
        instances = max(count for count in possible if count <= most)
        return instances, max(1, -(-instances // per_host))
    instances = asked.instances or (num_hosts if num_hosts > 1 else 1)
    return instances, num_hosts or 1


def _measured_network(asked: Asked, name: str, overrides: list[str]) -> Network | None:
    """Return the network between the hosts that are named, measured now if that is asked for."""
    if not asked.measure_network:
        return None
    if asked.hosts is None or asked.hosts.isdecimal():
        raise UserError("--measure-network needs the names of the hosts: add --hosts a,b")
    if asked.network is not None:
        raise UserError("--network gives the network, and --measure-network measures it: leave one of them out")
    from podium.commands.plan_network import measure_network  # with the launcher

    return measure_network(name, overrides, asked.hosts, join=asked.join, secret_file=asked.secret_file)


def _network(asked: Asked, num_hosts: int) -> Network | None:
    if asked.network is not None:
        return parse_network(asked.network)
    if num_hosts == 1:
        return None
    named = asked.hosts is not None and not asked.hosts.isdecimal()
    if named and (found := recalled(str(asked.hosts).split(","))) is not None:
        return found
    measured = ", --measure-network" if named else ""
    raise UserError(
        f"a plan for {num_hosts} hosts needs the network between them: add --network ethernet-10g, another preset"
        f"{measured}, or latency and gigabits per second such as --network 20us,10Gb"
    )


def _components(asked: Asked, name: str, overrides: list[str], recipe: Recipe, per_host: int) -> Components:
    found = None if asked.measure else recall(recipe)
    if found is not None:
        return found
    if not asked.measure:
        raise UserError(f"nothing has been measured of {name} on this machine: add --measure")
    from podium.plan.measure import measure

    found = measure(recipe, per_host, asked.seconds)
    console.say(f"saved what was measured in {remember(recipe, found)}")
    return found


def _whole_table(name: str, found: Forecast, parts: Components, network: Network | None) -> Table:
    shape = found.shape
    rows = [
        ["update", _ms(found.update_s.value), _range(found.update_s.mapped(lambda s: 1e3 * s))],
        ["samples/s", number(found.samples_per_second.value), _range(found.samples_per_second)],
        ["communication and waiting", _percent(found.communication.value), _percents(found.communication)],
    ]
    if found.memory_bytes is not None:
        in_gb = found.memory_bytes.mapped(lambda size: size / 1e9)
        rows.append(["memory per instance", f"{in_gb.value:.2f} GB", f"{in_gb.low:.2f} … {in_gb.high:.2f}"])
    else:
        rows.append(["memory per instance", "unknown", ""])
    if found.total_s is not None and found.device_hours is not None:
        whole = found.total_s
        rows.append(["time to the end", clock_text(whole.value), f"{clock_text(whole.low)} … {clock_text(whole.high)}"])
        rows.append(["device-hours", number(found.device_hours.value), _range(found.device_hours)])
    caption = (
        f"{_counted('replica', shape.num_replicas)} on {_counted('instance', shape.num_instances)} of "
        f"{_counted('thread', parts.threads)} on {_counted('host', shape.num_hosts)} like this one; "
        f"{_counted('update', shape.total_updates)} of {_counted('sample', shape.global_batch)}; "
        f"measured on {parts.measured}"
    )
    if found.total_s is None:
        caption += f"; the {parts.num_samples:,} training samples are too few for one update"
    if network is not None and shape.num_hosts > 1:
        caption += f"\n{_network_text(network)}"
    return Table(f"plan of {name}", ["", "expected", "nine of ten"], rows, caption)


def _network_text(network: Network) -> str:
    low, high = network.reached
    return (
        f"network: {network.latency_s * 1e6:.3g} µs, {network.bytes_per_second * 8e-9:.3g} Gb/s, of which {low:.0%} to "
        f"{high:.0%} is reached ({network.source})"
    )


def _changes_table(parts: Components, found: Forecast, network: Network | None, per_host: int) -> Table:
    now = found.samples_per_second.value
    rows = []
    for change in changes(parts, found.shape, network, per_host):
        other = change.forecast
        hours = (
            other.device_hours.value / found.device_hours.value if other.device_hours and found.device_hours else None
        )
        rows.append(
            [
                change.what,
                number(other.samples_per_second.value),
                f"{other.samples_per_second.value / now:.2f}",
                "" if hours is None else f"{hours:.2f}",
                "other weights" if change.changes_training else "same weights",
            ]
        )
    columns = ["change", "samples/s", "speed-up", "device-hours", ""]
    return Table("what would help most", columns, rows, "speed-up and device-hours against the plan above")


def _show_counts(asked: Asked, name: str, found: list[Forecast], parts: Components, network: Network | None) -> None:
    rows = []
    first = found[0].samples_per_second.value / found[0].shape.num_instances
    for one in found:
        shape, rate = one.shape, one.samples_per_second
        rows.append(
            [
                f"{shape.num_replicas:,}",
                f"{shape.num_instances:,} on {shape.num_hosts:,}",
                number(1e3 * one.update_s.value),
                _short(rate.value),
                f"{_short(rate.low)} … {_short(rate.high)}",
                _percent(rate.value / shape.num_instances / first),
                clock_text(one.total_s.value) if one.total_s else "–",
                number(one.device_hours.value) if one.device_hours else "–",
            ]
        )
    columns = ["replicas", "on hosts", "ms", "samples/s", "nine of ten", "eff.", "time", "hours"]
    caption = (
        f"instances on hosts like this one, {_counted('thread', parts.threads)} each; ms of an update; efficiency per "
        f"instance; time to the end and device-hours; measured on {parts.measured}"
    )
    if any(one.total_s is None for one in found):
        caption += f"\n–: the {parts.num_samples:,} training samples are too few for one update"
    caption += f"\n{_network_text(network)}" if network is not None else ""
    console.show_table(Table(f"plan of {name}", columns, rows, caption))
    if asked.plot is not None:
        from podium.plan.picture import draw_plan

        counts = [one.shape.num_replicas for one in found]
        perfect = [(one.shape.num_replicas, first * one.shape.num_instances) for one in found]
        rates = [one.samples_per_second for one in found]
        console.say(f"wrote {draw_plan(asked.plot, f'plan of {name}', 'samples/s', counts, rates, perfect=perfect)}")


# --- words -----------------------------------------------------------------------------------------------------------


def _range(interval: Interval) -> str:
    return f"{number(interval.low)} … {number(interval.high)}"


def _ms(seconds: float) -> str:
    return f"{number(1e3 * seconds)} ms"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _percents(share: Interval) -> str:
    return f"{100 * share.low:.0f} … {100 * share.high:.0f} %"


def _short(value: float) -> str:
    """Return a large number in thousands or millions."""
    if value >= 1e6:
        return f"{value / 1e6:.3g} M"
    return f"{value / 1e3:.3g} k" if value >= 1e4 else number(value)


def _counted(name: str, count: int) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"
