"""What every test shares: a cache of its own, small recipes, and `podium` as a real process."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from hypothesis import settings

from tests.support.processes import podium_ended
from tests.support.recipes import TINY
from tests.support.warm import WARM

# The same examples in every run of the suite, so that a failure belongs to a change; `make soak` draws new ones.
settings.register_profile("repeatable", derandomize=True)
settings.register_profile("explore", print_blob=True)
settings.load_profile(os.environ.get("PODIUM_EXAMPLES", "repeatable"))

pytest_plugins = [f"tests.support.{name}" for name in ("browser", "hosts", "outcomes", "slurm", "ssh")]


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Tests never read or fill the user's cache and state, nor make a key in the user's home."""
    os.environ["PODIUM_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["PODIUM_STATE"] = str(tmp_path_factory.mktemp("state"))
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))
    yield
    WARM.close()


@pytest.fixture(scope="module", autouse=True)
def _kernels_as_at_the_start():
    """A training in this process chooses kernels for the whole process: the next file's tests begin with all again."""
    yield
    if (registry := sys.modules.get("podium.kernels.registry")) is not None:
        registry.use("auto")


#: the largest of them are for the whole suite only
_SLOW = ("bert", "cnn", "cosmology", "gpt2")


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow if name in _SLOW else ()) for name in sorted(TINY)])
def tiny(request) -> list[str]:
    """Recipe name and overrides of a tiny training, for every workload."""
    return list(TINY[request.param])


@pytest.fixture
def podium(tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """Runs `podium ARGS` in a process of its own, in `tmp_path`."""

    return partial(podium_ended, tmp_path)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For models so small that threads wait for each other more than they work, above all on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
