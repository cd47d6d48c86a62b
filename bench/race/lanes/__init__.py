"""The lanes, by name. To add one, write a small file and add a line here."""

from bench.race.lane import Lane
from bench.race.lanes import cnn, cosmology, language, mnist, neuron

_ALL = (*mnist.LANES, *neuron.LANES, *cnn.LANES, *cosmology.LANES, *language.LANES)
LANES: dict[str, Lane] = {lane.name: lane for lane in _ALL}
