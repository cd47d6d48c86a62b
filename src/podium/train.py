"""A run told top to bottom: prepare, restore, loop, finish. The loop a person reads first.

prepare   workload, samples, model, optimiser, schedule from the recipe; nothing on disk yet
restore   the newest good checkpoint, when there is one
loop      for every update: samples from the feed -> engine -> now and then look, validate, save
finish    summary, pictures, report
"""

import math
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from podium import checkpoint, console
from podium.clock import Clock, Utilisation
from podium.engine.agree import agreed
from podium.engine.allocator import settled_objects
from podium.engine.executables import Executable
from podium.engine.instances import Instances
from podium.engine.update import Engine, Sums
from podium.errors import Interrupted, TrainingFailed, UserError
from podium.evaluate import evaluate
from podium.held import elsewhere_of, held_tensors
from podium.interrupt import StopRequest, resume_continues
from podium.prepare import Prepared, prepare, spread_parameters, threads_per_replica
from podium.progress import Meter, Progress, facts, summary
from podium.recipe import Recipe
from podium.run import Run, create_run, differing_conditions, environment
from podium.saving import Saver
from podium.telemetry import Telemetry, check_available
from podium.topology import Topology, usable_cores
from podium.updates import build_engine, samples_of_updates

_KEPT = "earlier checkpoints are kept: a smaller optim.lr or an optim.clip_norm may help"


def train(
    recipe: Recipe,
    out: Path,
    topology: Topology | None = None,
    instances: Instances | None = None,
    stop: StopRequest | None = None,
    *,
    again: bool = False,
) -> Run:
    """Trains `recipe` in the new folder `out`, as one of `instances`, until the end or until `stop` asks to end.

    `again`: the launcher has started the instances anew, so what is in `out` already is continued.
    """
    clock, instances, run, stop = Clock(), instances or Instances.alone(), Run(out), stop or StopRequest()
    if agreed(instances, {"again": again and run.recipe_file.exists()})["again"]:
        return resume(run, recipe, topology, instances, stop, again=True)
    check_available(recipe.log)
    with stop:
        stop.answer_at_once()
        threads = agreed(instances, {"threads": threads_per_replica(recipe, topology)})["threads"]
        prepared = prepare(recipe, topology, instances, threads, fresh=True)
        stop.begin(instances)
        if instances.index == 0:
            run = create_run(out, recipe, environment(prepared.threads, prepared.device, prepared.busy_threads))
        with run.locked() if instances.index == 0 else nullcontext():
            instances.barrier()
            _check_folder_is_shared(run, prepared)
            return _train(run, prepared, clock, None, stop)


def resume(
    run: Run,
    recipe: Recipe | None = None,
    topology: Topology | None = None,
    instances: Instances | None = None,
    stop: StopRequest | None = None,
    *,
    again: bool = False,
) -> Run:
    """Continues a run from its newest good checkpoint, bit for bit as if it had never stopped.

    `again`: the launcher does, after an instance was lost. That may have been after the last update.
    """
    clock, instances, stop = Clock(), instances or Instances.alone(), stop or StopRequest()
    recipe = recipe or run.recipe()
    lead = instances.index == 0
    stop.advice = resume_continues(run.path)
    # Locked before the checkpoints are looked at: another may be saving.
    with stop, run.locked() if lead else nullcontext():
        if lead and run.summary().get("state") == "running":  # it was killed
            run.write_summary({**run.summary(), "state": "interrupted"})
        stop.answer_at_once()
        recorded = run.environment() if lead else {}
        threads = recorded.get("threads_per_replica") or threads_per_replica(recipe, topology)
        threads = agreed(instances, {"threads": threads})["threads"]
        newest = checkpoint.load_latest(run.checkpoints, console.warn) if lead else None
        found = checkpoint.shared(newest, instances, whole=recipe.parallel.shard == "none")
        del newest
        prepared = prepare(recipe, topology, instances, threads, fresh=found is None)
        _check_folder_is_shared(run, prepared)
        here = environment(prepared.threads, prepared.device, prepared.busy_threads)
        differing = differing_conditions(recorded, here) if lead else []
        if differing:
            console.warn(f"bits may differ from an uninterrupted run, as these differ: {', '.join(differing)}")
        total = prepared.lengths.total_updates
        if found is None:
            console.say(f"{run.path} has no checkpoint yet: starting from the beginning")
        elif (
            found.update >= total
            and not again
            and agreed(instances, {"state": run.summary().get("state")})["state"] == "done"
        ):
            raise UserError(f"{run.path} is complete: {found.update} of {total} updates are done")
        else:
            console.say(f"resuming {run.path} after update {found.update} of {total}")
        stop.begin(instances)
        return _train(run, prepared, clock, found, stop)


