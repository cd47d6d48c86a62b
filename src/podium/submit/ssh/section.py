"""What a site says about hosts that ssh reaches."""

from typing import Annotated

from pydantic import Field, NonNegativeInt

from podium.recipe.section import Section
from podium.submit.words import Line


class SshSection(Section):
    """How hosts are reached and used."""

    #: hosts with the number of instances on each: [a:4, b:4]
    hosts: tuple[Line, ...] = ()
    #: the command that reaches them, with its options as in a shell
    ssh: Line = "ssh"
    #: the folder on every host in which runs lie; from the home folder unless it begins with /
    folder: Line = "podium"
    #: how often a run of a study starts again, at most
    requeues: NonNegativeInt = 10
    #: seconds by which the hosts' clocks may differ
    clock_difference: Annotated[float, Field(gt=0)] = 5.0
