"""Hugging Face's own model with the same weights, and its Trainer without reports, checkpoints or progress bar."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from bench.race.heat import Heat, Outcome, Stopwatch
from bench.race.lane import Order, build_workload


class Samples(Dataset):
    """The task's samples under the library's names."""

    def __init__(self, fields: dict[str, Tensor]) -> None:
        self._fields = fields

    def __len__(self) -> int:
        return len(next(iter(self._fields.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: rows[index] for name, rows in self._fields.items()}


class Trainer(transformers.Trainer):
    """A Trainer that takes the samples in the same order as the other contenders."""

    def __init__(self, order: Order, **options: Any) -> None:
        super().__init__(**options)
        self._order = order

    def _get_train_sampler(self, *_: Any) -> Sampler:
        return self._order


class Watch(transformers.TrainerCallback):
    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._watch.update_done()


def their_model(heat: Heat, model: nn.Module) -> transformers.PreTrainedModel:
    """Build the library's counterpart of the workload's module, with the same weights."""
    config, tensors = build_workload(heat.recipe()).to_huggingface(model)  # type: ignore[attr-defined]
    theirs = getattr(transformers, config["architectures"][0])(transformers.AutoConfig.for_model(**config))
    unknown = theirs.load_state_dict(tensors, strict=False).unexpected_keys  # tied weights may be missing
    assert not unknown, unknown
    theirs.tie_weights()
    return theirs.train()


def race(heat: Heat, compile: bool = False) -> Outcome:
    task, watch = heat.task(), Stopwatch(heat)
    assert heat.lane.for_transformers is not None
    model = their_model(heat, task.model)
    fields = heat.lane.for_transformers(dict(zip(task.fields, task.dataset.tensors, strict=True)))
    optimiser = heat.lane.optimiser(model.parameters())
    trainer = Trainer(
        task.order,
        model=model,
        args=transformers.TrainingArguments(
            output_dir=heat.folder,
            per_device_train_batch_size=task.batch_size,
            max_steps=heat.total_updates,
            max_grad_norm=0.0,
            use_cpu=True,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            torch_compile=compile,
        ),
        train_dataset=Samples(fields),
        optimizers=(optimiser, torch.optim.lr_scheduler.LambdaLR(optimiser, lambda update: 1.0)),
        callbacks=[Watch(watch)],
    )
    trainer.train()
    build_workload(heat.recipe()).from_huggingface(  # type: ignore[attr-defined]
        task.model, model.config.to_dict(), model.state_dict()
    )
    return Outcome(watch.seconds, task.model)
