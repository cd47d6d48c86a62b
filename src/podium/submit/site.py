"""A site: what is the same for every job somewhere. Files of the user's first, then the shipped ones, by name.

A site file holds no secrets: it names the variables that do.
"""

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from platformdirs import user_config_path
from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator

from podium.errors import UserError
from podium.recipe.loading import validated
from podium.recipe.messages import did_you_mean
from podium.recipe.reading import read_yaml
from podium.recipe.section import Section
from podium.submit.kubernetes.section import KubernetesSection
from podium.submit.slurm.section import SlurmSection
from podium.submit.ssh.section import SshSection
from podium.submit.words import HostName, Line, VariableName, Word, is_secret_name

SHIPPED_SITES = Path(__file__).parents[1] / "sites"


def _command_words(text: str) -> str:
    try:
        if shlex.split(text):
            return text
    except ValueError:
        pass
    raise ValueError("expected a command with its options, such as ssh -p 2222")


class LoginSection(Section):
    """The login node through which a scheduler is reached from elsewhere; without `host`, it is reached from here."""

    host: HostName | None = None
    ssh: Annotated[Line, AfterValidator(_command_words)] = "ssh"
    #: the folder there in which `runs/` lies; from the home folder unless it begins with /
    folder: Line = "podium"


class NodeSection(Section):
    """What one node has; 0: not known."""

    devices: NonNegativeInt = 0
    cores: NonNegativeInt = 0


class ContainerSection(Section):
    """The container in which Podium runs there."""

    runtime: Literal["apptainer", "shifter", "docker"] = "apptainer"
    image: Line
    #: folders that it sees beside that of the run: [/scratch, /data:/data:ro]
    mounts: tuple[Line, ...] = ()
    #: further options of the runtime
    options: tuple[Line, ...] = ()
    #: the command inside
    podium: Annotated[Line, AfterValidator(_command_words)] = "podium"


class Site(Section):
    """Everything that is the same for all jobs of a site."""

    login: LoginSection = LoginSection()
    node: NodeSection = NodeSection()
    #: the command on the nodes; None: this very Podium where jobs run on this machine's files, else `podium`
    podium: Annotated[Line, AfterValidator(_command_words)] | None = None
    #: modules to load before Podium starts
    modules: tuple[Word, ...] = ()
    #: variables of every job. Keys and passwords have no place here: name them in `secrets`
    environment: dict[VariableName, Line] = Field(default_factory=dict)
    #: names of variables that are taken from the environment of `podium submit`, and never written anywhere
    secrets: tuple[VariableName, ...] = ()
    container: ContainerSection | None = None
    #: fast folders of each node: `cache` for what can be made again, `temporary` for what ends with the job
    scratch: dict[Literal["cache", "temporary"], Line] = Field(default_factory=dict)
    #: more instances than this are never asked for, whatever the recipe could use
    max_instances: PositiveInt | None = None
    slurm: SlurmSection = SlurmSection()
    kubernetes: KubernetesSection = KubernetesSection()
    ssh: SshSection = SshSection()

    @model_validator(mode="after")
    def _no_secrets(self) -> Self:
        for name in self.environment:
            if is_secret_name(name):
                raise ValueError(
                    f"environment: {name} looks like a secret: name it in `secrets`, and its value is taken from your "
                    "environment when a job is submitted"
                )
        return self

    def tree(self) -> dict[str, Any]:
        """Return the resolved tree; reading it again gives an equal site."""
        tree: dict[str, Any] = self.model_dump(mode="json", by_alias=True)
        return tree


def own_sites() -> Path:
    """Return the folder of the user's own site files."""
    return user_config_path("podium") / "sites"


def load_site(name: str | None, target: str) -> Site:
    """Return the site called `name`, or of a .yaml file; without a name the user's `TARGET.yaml`, else a plain one."""
    if name is None:
        path = own_sites() / f"{target}.yaml"
        return read_site(path) if path.is_file() else Site()
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise UserError(f"site file {name} does not exist")
        return read_site(Path(name))
    for folder in (own_sites(), SHIPPED_SITES):
        path = folder / f"{name}.yaml"
        if "/" not in name and path.is_file():
            return read_site(path)
    known = site_names()
    hint = did_you_mean(name, known) or f": there are {', '.join(known)}"
    raise UserError(f"--site {name}: there is no such file in {own_sites()}{hint}")


def site_names() -> list[str]:
    """Return the names of all sites, the user's own and the shipped ones."""
    return sorted({path.stem for folder in (own_sites(), SHIPPED_SITES) for path in folder.glob("*.yaml")})


def read_site(path: Path) -> Site:
    """Return the site of a file; raise UserError with its mistakes in one sentence."""
    tree = read_yaml(path)
    return validated(Site, tree, {}, str(path))


def site_from_tree(tree: dict[str, Any]) -> Site:
    """Return the site that a job was submitted with."""
    return validated(Site, tree, {}, "the record of the job")
