"""`podium board`: TensorBoard on runs, with hyper-parameters filled in. It listens on this machine only, where other
users can reach its port: so its address has a random token, without which there is nothing.

It is shown a temporary folder with, for each run, links to the event files of the run and one file of hyper-parameters;
a run that has written no event files gets its scalars from its records. Nothing is written into run folders.
"""

import math
import os
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podium.errors import UserError, writing
from podium.recipe.differences import written
from podium.report.page import Comparison
from podium.report.reading import RunFacts
from podium.ui.console import out, say

_HOST = "127.0.0.1"
_TOKEN_BYTES = 24
_TOKEN_VARIABLE = "PODIUM_BOARD_TOKEN"
#: takes the token from its environment: other users can read the words of a command
_SERVER = f"""
import os, sys
from tensorboard.main import run_main
sys.argv += ["--path_prefix", "/" + os.environ.pop("{_TOKEN_VARIABLE}")]
run_main()
"""
#: keys whose values TensorBoard shows of a run, whether or not they differ
_ALWAYS = ("optim.name", "optim.lr", "batch.replicas", "batch.micro", "batch.global", "train.length", "seed")
_MAX_TEXT = 120


def board(folders: Sequence[Path], port: int) -> None:
    """Serve runs with TensorBoard until Ctrl-C."""
    from podium.commands.report import compared

    comparison, title = compared(folders)
    with tempfile.TemporaryDirectory(prefix="podium-board-") as folder:
        prepare(comparison, Path(folder))
        say(f"TensorBoard with {len(comparison.runs)} runs ({title}); Ctrl-C ends it")
        command = [sys.executable, "-c", _SERVER, "--logdir", folder, "--host", _HOST, "--port", str(port)]
        # Its data server in a process of its own follows no links, and would be one more thing that listens.
        signal.signal(signal.SIGTERM, _interrupt)
        environment = {**os.environ, _TOKEN_VARIABLE: secrets.token_urlsafe(_TOKEN_BYTES)}
        process = subprocess.Popen([*command, "--load_fast=false", "--window_title", title], env=environment)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            return
        finally:
            process.terminate()
            process.wait()
        if code:
            raise UserError(
                f"TensorBoard has ended with exit code {code}: is port {port} in use? --port 0 takes a free one"
            )


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def prepare(comparison: Comparison, folder: Path) -> None:
    """Fill the folder that TensorBoard is shown."""
    keys = list(dict.fromkeys([*comparison.keys, *_ALWAYS]))
    for index, facts in enumerate(comparison.runs):
        place = folder / (facts.name if len(comparison.runs) > 1 else facts.run.path.resolve().name)
        with writing(place):
            place.mkdir(parents=True, exist_ok=True)
            _link_events(facts, place)
            _write_hyper_parameters(comparison, facts, keys, place, index)
    out.print(f"hyper-parameters: {', '.join(keys)}", soft_wrap=True, markup=False)


def _link_events(facts: RunFacts, place: Path) -> None:
    """Link the event files of a run, so that what a running one adds is shown; else write its scalars."""
    files = [file for file in sorted(facts.run.tensorboard.glob("events.out.tfevents.*")) if _is_regular(file)]
    for file in files:
        (place / file.name).symlink_to(file.resolve())
    if not files:
        from podium.runs.tensorboard import TensorBoard

        sink = TensorBoard(place)
        for at in range(facts.num_records):
            record = {name: float(values[at]) for name, values in facts.columns.items() if math.isfinite(values[at])}
            sink.write({**record, "update": int(facts.columns["update"][at])})
        sink.close()


def _is_regular(path: Path) -> bool:
    """Return whether this is a file, or a link to one: TensorBoard would wait for a pipe, or read a device for ever."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def _write_hyper_parameters(
    comparison: Comparison, facts: RunFacts, keys: Sequence[str], place: Path, index: int
) -> None:
    from tensorboard.plugins.hparams import summary_v2

    from podium.runs.tensorboard import write_summaries

    values = {key: _value(facts.recipe[key]) for key in keys if facts.recipe.get(key) is not None}
    best = comparison.best(facts)
    summaries: list[Any] = [summary_v2.hparams_pb(values, trial_id=f"{index}", start_time_secs=_start(facts))]
    names = [name for name in facts.metrics if name.startswith("valid/")]
    metrics = [summary_v2.Metric(name) for name in names]
    described = [summary_v2.HParam(key) for key in keys]
    summaries.append(summary_v2.hparams_config_pb(hparams=described, metrics=metrics))
    write_summaries(place, summaries, best[1] if best else 0)


def _start(facts: RunFacts) -> float:
    return facts.started.timestamp() if facts.started is not None else 0.0


def _value(value: Any) -> str | float | int | bool:
    """Return a value of a recipe as TensorBoard takes it."""
    return value if isinstance(value, bool | int | float) else written(value)[:_MAX_TEXT]
