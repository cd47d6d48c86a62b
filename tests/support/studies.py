"""Studies whose runs take no time: a place for them that writes what a training would, in any order of ending."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from podium.recipe.durations import Duration
from podium.recipe.reading import read_yaml
from podium.runs.folder import Run
from podium.study.conduct import Conductor, End
from podium.study.definition import check_values, study_from_tree
from podium.study.display import StudyDisplay
from podium.study.folder import StudyFolder

UPDATES_PER_EPOCH = 10


def analytic_loss(tree: dict[str, Any], epoch: int) -> float:
    """A loss that is best at a rate of 2e-3 and falls with every epoch; each seed has its own."""
    return abs(tree["optim"]["lr"] - 2e-3) * 100 + 1 / (epoch + 1) + 1e-3 * tree["seed"]


class PretendedRuns:
    """An `Executor` whose runs end at once or later, by chance; `codes` may say how one ends instead of well."""

    def __init__(
        self, num_slots: int, chance: int = 0, codes: Callable[[int, int], int] = lambda run, start: 0
    ) -> None:
        self._num_slots, self._chance, self._codes = num_slots, random.Random(chance), codes
        self._going: dict[int, int] = {}
        self.commands: list[tuple[int, list[str]]] = []
        self.most_at_once = 0

    def has_room(self) -> bool:
        return len(self._going) < self._num_slots

    def start(self, number: int, words: Sequence[str], log: Path) -> None:
        begun = sum(run == number for run, _ in self.commands)
        self.commands.append((number, list(words)))
        code = self._codes(number, begun)
        if code:
            with log.open("a") as file:
                file.write("podium: it was not to be\n")
        self._going[number] = code or _pretend(list(words))
        self.most_at_once = max(self.most_at_once, len(self._going))

    def wait(self) -> dict[int, int]:
        ended = [number for number in self._going if self._chance.random() < 0.4]
        self._chance.shuffle(ended)
        return {number: self._going.pop(number) for number in ended}

    def end(self) -> None:
        self._chance = random.Random(0)

    def kill(self) -> None:
        self._going.clear()

    def running(self) -> list[int]:
        return list(self._going)


def _pretend(words: list[str]) -> int:
    """Leaves what `podium train`, `resume` or `extend` would, and returns its exit code."""
    option = {
        word: words[place + 1] for place, word in enumerate(words) if word.startswith("--") and word != "--only-exact"
    }
    run = Run(Path(option["--out"] if "--out" in option else words[1]))
    if words[0] == "extend":
        tree = read_yaml(Run(Path(words[1])).recipe_file)
        tree["train"]["length"] = words[2].partition("=")[2]
    else:
        tree = read_yaml(run.recipe_file if words[0] == "resume" else Path(words[1]))
    length = int(Duration.parse(str(tree["train"]["length"])).amount)
    until = int(Duration.parse(option["--until"]).amount) if "--until" in option else length
    epochs = min(length, until)
    run.path.mkdir(parents=True, exist_ok=True)
    run.recipe_file.write_text(json.dumps(tree))
    with run.metrics_file.open("w") as file:
        for epoch in range(1, epochs + 1):
            update = epoch * UPDATES_PER_EPOCH
            loss = analytic_loss(tree, epoch)
            file.write(json.dumps({"update": update, "epoch": epoch, "samples": update * 8, "valid/loss": loss}) + "\n")
    state = "done" if epochs == length else "interrupted"
    updates = epochs * UPDATES_PER_EPOCH
    run.write_summary({"state": state, "updates": updates, "total_updates": length * UPDATES_PER_EPOCH})
    return 0 if state == "done" else 75


def conducted(path: Path, executor: PretendedRuns, *, retries: int = 2, **keys: Any) -> tuple[StudyFolder, End]:
    """The study in a folder, begun or continued."""
    tree = {"recipe": "neuron", "set": {"train.length": "9ep", "schedule.name": "constant"}, **keys}
    study, folder = study_from_tree(tree, "here"), StudyFolder(path)
    base = check_values(study)
    with folder.locked():
        folder.write_definition(study, base, ["podium"])
        with StudyDisplay() as display:
            end = Conductor(folder, study, base, executor, display, retries).run()
        folder.write_table(study, read_records(folder))
    return folder, end


def read_records(folder: StudyFolder) -> dict[int, Any]:
    """The newest record of each run."""
    from podium.study.records import read_run_records

    return read_run_records(folder.records_file)
