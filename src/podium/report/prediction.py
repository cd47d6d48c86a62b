"""The end of a training, or `podium predict`: the workload's pictures and tables, kept in the run, and its report.

The report is written last, so that it shows the same times as `summary.json`.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from podium.contract import Prediction, Workload
from podium.errors import writing
from podium.report.page import compare, write_report
from podium.report.reading import read_run
from podium.runs.folder import Run, write_json
from podium.training.evaluate import ModelOutputs


@dataclass(frozen=True)
class Report:
    """A report that only waits for the last summary to be written."""

    run: Run
    prediction: Prediction

    def write(self) -> Path:
        """Write `report.html` with the summary as it is now."""
        return write_run_report(self.run)


def write_run_report(run: Run) -> Path:
    """Write the report of one run into its folder."""
    name = run.path.resolve().name
    write_report(compare([read_run(run, name)]), run.report_file, name)
    return run.report_file


def draw_report(run: Run, workload: Workload, model: nn.Module, device: torch.device, micro_batch: int) -> Report:
    """Predict with the model as it is, and keep pictures and tables in the run."""
    outputs = ModelOutputs(model, workload, micro_batch, device)
    with writing(run.pictures):
        run.pictures.mkdir(parents=True, exist_ok=True)
        prediction = workload.predict(model, outputs, run.pictures)
    write_json(
        run.pictures / "prediction.json",
        {
            "pictures": [asdict(picture) | {"path": picture.path.name} for picture in prediction.pictures],
            "tables": [asdict(table) for table in prediction.tables],
        },
    )
    return Report(run, prediction)
