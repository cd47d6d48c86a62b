"""What follows an update when it is due: a record, a validation, a checkpoint. Called by `train.py` after every update.

It can be done again for the same update, where an instance was lost in the middle of it.
"""

from podium.chain import LOSS_MARKS, loss_marks
from podium.checkpoints.writing import Saver
from podium.engine.update import Engine
from podium.runs.metrics import Telemetry
from podium.runs.summary import SummaryWriter
from podium.training.build import Training
from podium.training.chain import chained
from podium.training.clock import Clock
from podium.training.progress import early_end, facts, named
from podium.training.regrouping import Regrouping
from podium.training.saving import CheckpointLost, newest_is_missing, save
from podium.training.validation import check_finite, validate
from podium.ui import console


class AfterUpdate:
    """Records, validates and saves, by the recipe's intervals."""

    def __init__(
        self,
        training: Training,
        clock: Clock,
        summary: SummaryWriter,
        telemetry: Telemetry,
        display: console.Display,
        saver: Saver,
        groups: Regrouping,
        recorded: int,
    ) -> None:
        """Begin after the update `recorded`, the last one that all this is done for."""
        self._training, self._clock, self._summary = training, clock, summary
        self._telemetry, self._display, self._saver, self._groups = telemetry, display, saver, groups
        self._recorded = self._saved_at = recorded
        recipe, lengths = training.recipe, training.task.lengths
        self._valid_every = lengths.updates(recipe.valid.every)
        self._save_every = lengths.updates(recipe.checkpoint.every)

    def __call__(self, engine: Engine, update: int, stopping: bool) -> bool:
        """Do what is due after `update`, and save where training is `stopping`; return whether it was the last one."""
        training, clock = self._training, self._clock
        recipe, lengths, state = training.recipe, training.task.lengths, training.state
        progress, total = state.progress, lengths.total_updates
        valid_due = update == total or (self._valid_every > 0 and update % self._valid_every == 0)
        save_due = update == total or (self._save_every > 0 and update % self._save_every == 0)
        record_due = valid_due or save_due or update % recipe.engine.updates_per_call == 0
        if record_due or stopping:
            progress.pending.extend(engine.collect())  # waits for the device
            self._groups.collected()
            check_finite(progress.pending, update)
        if record_due:
            batch, losses = recipe.batch, progress.pending.parts.get("loss", [])
            told = {LOSS_MARKS: loss_marks(losses, batch.num_replicas * batch.num_accumulation)}
            record = lengths.place(update) | named("train", progress.take_train())
            record |= {"train/lr": state.schedule.lr(update - 1)} | self._groups.meter.record(update)
            record |= state.loss_scale.record() | self._summary.monitoring.record()
            record |= chained(training) | told
            improved = False
            if valid_due:
                with clock.phase("valid"):
                    improved = validate(training)
                record |= named("valid", progress.valid_last) | named("valid/average", progress.average_last, "_")
            self._saver.tell_if_written()
            if update > self._recorded:  # else it was written before an instance was lost
                self._telemetry.write(record)
                self._recorded = update
            shown = facts(progress, lengths, self._groups.meter.samples_per_second)
            self._display.update(update, total, shown, milestone=valid_due)
            if save_due or progress.stopped_early or (improved and recipe.checkpoint.best):
                self._save()
        if stopping and update < total and self._saved_at != update:
            self._save()
        self._groups.recorded()
        if progress.stopped_early and update < total:
            console.say(early_end(progress, recipe.train.stop))
            return True
        return stopping and update < total

    def save_what_is_missing(self) -> None:
        """Save now if the instance that led before was lost with a checkpoint that it was still writing."""
        try:
            missing = newest_is_missing(self._training, self._saver, self._save_every)
        except CheckpointLost as error:
            self._groups.restart(str(error))
            raise
        if missing:
            self._save()

    def _save(self) -> None:
        save(self._saver, self._training, self._clock)
        self._saved_at = self._training.state.progress.update