def _train(run: Run, prepared: Prepared, clock: Clock, found: checkpoint.Checkpoint | None, stop: StopRequest) -> Run:
    progress = Progress()
    stop.limit_to(prepared.recipe.train.time_limit)
    if found is not None:
        found.restore(prepared.model)
        progress = Progress.from_state(found.state["progress"])
        clock.restore(found.state["seconds"])
        prepared.schedule.load(found.state["schedule"])
        if prepared.average is not None:
            elsewhere = elsewhere_of(prepared.model)
            average = {name: tensor for name, tensor in found.average.items() if name not in elsewhere}
            prepared.average.load(average, progress.num_averaged)
    _take_log(run, prepared)
    _check_equal_weights(prepared)
    spread_parameters(prepared)
    if found is not None:
        found.restore_optimiser(prepared.optimiser, prepared.holders)
        found.forget_tensors()
    if prepared.lead:
        run.forget_after(progress.update)
    utilisation = Utilisation(len(usable_cores()))
    _write_summary(run, prepared, progress, clock, utilisation, "running", _weights_sha256(prepared))
    try:
        stopped_by = _loop(run, prepared, progress, clock, stop, found.state if found else {})
    except BaseException:
        with suppress(UserError):  # a full disk must not hide why the run ended
            whole = prepared.cut is None and prepared.spread is None
            weights = _weights_sha256(prepared) if whole else None  # others may be gone
            _write_summary(run, prepared, progress, clock, utilisation, "failed", weights)
        raise
    state = "done" if stopped_by is None else "interrupted"
    if stopped_by is None:
        stop.finish()
    _write_summary(run, prepared, progress, clock, utilisation, state, _weights_sha256(prepared))
    if stopped_by is not None:
        raise Interrupted(
            f"stopped by {stopped_by} after update {progress.update} and saved; {resume_continues(run.path)}"
        )
    if prepared.recipe.log.report:
        with clock.phase("report"), prepared.whole_model() as model:
            if prepared.lead:
                from podium.report import write_report  # draws with matplotlib, which takes long to import

                model = _in_one_piece(run, prepared, model)
                write_report(run, prepared.workload, model, prepared.device, prepared.recipe.valid.micro)
        _write_summary(run, prepared, progress, clock, utilisation, state)
    return run


def _check_folder_is_shared(run: Run, prepared: Prepared) -> None:
    """Every stage writes its own part of checkpoints."""
    if prepared.cut is None:
        return
    sees = prepared.instances.gather(torch.tensor(run.recipe_file.exists())).flatten().tolist()
    if not all(sees):
        host = prepared.topology.host_of(sees.index(False))
        raise UserError(
            f"{run.path} is not to be seen on {host}: with parallel.stages every host writes a part of the "
            "checkpoints, so the run's folder must be on a file system that they share"
        )


def _in_one_piece(run: Run, prepared: Prepared, model: nn.Module) -> nn.Module:
    """The trained model, also where this instance has only a stage of it, to make predictions with."""
    if prepared.cut is None:
        return model
    whole = prepare(prepared.recipe, threads=prepared.threads, data_of=prepared).model
    found = checkpoint.load_latest(run.checkpoints, console.warn)
    assert found is not None
    found.restore(whole)
    return whole


