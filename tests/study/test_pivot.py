"""The table of one key against the other."""

from podium.study.definition import study_from_tree
from podium.study.pivot import pivot_table
from podium.study.records import RunRecord


def study(**keys):
    values = {"optim.lr": [1e-3, 2e-3], "batch.replicas": [1, 2]}
    return study_from_tree({"recipe": "neuron", "values": values, "seeds": 2, **keys}, "here")


def record(number, rate, replicas, value, **facts):
    values = {"optim.lr": rate, "batch.replicas": replicas}
    facts = {"state": "finished", "point": number // 2, "seed": number % 2, **facts}
    return number, RunRecord(number=number, values=values, value=value, **facts)


def test_means_over_seeds_with_the_best_of_each_column_and_gaps_where_a_seed_is_missing():
    records = dict([
        record(0, 1e-3, 1, 0.25), record(1, 1e-3, 1, 0.75), record(2, 1e-3, 2, 0.5), record(3, 1e-3, 2, 0.5),
        record(4, 2e-3, 1, 0.25), record(5, 2e-3, 1, 0.5), record(6, 2e-3, 2, 0.1),
        record(7, 2e-3, 2, None, state="running"),
    ])  # fmt: skip
    table = pivot_table(study(), records)
    assert table.columns == ["lr \\ replicas", "1", "2"]
    assert [[cell.strip() for cell in row] for row in table.rows] == [
        ["0.001", "0.5", "0.5 *"],
        ["0.002", "0.375 *", "–"],
    ]
    over = {number: one.but(constraints={"updates": 1.0}) if one.point == 2 else one for number, one in records.items()}
    assert [cell.strip() for cell in pivot_table(study(), over).rows[1]] == ["0.002", "–", "–"]


def test_there_is_none_without_results_or_with_other_than_two_keys():
    assert pivot_table(study(), {}) is None
    assert pivot_table(study(values={"optim.lr": [1e-3, 2e-3]}), dict([record(0, 1e-3, 1, 0.5)])) is None
