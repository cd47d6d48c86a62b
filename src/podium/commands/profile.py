"""`podium profile RECIPE`: what limits a training here, where its time and memory go, as tables, a page and a trace."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from podium.errors import UserError, writing
from podium.machine import processor
from podium.machine.memory import peak_bytes, reset_peak
from podium.profiling.events import Profiled, attribute, kernel_names, profile_updates
from podium.profiling.findings import layer_rows, operator_rows, operators_table
from podium.profiling.memory import MemoryProfile, lasting_bytes, read_memory
from podium.profiling.page import Profile, profile_page
from podium.profiling.peaks import measure_peaks
from podium.profiling.rates import Rates, make_updates, measured_rates
from podium.profiling.stragglers import InstancesProfile, profile_instances
from podium.profiling.work import count_work
from podium.recipe.loading import Recipe, load_recipe
from podium.runs.folder import next_free_folder, replace_file
from podium.topology import build_topology
from podium.training.build import Training, build_training
from podium.training.feeding import build_engine, samples_of_updates
from podium.ui import console

PAGE, TRACE = "profile.html", "trace.json"


def run_profile(
    name: str,
    overrides: Sequence[str],
    *,
    rates_only: bool = False,
    trace: Path | None = None,
    seconds: float = 3.0,
    out: Path | None = None,
    instances: int = 1,
) -> None:
    """Print the three rates and, unless only these are wanted, the costliest operators, and write the page.

    `trace` and `out` are a new file and a new folder; `instances`: profile as many of them together, too.
    """
    _check_places(trace, out)
    load = os.getloadavg()[0]
    recipe = load_recipe(name, overrides)
    if recipe.parallel.num_stages > 1:
        raise UserError("a profile is of one instance, which cannot be split into stages: add parallel.stages=1")
    if instances > 1:
        build_topology(recipe.batch.num_replicas, instances, blocks=recipe.blocks)  # raises where it cannot be
    training = build_training(recipe)
    with console.progress_display(what="profiling") as display:
        rates = measured_rates(training, seconds, display)
    console.show_table(
        rates.table(f"{name} on {training.placement.busy_threads} of {training.placement.threads} threads")
    )
    if rates_only and trace is None:
        return
    folder = None if rates_only else out or next_free_folder(Path("profiles"), name)
    _write(_Asked(name, overrides, folder, trace, seconds, instances, load), training, rates)


@dataclass(frozen=True)
class _Asked:
    name: str
    overrides: Sequence[str]
    #: for the page; None: none
    folder: Path | None
    trace: Path | None
    seconds: float
    instances: int
    #: of the machine before anything was measured: beside other work, times and peaks say little
    load: float


def _check_places(trace: Path | None, out: Path | None) -> None:
    if trace is not None and trace.exists():
        raise UserError(f"{trace} already exists: choose another name")
    if trace is not None and not trace.parent.is_dir():
        raise UserError(f"--trace {trace}: the folder {trace.parent} does not exist")
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} already exists: choose another folder")


def _write(asked: _Asked, training: Training, rates: Rates) -> None:
    """Profile a few updates; write the trace, and everything to the folder, where they are wanted."""
    folder, recipe, placement, model = asked.folder, training.recipe, training.placement, training.state.model
    batch = recipe.batch
    passes = batch.num_accumulation * len(placement.replicas)
    # Shared by all below, so that operators have their names: the profiler writes the trace as it is asked for events.
    with tempfile.TemporaryDirectory(prefix="podium-profile-") as scratch:
        recorded = Path(scratch) / TRACE
        profiled = attribute(profile_updates(training, recorded), model, placement.device, kernel_names())
        memory = _memory(training, Path(scratch)) if folder is not None else None
        work = _work(recipe, training)
        operators = operator_rows(profiled, work, passes)
        console.show_table(operators_table(operators, profiled.update_us / 1e3))
        if asked.trace is not None:
            replace_file(asked.trace, recorded.read_bytes())
            console.say(f"wrote {asked.trace}: open it in a trace viewer (ui.perfetto.dev, chrome://tracing)")
        if folder is None:
            return
        peaks = measure_peaks(placement.device)
        together = _together(asked, recipe)
        where = (
            f"{processor.name()}, {placement.busy_threads} of {placement.threads} threads, {placement.device}, "
            f"load {asked.load:.2f} at the start"
        )
        layers = layer_rows(profiled, work, passes)
        page = profile_page(
            Profile(asked.name, where, rates, peaks, profiled, layers, operators, memory, together, TRACE)
        )
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / TRACE, recorded.read_bytes())
        replace_file(folder / PAGE, page.encode())
    _tell(profiled, memory, folder)
    if together is not None:
        console.say(together.sentence())


def _together(asked: _Asked, recipe: Recipe) -> InstancesProfile | None:
    if asked.instances == 1:
        return None
    return profile_instances(asked.name, asked.overrides, recipe, asked.instances, asked.seconds)


def _tell(profiled: Profiled, memory: MemoryProfile | None, folder: Path) -> None:
    if memory is not None:
        most = max(memory.peak, key=lambda kind: memory.peak[kind])
        console.say(f"memory peak of torch: {memory.peak_bytes / 1e6:,.0f} MB, most of it {most}")
    console.say(f"page: {folder / PAGE}; trace for ui.perfetto.dev: {folder / TRACE}")


def _memory(training: Training, scratch: Path) -> MemoryProfile | None:
    """Return the memory of one update, and what the process as a whole needs for one without the profiler."""
    if training.placement.device.type != "cpu":
        return None
    engine = build_engine(training)
    with samples_of_updates(training, 0, 2) as samples:
        make_updates(engine, samples, 1)
        told = reset_peak()
        make_updates(engine, samples, 1)
        process = peak_bytes() if told else None
    trace = scratch / "memory.json"
    profile_updates(training, trace, memory=True)
    return read_memory(trace, lasting_bytes(training), process)


def _work(recipe: Recipe, training: Training) -> dict:
    with samples_of_updates(training, 0, 1) as samples:
        batch = {field: rows[0, 0].cpu().clone() for field, rows in next(samples).items()}
    return count_work(recipe, training.task.workload, batch)