def _take_log(run: Run, prepared: Prepared) -> None:
    """Instance 0 speaks and keeps what it said; the others have only their log."""
    index = prepared.instances.index
    run.log.mkdir(parents=True, exist_ok=True)
    if prepared.lead:
        console.keep_log(run.instance_log(index))
        if prepared.topology.num_instances > 1:
            console.show_table(prepared.topology.table(), message=True)
        if prepared.cut is not None:
            for line in prepared.cut.allocation:
                console.say(line)
            console.show_table(prepared.cut.table, message=True)
            if prepared.cut.warning:
                console.warn(prepared.cut.warning)
    else:
        console.write_everything_to(run.instance_log(index))


def _check_equal_weights(prepared: Prepared) -> None:
    """All instances start from the same bits, or none of them starts."""
    if prepared.peers.count > 1:
        digest = bytes.fromhex(checkpoint.weights_sha256(prepared.model))
        gathered = prepared.peers.gather(torch.tensor(list(digest), dtype=torch.uint8))
        if not (gathered == gathered[0]).all():
            raise UserError("instances start from different weights: their data or the machines' arithmetic differ")


def _loop(
    run: Run, prepared: Prepared, progress: Progress, clock: Clock, stop: StopRequest, state: Mapping[str, Any]
) -> str | None:
    """Updates until the end or until asked to stop; returns what asked for it. `state` is that of the checkpoint."""
    recipe, total = prepared.recipe, prepared.lengths.total_updates
    per_call = recipe.engine.updates_per_call
    valid_every = prepared.lengths.updates(recipe.valid.every)
    save_every = prepared.lengths.updates(recipe.checkpoint.every)

    def made(executable: Executable) -> None:
        clock.move("compile", executable.seconds)
        console.say(executable.sentence())
        prepared.executable = executable

    engine = build_engine(prepared, waited=lambda seconds: clock.move("communication", seconds), made=made)
    if "loss_scale" in state:
        engine.loss_scale.load(state["loss_scale"])
    saved_at = progress.update
    meter = Meter(clock, prepared.lengths, progress.update, len(usable_cores()))
    late = partial(clock.move, "input_wait")

    with (
        Telemetry(recipe.log, run.path, run.metrics_file, recipe.tree(), lead=prepared.lead) as telemetry,
        console.progress_display(prepared.lead) as display,
        Saver(run.checkpoints, recipe.checkpoint, prepared.line) as saver,
        samples_of_updates(prepared, progress.update, total, late) as all_samples,
        settled_objects(),
        clock.phase("train"),
    ):
        for samples in all_samples:
            lr = prepared.schedule.lr(progress.update)
            stopping = engine.update(progress.update, samples, lr, stop=stop.reason is not None)
            progress.update += 1
            update = progress.update
            _take_average(prepared, progress)
            valid_due = update == total or (valid_every > 0 and update % valid_every == 0)
            save_due = update == total or (save_every > 0 and update % save_every == 0)
            record_due = valid_due or save_due or update % per_call == 0
            if not (record_due or stopping):
                continue

            progress.pending.extend(engine.collect())  # waits for the device
            _check_finite(progress.pending, update)
            if record_due:
                record = prepared.lengths.place(update) | _named("train", progress.take_train())
                record |= {"train/lr": lr} | meter.record(update)
                if engine.loss_scale.automatic:
                    scale = engine.loss_scale
                    record |= {"train/loss_scale": scale.value, "train/skipped_updates": scale.num_skipped}
                improved = False
                if valid_due:
                    with clock.phase("valid"):
                        improved = _validate(prepared, progress)
                    record |= _named("valid", progress.valid_last) | _named("valid/average", progress.average_last, "_")
                telemetry.write(record)
                line = facts(progress, prepared.lengths, meter.samples_per_second)
                display.update(update, total, line, milestone=valid_due)
                if save_due or (improved and recipe.checkpoint.best):
                    _save(saver, prepared, progress, clock, engine)
                    saved_at = update
            if stopping and update < total:
                if saved_at != update:
                    _save(saver, prepared, progress, clock, engine)
                break
        with clock.phase("checkpoint"):
            saver.wait()
    return None if progress.update == total else stop.reason or "a request to another instance"


