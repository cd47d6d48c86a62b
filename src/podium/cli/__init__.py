"""The command line: which commands there are, and what their errors become; heavy modules wait until one is called."""

import os
import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

from podium import __version__
from podium.cli import comparing, looking, measuring, rehearse, results, submit, training
from podium.cli.data import data_app
from podium.cli.light_help import LightGroup
from podium.cli.study import study_app
from podium.cli.submit import attempt_app, on_host_app, submit_app
from podium.errors import PodiumError, UserError
from podium.machine.interpreter import QuickEnd
from podium.machine.memory_shortage import check_address_space, memory_shortage
from podium.ui.streams import lost_results, outlive_readers
from podium.ui.visible import visible_sentence

# torch's libraries report every failed look-up of a host name. They read this when they are loaded.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# torch's profiler reports when it starts and stops.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

app = typer.Typer(
    name="podium",
    cls=LightGroup,
    help="Train deep-learning models from one recipe, with the same weights on any number of processes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Train": (*(training.train, training.resume, training.extend, training.join, training.leave, training.topology),),
    "Measure and predict": (measuring.tune, measuring.plan, measuring.profile, measuring.check, measuring.certify),
    "Use what was trained": (results.validate, results.predict, results.export, results.average, results.verify),
    "Compare runs": (comparing.runs, comparing.compare, comparing.report, comparing.board),
    "On clusters": (rehearse.rehearse, submit.jobs, submit.status, submit.logs, submit.cancel),
    "Look around": (looking.recipes, looking.workloads, looking.new, looking.show, looking.monitor, looking.doctor),
}
for _panel, _commands in _COMMANDS.items():
    for _command in _commands:
        app.command(rich_help_panel=_panel)(_command)
app.add_typer(study_app, name="study", rich_help_panel="Train")
app.add_typer(submit_app, name="submit", rich_help_panel="On clusters")
app.add_typer(attempt_app, name="attempt", hidden=True)
app.add_typer(on_host_app, name="on-host", hidden=True)
app.add_typer(data_app, name="data", rich_help_panel="Look around")

#: of an error; what files hold may be quoted in it
_SENTENCE = 4000


def main() -> NoReturn:
    """Run a command; the project's own errors become one sentence and an exit code."""
    quick_end = QuickEnd()
    outlive_readers()
    code: str | int | None = 0
    try:
        app(standalone_mode=True)
    except PodiumError as error:
        print(f"podium: {visible_sentence(str(error)[:_SENTENCE])}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:
        code = end.code
    except Exception as error:
        from podium.workloads.registry import explain_own

        shown = memory_shortage(error) or explain_own(error)
        if shown is None:
            raise
        print(f"podium: {visible_sentence(str(shown)[:_SENTENCE])}", file=sys.stderr)
        code = shown.exit_code if isinstance(shown, PodiumError) else UserError.exit_code
    if (reason := lost_results()) and not code:
        print(f"podium: the results could not be written to standard output: {reason}", file=sys.stderr)
        code = UserError.exit_code
    if isinstance(code, int | None):
        quick_end.code = code or 0
    sys.exit(code)


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


#: commands that do without torch
_LIGHT = (
    *("show", "recipes", "data", "doctor", "study", "submit", "jobs", "status", "logs", "cancel"),
    *("attempt", "on-host"),
    *("report", "compare", "runs", "board", "monitor"),
)


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand not in _LIGHT:
        check_address_space()
