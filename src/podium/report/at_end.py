"""The report of a training that has ended, drawn by the instances that trained. Called by `train.py`."""

from torch import nn

from podium.checkpoints import reading
from podium.runs.folder import Run
from podium.runs.summary import SummaryWriter
from podium.runs.tensorboard import add_prediction
from podium.training.build import Training, build_model
from podium.training.clock import Clock
from podium.ui import console


def write_report(run: Run, training: Training, clock: Clock, summary: SummaryWriter) -> None:
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


def _whole_model(run: Run, training: Training, model: nn.Module) -> nn.Module:
    """Return the whole trained model for predictions, even where this instance has only a stage of it."""
    if training.parallelism.pipeline_group is None:
        return model
    whole, _ = build_model(training.recipe, training.task.workload, training.placement.device)
    found = reading.load_latest(run.checkpoints, console.warn)
    assert found is not None
    found.restore(whole)
    return whole
