"""Whether hosts fit together, from what each has said about itself. Pure."""

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from podium import __version__
from podium.errors import UserError
from podium.recipe.loading import Recipe
from podium.submit.ssh.hosts import HostPart


def check_hosts(
    recipe: Recipe, parts: Sequence[HostPart], answers: Mapping[str, Mapping[str, Any]], clock_difference_s: float
) -> list[str]:
    """Raise UserError, with the host and what to do, where a training could not start; return what is worth saying."""
    notes = []
    for part in parts:
        answer = answers[part.host]
        _check_same(part, answer, recipe)
        if answer.get("data"):
            raise UserError(f"{part.host}: the data is not there: {answer['data']}")
        # It was looked at some time between the question and the answer.
        early = float(answer["time"]) - float(answer["answered"])
        late = float(answer["asked"]) - float(answer["time"])
        if max(early, late) > clock_difference_s:
            raise UserError(f"{part.host}: its clock differs by {max(early, late):.0f} s from this one: correct it")
        free, cores = float(answer["free_cores"]), int(answer["cores"])
        wanted = f"{part.instances} instance{'' if part.instances == 1 else 's'}"
        if part.instances > cores:
            notes.append(f"warning: {part.host} has {cores} cores for {wanted}")
        elif free < part.instances:
            notes.append(f"warning: {part.host} has {free:g} free cores of {cores}, for {wanted}")
        else:
            notes.append(f"{part.host}: {free:g} of {cores} cores are free, same Podium, torch and recipe")
    return notes


def _check_same(part: HostPart, answer: Mapping[str, Any], recipe: Recipe) -> None:
    mine = {"podium": __version__, "torch": metadata.version("torch"), "recipe_sha256": recipe.sha256()}
    called = {"podium": "Podium", "torch": "torch", "recipe_sha256": "the recipe, or the code of its workload,"}
    for key, own in mine.items():
        theirs = str(answer.get(key))
        if theirs and theirs != own:
            raise UserError(f"{part.host}: {called[key]} differs: {theirs[:24]} there, {own[:24]} here")
