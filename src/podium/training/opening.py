"""The steps before the first update: which instance prints and writes, and what is shown about the run."""

from pathlib import Path

import torch

from podium.errors import UserError, writing
from podium.machine.bounded_files import append_regular
from podium.training.build import Training
from podium.ui import console


def check_folder_is_shared(folder: Path, marker: Path, training: Training) -> None:
    """Raise UserError unless every host sees the file `marker`, where stages write their own parts of checkpoints."""
    if training.parallelism.pipeline_group is None:
        return
    placement = training.placement
    sees = placement.instances.gather(torch.tensor(marker.exists())).flatten().tolist()
    if not all(sees):
        raise UserError(
            f"{folder} cannot be seen from {placement.topology.host_of(sees.index(False))}: with parallel.stages every "
            "host writes a part of the checkpoints, so the run folder must be on a file system that all hosts share"
        )


def open_log(file: Path, training: Training) -> None:
    """Let instance 0 print to the console and its log, and the others only to their logs."""
    with console.only_warned("the run goes on without this log"), writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        if not training.placement.is_lead:
            console.write_everything_to(file)
        else:
            append_regular(file).close()  # a folder or a pipe in its place is told now
            console.keep_log(file)
    if not training.placement.is_lead:
        return
    if training.placement.topology.num_instances > 1:
        console.show_table(training.placement.topology.table(), message=True)
    elif training.recipe.engine.audit:
        console.say(
            "engine.audit: there is one instance, which checks itself; it finds errors that come and go, not a "
            "processor or memory that gives the same wrong result twice"
        )
    if (cut := training.parallelism.cut) is not None:
        for line in cut.allocation:
            console.say(line)
        console.show_table(cut.table, message=True)
        if cut.warning:
            console.warn(cut.warning)
