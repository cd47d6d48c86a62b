"""What was measured for a user's workload is kept in the cache, and forgotten when the code changes."""

import pytest
import torch

from podium.machine.cache_folder import cache_folder
from podium.recipe.loading import load_recipe
from podium.tune.cache import Outcome, recall, remember
from tests.support.own import WORKLOAD, write_own


@pytest.mark.slow
def test_an_outcome_belongs_to_the_code_of_a_workload_and_not_to_where_it_lies(tmp_path):
    found = Outcome("2026-01-01", 1.0, 1.0, 1.0, {}, {})
    device = torch.device("cpu")
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        write_own(tmp_path / name, WORKLOAD if name != "c" else WORKLOAD + "# another\n")
    a, b, c = (load_recipe(str(tmp_path / name / "mine.yaml")) for name in "abc")
    assert remember(a, device, found).parent == cache_folder("tune")
    assert recall(b, device) == found
    assert recall(c, device) is None
