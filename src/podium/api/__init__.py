"""The Python interface: `podium.fit`, `podium.train`, `podium.open_run`, `podium.load`, and the `Run` they return."""

from podium.api.fitting import fit as fit
from podium.api.run import Loaded as Loaded
from podium.api.run import Run as Run
from podium.api.run import load as load
from podium.api.run import open_run as open_run
from podium.api.training import train as train
