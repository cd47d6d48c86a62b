"""Which of the compared go on, and how points and runs are numbered."""

from podium.study.definition import study_from_tree
from podium.study.steps import generations, new_points, new_runs, promoted


def study(**keys):
    return study_from_tree({"recipe": "neuron", "values": {"optim.lr": [1, 2, 3]}, **keys}, "here")


def test_the_best_part_goes_on_with_ties_and_at_least_one():
    three = study(halving={"first": "1ep", "factor": 3})
    assert promoted(three, [5, 1, 4, 2, 6, 3]) == [False, True, False, True, False, False]
    assert promoted(three, [2, 1]) == [False, True]
    assert promoted(three, [1, 1, 2]) == [True, True, False]
    more_is_better = study(halving={"first": "1ep"}, metric="valid/accuracy", mode="max")
    assert promoted(more_is_better, [0.1, 0.9, 0.5]) == [False, True, False]


def test_generations_cover_all_points_once():
    given = study(values={"optim.lr": list(range(1, 12))}, generation=4)
    assert [list(points) for points in generations(given)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_numbers_go_on_from_the_last_and_what_is_known_keeps_its_own():
    first = {run.number: run for run in new_runs(study(), {}, new_points(study(), {}), 1)}
    assert [run.values["optim.lr"] for run in first.values()] == [1, 2, 3]
    wider = study(values={"optim.lr": [9, 1, 2, 3]}, seeds=2)
    more = new_runs(wider, first, new_points(wider, first), 1)
    assert [(run.number, run.point, run.seed) for run in more] == [
        (3, 0, 2),
        (4, 1, 2),
        (5, 2, 2),
        (6, 3, 1),
        (7, 3, 2),
    ]
