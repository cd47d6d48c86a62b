"""A run from top to bottom: build, restore, loop, finish. The file to read first.

build     workload, samples, model, optimiser, schedule from the recipe; nothing on disk yet
restore   the newest good checkpoint, if there is one
loop      for every update: samples from the feed -> engine -> when due: record, validate, save;
          where an instance is lost or has come, the others go on with the instances that there are
finish    summary, pictures, report
"""

from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from podium.checkpoints import reading
from podium.checkpoints.writing import Saver
from podium.distributed.instances import Instances
from podium.distributed.lost import InstanceLost
from podium.distributed.messages import broadcast_facts
from podium.engine.compile_cache import Executable
from podium.engine.update import Events
from podium.errors import Interrupted, UserError
from podium.machine.allocator import settled_objects
from podium.recipe.loading import Recipe
from podium.report.at_end import write_report
from podium.runs.after_update import AfterUpdate
from podium.runs.folder import Run, create_run, differing_conditions, environment
from podium.runs.metrics import Telemetry, check_available
from podium.runs.monitoring import Monitoring
from podium.runs.observers import Observers
from podium.runs.recipe_changes import check_changes
from podium.runs.summary import SummaryWriter
from podium.topology import Topology
from podium.training.build import Training, build_training, threads_per_replica
from podium.training.chain import mark_weights
from podium.training.clock import Clock
from podium.training.feeding import build_engine, samples_of_updates
from podium.training.memory import check_memory
from podium.training.opening import check_folder_is_shared, open_log
from podium.training.regrouping import LeadChanged, Regrouping
from podium.training.stop_request import StopRequest, resume_continues
from podium.training.validation import check_metrics, take_average
from podium.ui import console


def train(
    recipe: Recipe,
    out: Path,
    topology: Topology | None = None,
    instances: Instances | None = None,
    stop: StopRequest | None = None,
    *,
    again: bool = False,
) -> Run:
    """Train `recipe` in the new folder `out`, as one of `instances`, until the end or until `stop` asks to end.

    `again`: the launcher has restarted the instances, so a run that already exists in `out` is continued.
    """
    clock, instances, run, stop = Clock(), instances or Instances.alone(), Run(out), stop or StopRequest()
    if instances.membership is not None and instances.membership.joins:
        return _join(run, recipe, instances, clock, stop)
    if broadcast_facts(instances, {"again": again and run.recipe_file.exists()})["again"]:
        return resume(run, recipe, topology, instances, stop, again=True)
    check_available(recipe.log)
    lead = instances.index == 0
    with stop:
        stop.answer_at_once()
        threads = broadcast_facts(instances, {"threads": threads_per_replica(recipe, topology)})["threads"]
        training = build_training(recipe, topology, instances, threads, fresh=True)
        check_metrics(training)
        check_memory(training)
        stop.begin(instances)
        if lead:
            run = create_run(out, recipe, _environment(training))
        with run.locked() if lead else nullcontext():
            instances.barrier()
            check_folder_is_shared(run.path, run.recipe_file, training)
            return _train(run, training, clock, stop)


def resume(
    run: Run,
    recipe: Recipe | None = None,
    topology: Topology | None = None,
    instances: Instances | None = None,
    stop: StopRequest | None = None,
    *,
    again: bool = False,
    accept_changes: bool = False,
) -> Run:
    """Continue a run from its newest good checkpoint, bit for bit as if it had never stopped.

    `again`: called by the launcher after an instance was lost, possibly after the last update. `accept_changes`: go on
    where the recipe is not the one that the checkpoint was written with.
    """
    clock, instances, stop = Clock(), instances or Instances.alone(), stop or StopRequest()
    recipe = recipe or run.recipe()
    if instances.membership is not None and instances.membership.joins:
        return _join(run, recipe, instances, clock, stop)
    lead = instances.index == 0
    stop.advice = resume_continues(run.path)
    # Locked before the checkpoints are read: another process may be saving.
    with stop, run.locked() if lead else nullcontext():
        killed = lead and run.summary().get("state") == "running"
        if killed:
            with console.only_warned("the run goes on"):
                run.write_summary({**run.summary(), "state": "interrupted"})
        stop.answer_at_once()
        recorded = run.environment() if lead else {}
        threads = recorded.get("threads_per_replica") or threads_per_replica(recipe, topology)
        threads = broadcast_facts(instances, {"threads": threads})["threads"]
        newest = reading.load_latest(run.checkpoints, console.warn) if lead else None
        if newest is not None:
            check_changes(run, recipe, newest.state, accept=accept_changes, again=again)
        found = reading.shared(newest, instances, whole=recipe.parallel.shard == "none")
        del newest
        training = build_training(recipe, topology, instances, threads, fresh=found is None, checkpoint=found)
        check_memory(training)
        check_folder_is_shared(run.path, run.recipe_file, training)
        differing = differing_conditions(recorded, _environment(training)) if lead else []
        if differing:
            console.warn(f"bits may differ from an uninterrupted run, as these differ: {', '.join(differing)}")
        total = training.state.progress.last_update(training.task.lengths.total_updates)
        if found is None:
            console.say(f"{run.path} has no checkpoint yet: starting from the beginning")
        elif found.update > total:
            raise UserError(
                f"train.length = {recipe.train.length} ends at update {total}, but {run.path} has made {found.update} "
                "updates: choose a longer one, or go back with --checkpoint"
            )
        elif found.update == total and not again and _has_told(run, instances, total):
            raise UserError(f"{run.path} is complete: {found.update} of {total} updates are done")
        else:
            was_killed = ", which was killed," if killed else ""
            console.say(f"resuming {run.path}{was_killed} after update {found.update} of {total}")
            clock.restore(found.state.get("seconds", {}))
        stop.begin(instances)
        return _train(run, training, clock, stop)