def _validate(prepared: Prepared, progress: Progress) -> bool:
    """Validates and tells the schedule; True when no validation before was as good."""
    section = prepared.recipe.valid
    with prepared.whole_model() as model:
        means = _evaluated(prepared, model, progress.update, section.micro, section.max_samples, together=True)
        if prepared.average is not None and prepared.average.num_taken:
            with prepared.average.in_place_of(model):
                progress.average_last = _evaluated(
                    prepared, model, progress.update, section.micro, section.max_samples, together=True
                )
    prepared.schedule.observe(means["loss"], progress.update)
    return progress.take_valid(means)


def _check_finite(sums: Sums, update: int) -> None:
    for name, parts in sums.parts.items():
        if not all(math.isfinite(total) for total, _ in parts):
            raise TrainingFailed(f"the training {name} is not finite at or before update {update}; {_KEPT}")


def _evaluated(
    prepared: Prepared, model: nn.Module, update: int, micro_batch: int, max_samples: int | None, *, together: bool
) -> dict[str, float]:
    means = evaluate(
        model,
        prepared.workload,
        prepared.valid_samples,
        micro_batch=micro_batch,
        device=prepared.device,
        max_samples=max_samples,
        instances=prepared.instances if together else None,
        pipeline=prepared.pipeline,
        peers=prepared.peers if together else None,
    )
    if "loss" in means and not math.isfinite(means["loss"]):  # alone, only one instance of a line has it
        raise TrainingFailed(f"the validation loss is not finite after update {update}; {_KEPT}")
    return means


def _named(prefix: str, means: Mapping[str, float], separator: str = "/") -> dict[str, float]:
    return {f"{prefix}{separator}{name}": value for name, value in means.items()}


def _take_average(prepared: Prepared, progress: Progress) -> None:
    """Takes the weights into their average, where it is time to."""
    if prepared.average is None:
        return
    section = prepared.recipe.average
    since_start = progress.update - prepared.lengths.updates(section.start)
    every = max(1, prepared.lengths.updates(section.every))
    if since_start >= 0 and progress.update > 0 and since_start % every == 0:
        with prepared.whole_model() as model:
            prepared.average.take(held_tensors(model))
        progress.num_averaged = prepared.average.num_taken


def _save(saver: Saver, prepared: Prepared, progress: Progress, clock: Clock, engine: Engine) -> None:
    # The first replicas' instances save: one, or one for every stage; all where each holds a share of the state.
    if prepared.peers.index > 0 and prepared.holders is None:
        return
    with clock.phase("checkpoint"), prepared.whole_model() as model:
        # The last update's loss was that of the weights before it: these ones are tried once, for they may replace
        # the last good checkpoint. On one sample: what overflows does so for any.
        if prepared.peers.index == 0:
            _evaluated(prepared, model, progress.update, micro_batch=1, max_samples=1, together=False)
        state = {
            "recipe_sha256": prepared.recipe.sha256(),
            "schedule": prepared.schedule.state(),
            "seconds": clock.seconds(),
            "progress": progress.state(),
            "loss_scale": engine.loss_scale.state(),
        }
        average = prepared.average.tensors if prepared.average is not None else None
        saver.save(progress.update, model, prepared.optimiser, state, progress.best_update, average, prepared.holders)


def _weights_sha256(prepared: Prepared) -> str | None:
    """Of the whole model, on instance 0. Collective where instances hold parts of it."""
    if prepared.pipeline is not None and prepared.peers.index == 0:
        return checkpoint.sha256_of(prepared.pipeline.weights())
    with prepared.whole_model() as model:
        return checkpoint.weights_sha256(model) if prepared.lead else None


def _write_summary(
    run: Run,
    prepared: Prepared,
    progress: Progress,
    clock: Clock,
    utilisation: Utilisation,
    state: str,
    weights: str | None = None,
) -> None:
    """`weights` is their checksum; left out, what was known last."""
    if not prepared.lead:
        return
    run.write_summary(
        {
            **summary(progress, prepared.lengths, clock.seconds(), state),
            "cpu_percent": round(utilisation.percent_since_start(), 1),
            "weights_sha256": weights or run.summary().get("weights_sha256"),
            "topology": prepared.topology.record(),
            "recipe_sha256": prepared.recipe.sha256(),
            "num_parameters": sum(p.numel() for p in prepared.model.parameters()),
            **({"executable": asdict(prepared.executable)} if prepared.executable else {}),
        }
    )
