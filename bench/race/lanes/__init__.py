"""The lanes, by name. A further lane is one small file and one line here."""

from bench.race.lane import Lane
from bench.race.lanes import cnn, language, mnist, neuron

LANES: dict[str, Lane] = {lane.name: lane for lane in (*mnist.LANES, *neuron.LANES, *cnn.LANES, *language.LANES)}
