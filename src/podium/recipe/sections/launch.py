"""The `launch` section: how instances are started and watched, by `launch/agent.py`."""

import shlex
from typing import Annotated

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from podium.recipe.durations import Seconds
from podium.recipe.section import Section


def _command(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError:
        words = []
    if not words or not words[0].strip():
        raise ValueError("expected a command with its options, such as ssh -p 2222")
    return text


class LaunchSection(Section):
    """How instances are started and watched; none of these keys changes the weights."""

    #: how many instances may be lost: each is replaced, or all restart from the last checkpoint
    restarts: NonNegativeInt = 3
    #: seconds that an instance may be silent, or that a host may take to join
    timeout: Seconds = 300.0
    #: port at which hosts meet; a single host opens none
    port: Annotated[int, Field(ge=1, le=65535)] = 29400
    #: the command that reaches another host, with its options as in a shell
    ssh: Annotated[str, AfterValidator(_command)] = "ssh"
    #: rotate instances that have one core each over the cores, so that all share the slowest one equally
    turns: bool = True
    #: instances of a host that share an accelerator; only where this asks for it
    instances_per_device: PositiveInt = 1
    #: with parallel.shard=optimiser: on how many other instances each one's share of the state lives as well, so that
    #: those that are left go on without a checkpoint when one is lost; takes as many times the memory of a share
    spare_copies: NonNegativeInt = 0
