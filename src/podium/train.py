"""A run from top to bottom: build, restore, loop, finish. The file to read first.

build     workload, samples, model, optimiser, schedule from the recipe; nothing on disk yet
restore   the newest good checkpoint, if there is one
loop      for every update: samples from the feed -> engine -> when due: record, validate, save
finish    summary, pictures, report
"""

from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

from torch import nn

from podium.checkpoints import reading
from podium.checkpoints.writing import Saver
from podium.distributed.instances import Instances
from podium.distributed.messages import broadcast_facts
from podium.engine.compile_cache import Executable
from podium.engine.update import Events
from podium.errors import Interrupted, UserError
from podium.machine.allocator import settled_objects
from podium.recipe.loading import Recipe
from podium.runs.folder import Run, create_run, differing_conditions, environment
from podium.runs.metrics import Telemetry, check_available
from podium.runs.monitoring import Monitoring
from podium.runs.observers import Observers
from podium.runs.recipe_changes import check_changes
from podium.runs.summary import SummaryWriter
from podium.runs.tensorboard import add_prediction
from podium.topology import Topology
from podium.training.build import Training, build_model, build_training, threads_per_replica
from podium.training.chain import chained
from podium.training.clock import Clock
from podium.training.feeding import build_engine, samples_of_updates
from podium.training.memory import check_memory
from podium.training.opening import check_folder_is_shared, open_log
from podium.training.progress import Meter, early_end, facts, named
from podium.training.stop_request import StopRequest, resume_continues
from podium.training.validation import check_finite, check_metrics, take_average, try_weights, validate
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
    recipe, lead = recipe or run.recipe(), instances.index == 0
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


def _train(run: Run, training: Training, clock: Clock, stop: StopRequest) -> Run:
    observers = Observers(training.recipe.log, run, console.warn, training.task.workload, training.placement.is_lead)
    with observers, Monitoring(run, training, clock) as monitoring:
        return _train_watched(run, training, clock, stop, SummaryWriter(run, training, clock, monitoring), observers)


def _train_watched(
    run: Run, training: Training, clock: Clock, stop: StopRequest, summary: SummaryWriter, observers: Observers
) -> Run:
    progress = training.state.progress
    stop.limit_to(training.recipe.train.time_limit)
    stop.find_end(training.task.lengths, progress.update)
    open_log(run.instance_log(training.placement.instances.index), training)
    with console.only_warned("the run goes on"):
        summary.write("running")
    try:
        stopped_by = _loop(run, training, clock, stop, summary, observers)
    except BaseException:
        with suppress(UserError):  # a full disk must not hide why the run ended
            summary.write("failed", weights=training.parallelism.has_all_weights)  # other instances may be gone
        raise
    if stopped_by is not None:
        with console.only_warned("the checkpoint is written"):
            summary.write("interrupted")
        raise Interrupted(
            f"stopped by {stopped_by} after update {progress.update} and saved; {resume_continues(run.path)}"
        )
    stop.finish()
    try:
        summary.write("done")
    except UserError as error:
        raise UserError(
            f"{error}; all updates are saved: solve the problem, then {resume_continues(run.path)}"
        ) from error
    if training.recipe.log.report:
        _report(run, training, clock, summary)
    return run


def _report(run: Run, training: Training, clock: Clock, summary: SummaryWriter) -> None:
    """Draw the report. The run is complete: without one, if that fails."""
    lead, report = training.placement.is_lead, None
    with clock.phase("report"), training.parallelism.whole_model() as model:
        if lead:
            with console.only_warned("the run is complete, without a report: `podium predict` draws it", Exception):
                from podium.report.prediction import draw_report  # imports Pillow and jinja, which take long

                workload, micro_batch = training.task.workload, training.recipe.valid.micro
                model = _whole_model(run, training, model)
                report = draw_report(run, workload, model, training.placement.device, micro_batch)
                add_prediction(run, training.recipe.log, training.state.progress.update, report.prediction, model)
    with console.only_warned("the run is complete", Exception):
        summary.write("done", weights=False)
        if report is not None:
            report.write()  # last, as it shows the times of the summary


