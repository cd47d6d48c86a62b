"""Lightning's Trainer without logger, checkpoints, progress bar or summary, which would only cost it time."""

from typing import Any

import lightning
import torch
from torch import Tensor

from bench.race.heat import Heat, Outcome, Stopwatch
from bench.race.lane import Task


class Module(lightning.LightningModule):
    """A task in Lightning's form."""

    def __init__(self, task: Task, watch: Stopwatch) -> None:
        super().__init__()
        self.model: Any = task.model
        self._task, self._watch = task, watch

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._task.mean_loss(self.model, *batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._task.optimiser

    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        self._watch.update_done()


def race(heat: Heat, compile: bool = False) -> Outcome:
    task, watch = heat.task(), Stopwatch(heat)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=heat.folder,
    )
    module = Module(task, watch)
    if compile:
        module.model = torch.compile(task.model)
    trainer.fit(module, task.loader())
    return Outcome(watch.seconds, task.model)
