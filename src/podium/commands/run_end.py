"""The last lines of a training."""

from podium.runs.folder import Run
from podium.ui.console import out, show_table
from podium.ui.run_summary import summary_table
from podium.ui.streams import results_are_kept


def print_summary(run: Run) -> None:
    """Print the last lines of a training."""
    results_are_kept()
    summary = run.summary(whole=True)
    show_table(summary_table(str(run.path), summary))
    if run.report_file.exists():
        out.print(f"report: {run.report_file.resolve()}", soft_wrap=True)
    loss = summary["valid"]["last"].get("loss")
    if loss is not None:
        out.print(f"final validation loss: {loss:.4f}")