def _loop(
    run: Run, training: Training, clock: Clock, stop: StopRequest, summary: SummaryWriter, observers: Observers
) -> str | None:
    """Make updates until the end or a request to stop; return the reason of the request, or None at the end."""
    recipe, lengths, state, lead = training.recipe, training.task.lengths, training.state, training.placement.is_lead
    progress, total = state.progress, state.progress.last_update(lengths.total_updates)
    valid_every, save_every = lengths.updates(recipe.valid.every), lengths.updates(recipe.checkpoint.every)

    def compiled(executable: Executable) -> None:
        clock.move("compile", executable.seconds)
        console.say(executable.sentence())
        summary.executable = executable

    engine = build_engine(training, Events(partial(clock.move, "communication"), compiled))
    saved_at, meter = progress.update, Meter(clock, lengths, progress.update, training.placement.topology)

    with (
        Telemetry(
            recipe.log, run, recipe.tree(), progress.update, console.warn, observers, lead=lead, total_updates=total
        ) as telemetry,
        console.progress_display(lead) as display,
        Saver(run.checkpoints, recipe.checkpoint, training.parallelism.pipeline_group, observers.checkpoint) as saver,
        samples_of_updates(training, progress.update, total, partial(clock.move, "input_wait")) as all_samples,
        settled_objects(),
        clock.phase("train"),
    ):
        for samples in all_samples:
            lr = state.schedule.lr(progress.update)
            stopping = engine.update(progress.update, samples, lr, stop=stop.after(progress.update + 1) is not None)
            progress.update += 1
            update = progress.update
            take_average(training)
            valid_due = update == total or (valid_every > 0 and update % valid_every == 0)
            save_due = update == total or (save_every > 0 and update % save_every == 0)
            record_due = valid_due or save_due or update % recipe.engine.updates_per_call == 0
            if not (record_due or stopping):
                continue
            progress.pending.extend(engine.collect())  # waits for the device
            check_finite(progress.pending, update)
            if record_due:
                record = lengths.place(update) | named("train", progress.take_train()) | {"train/lr": lr}
                record |= meter.record(update) | state.loss_scale.record() | summary.monitoring.record()
                record |= chained(training)
                improved = False
                if valid_due:
                    with clock.phase("valid"):
                        improved = validate(training)
                    record |= named("valid", progress.valid_last) | named("valid/average", progress.average_last, "_")
                saver.tell_if_written()
                telemetry.write(record)
                display.update(update, total, facts(progress, lengths, meter.samples_per_second), milestone=valid_due)
                if save_due or progress.stopped_early or (improved and recipe.checkpoint.best):
                    _save(saver, training, clock)
                    saved_at = update
                if progress.stopped_early and update < total:
                    console.say(early_end(progress, recipe.train.stop))
                    break
            if stopping and update < total:
                if saved_at != update:
                    _save(saver, training, clock)
                break
        with clock.phase("checkpoint"):
            saver.wait()
    if progress.stopped_early or progress.update == total:
        return None
    return stop.after(progress.update) or "a request to another instance"


def _save(saver: Saver, training: Training, clock: Clock) -> None:
    recipe, state, parallelism = training.recipe, training.state, training.parallelism
    if not parallelism.saves:
        return
    with clock.phase("checkpoint"), parallelism.whole_model() as model:
        # The last update's loss was that of the weights before it. The new weights are tried on one sample, as they
        # may replace the last good checkpoint.
        if parallelism.data_group.index == 0:
            try_weights(training, model)
        saver.save(
            state.progress.update,
            model,
            state.optimiser,
            {"recipe_sha256": recipe.sha256(), "recipe": recipe.tree(), "seconds": clock.seconds(), **state.state()},
            state.progress.best_update,
            state.average.tensors if state.average is not None else None,
            parallelism.holders,
        )


def _whole_model(run: Run, training: Training, model: nn.Module) -> nn.Module:
    """Return the whole trained model for predictions, even where this instance has only a stage of it."""
    if training.parallelism.pipeline_group is None:
        return model
    whole, _ = build_model(training.recipe, training.task.workload, training.placement.device)
    found = reading.load_latest(run.checkpoints, console.warn)
    assert found is not None
    found.restore(whole)
    return whole


def _environment(training: Training) -> dict:
    placement = training.placement
    return environment(placement.threads, placement.device, placement.busy_threads, training.recipe.tree())