def _has_told(run: Run, instances: Instances, total: int) -> bool:
    """Return whether the summary says that all updates are done; that of a run whose disk was full may not."""
    summary = run.summary()
    told = (summary.get("state"), summary.get("updates")) == ("done", total)
    return bool(broadcast_facts(instances, {"done": told})["done"])


def _join(run: Run, recipe: Recipe, instances: Instances, clock: Clock, stop: StopRequest) -> Run:
    """Come to a run that is under way: its instances hand over their state between two updates."""
    with stop:
        stop.answer_at_once()
        training = build_training(recipe, None, instances, run.environment()["threads_per_replica"])
        stop.begin(instances)
        groups = Regrouping(training, clock)
        groups.join()
        return _train(run, training, clock, stop, groups)


def _train(run: Run, training: Training, clock: Clock, stop: StopRequest, groups: Regrouping | None = None) -> Run:
    stop.limit_to(training.recipe.train.time_limit)
    stop.find_end(training.task.lengths, 0 if groups else training.state.progress.update)
    groups = groups or Regrouping(training, clock)
    with ExitStack() as kept:
        if groups.has_taken_over:
            kept.enter_context(run.locked())
        while True:
            lead, workload = training.placement.is_lead, training.task.workload
            observers = Observers(training.recipe.log, run, console.warn, workload, lead)
            try:
                with observers, Monitoring(run, training, clock) as monitoring:
                    summary = SummaryWriter(run, training, clock, monitoring)
                    return _train_watched(_Underway(run, training, clock, stop, groups, observers, summary))
            except LeadChanged:
                kept.enter_context(run.locked())


@dataclass(frozen=True)
class _Underway:
    """A training under way, and who watches and records it here until another instance takes the lead."""

    run: Run
    training: Training
    clock: Clock
    stop: StopRequest
    groups: Regrouping
    observers: Observers
    summary: SummaryWriter


def _train_watched(under: _Underway) -> Run:
    run, training, summary = under.run, under.training, under.summary
    open_log(run.instance_log(training.placement.instances.index), training)
    with console.only_warned("the run goes on"):
        summary.write("running")
    try:
        stopped_by = _loop(under)
    except LeadChanged:
        raise
    except BaseException:
        with suppress(UserError):  # a full disk must not hide why the run ended
            summary.write("failed", weights=training.parallelism.has_all_weights)  # other instances may be gone
        raise
    if stopped_by is not None:
        with console.only_warned("the checkpoint is written"):
            summary.write("interrupted")
        raise Interrupted(
            f"stopped by {stopped_by} after update {training.state.progress.update} and saved; "
            f"{resume_continues(run.path)}"
        )
    under.stop.finish()
    try:
        summary.write("done")
    except UserError as error:
        raise UserError(
            f"{error}; all updates are saved: solve the problem, then {resume_continues(run.path)}"
        ) from error
    if training.recipe.log.report:
        write_report(run, training, under.clock, summary)
    return run


def _loop(under: _Underway) -> str | None:
    """Make updates until the end or a request to stop; return the reason of the request, or None at the end."""
    run, training, clock, groups = under.run, under.training, under.clock, under.groups
    recipe, lengths, lead = training.recipe, training.task.lengths, training.placement.is_lead
    recorded = training.state.progress.update - groups.again
    tree, warn, observers = recipe.tree(), console.warn, under.observers
    with (
        Telemetry(
            recipe.log, run, tree, recorded, warn, observers, lead=lead, total_updates=lengths.total_updates
        ) as telemetry,
        console.progress_display(lead) as display,
        Saver(run.checkpoints, recipe.checkpoint, training.parallelism.pipeline_group, observers.checkpoint) as saver,
        settled_objects(),
        clock.phase("train"),
    ):
        follow = AfterUpdate(training, clock, under.summary, telemetry, display, saver, groups, recorded)
        while True:
            try:
                _make_updates(under, follow)
                break
            except InstanceLost as lost:
                groups.regroup(lost)
        groups.end()
        with clock.phase("checkpoint"):
            saver.wait()
    progress = training.state.progress
    if progress.stopped_early or progress.update == lengths.total_updates:
        return None
    return under.stop.after(progress.update) or "a request to another instance"


def _make_updates(under: _Underway, follow: AfterUpdate) -> None:
    """Make updates with the instances that there are, until the end or a request to stop."""
    training, clock, stop, groups = under.training, under.clock, under.stop, under.groups

    def compiled(executable: Executable) -> None:
        clock.move("compile", executable.seconds)
        console.say(executable.sentence())
        under.summary.executable = executable

    engine = build_engine(training, Events(partial(clock.move, "communication"), compiled))
    state, progress, instances = training.state, training.state.progress, training.placement.instances
    total = progress.last_update(training.task.lengths.total_updates)
    with samples_of_updates(training, progress.update, total, partial(clock.move, "input_wait")) as all_samples:
        groups.begin(engine)
        if groups.again and follow(engine, progress.update, stop.agreed(instances, progress.update)):
            return
        if groups.has_taken_over:
            follow.save_what_is_missing()
            groups.has_taken_over = False
        for samples in all_samples:
            groups.check()
            lr = state.schedule.lr(progress.update)
            stopping = engine.update(progress.update, samples, lr, stop=stop.after(progress.update + 1) is not None)
            progress.update += 1
            take_average(training)
            mark_weights(training)
            groups.updated()
            if follow(engine, progress.update, stopping):
                return


def _environment(training: Training) -> dict:
    placement = training.placement
    return environment(placement.threads, placement.device, placement.busy_threads, training.recipe.tree())
