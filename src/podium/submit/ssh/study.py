"""A study over hosts that ssh reaches: how many runs each host trains at a time, and the files that they begin with."""

import json
from collections.abc import Sequence

from podium.errors import UserError
from podium.runs.folder import JOB
from podium.submit.attempts import JobFacts
from podium.submit.ssh.hosts import HostPart
from podium.submit.studies import check_array, sent_files, study_of
from podium.submit.target import Request
from podium.topology import build_topology


def shares(request: Request, parts: Sequence[HostPart]) -> dict[HostPart, int]:
    """Return how many runs each host trains at the same time; hosts that would have none are left out."""
    each, left = _instances_of_a_run(request), request.wishes.at_once
    found = {}
    for part in parts:
        num = part.instances // each
        if not num:
            raise UserError(
                f"--hosts: {part.host} has {part.instances} instances, and a run of the study needs {each} of them"
            )
        found[part] = num
    if left is None:
        return found
    # In turns, so that all hosts have something to do.
    dealt = dict.fromkeys(parts, 0)
    while left and any(dealt[part] < found[part] for part in parts):
        for part in parts:
            if left and dealt[part] < found[part]:
                dealt[part], left = dealt[part] + 1, left - 1
    return {part: num for part, num in dealt.items() if num}


def study_files(request: Request) -> dict[str, str]:
    """Return the definition of the study, by its path below its folder, and what all of its runs know of themselves."""
    check_array(request)
    recipe, each = request.recipe, _instances_of_a_run(request)
    build_topology(recipe.batch.num_replicas, each, num_stages=recipe.parallel.num_stages, blocks=recipe.blocks)
    facts = JobFacts(
        num_replicas=recipe.batch.num_replicas,
        num_stages=recipe.parallel.num_stages,
        span=recipe.blocks.span,
        alike=recipe.blocks.alike,
        per_node=each,
        requeues=request.site.ssh.requeues,
    )
    return {**sent_files(request), f"{JOB}/job.json": json.dumps(facts.model_dump(), indent=1) + "\n"}


def _instances_of_a_run(request: Request) -> int:
    return study_of(request).instances or request.recipe.parallel.num_stages
