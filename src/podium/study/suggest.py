"""Optuna's part: values for the next runs, importances of keys, and trials that its own tools understand.

Asked afresh for every suggestion, with a sampler seeded by (seed of the study, number of the point) and the points of
earlier generations told in the order of their numbers. So it does not matter who finished first, nor whether the
process is still the same (optuna/optuna#3056).
"""

import hashlib
import json
import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from podium.study.definition import StudySection
from podium.study.records import Records, RunRecord, by_point, mean, point_value

optuna.logging.set_verbosity(logging.WARNING)

#: values as Optuna has them: numbers of a range, or the index of a list's value
_Params = dict[str, Any]


def suggest(study: StudySection, records: Records, points: Sequence[int]) -> list[tuple[int, dict[str, Any]]]:
    """Return values for the points of one generation, in their order."""
    known = by_point(records.values())
    found: list[tuple[int, dict[str, Any]]] = []
    for point in points:
        first = point - point % study.generation
        told = [trial_of(study, runs) for index, runs in known.items() if index < first]
        # Those of the same generation have no results yet, whether or not they have finished.
        beside = [(index, dict(runs[0].values)) for index, runs in known.items() if first <= index < point]
        told += [_running(study, values) for _, values in sorted([*beside, *found], key=lambda one: one[0])]
        found.append((point, _suggested(study, point, told if study.method == "tpe" else [])))
    return found


def _suggested(study: StudySection, point: int, told: Sequence[FrozenTrial]) -> dict[str, Any]:
    digest = hashlib.sha256(f"{study.seed} {point}".encode()).digest()
    seed = int.from_bytes(digest[:4], "big")
    sampler: optuna.samplers.BaseSampler
    if study.method == "tpe":
        sampler = optuna.samplers.TPESampler(
            seed=seed, multivariate=True, constant_liar=True, n_startup_trials=study.startup
        )
    else:
        sampler = optuna.samplers.RandomSampler(seed=seed)
    asked = optuna.create_study(direction=_direction(study), sampler=sampler)
    asked.add_trials(told)
    params = asked.ask(distributions(study)).params
    return {key: _value(study, key, params[key]) for key in study.values}


def distributions(study: StudySection) -> dict[str, BaseDistribution]:
    """Return what each key may be, in Optuna's words. Lists of anything become the numbers of their values."""
    found: dict[str, BaseDistribution] = {}
    # In the order of names: what is drawn must not depend on the order in which keys were given.
    for key, given in sorted(study.values.items()):
        if isinstance(given, list):
            found[key] = CategoricalDistribution(tuple(map(_label, given)))
        elif given.whole:
            found[key] = IntDistribution(int(given.from_), int(given.to), log=given.log, step=int(given.step or 1))
        else:
            found[key] = FloatDistribution(given.from_, given.to, log=given.log, step=given.step)
    return found


def _label(value: Any) -> Any:
    """Return a value of a list in a form that Optuna can store: as it is, or as text."""
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value, default=str)


def _value(study: StudySection, key: str, param: Any) -> Any:
    given = study.values[key]
    if not isinstance(given, list):
        return param
    return next(value for value in given if type(_label(value)) is type(param) and _label(value) == param)


def _params(study: StudySection, values: Mapping[str, Any]) -> _Params:
    return {key: _label(values[key]) if isinstance(study.values[key], list) else values[key] for key in study.values}


def trial_of(study: StudySection, runs: Sequence[RunRecord]) -> FrozenTrial:
    """Return a point as a trial. One that failed, or was pruned at once, counts as the worst."""
    common: dict[str, Any] = {"params": _params(study, runs[0].values), "distributions": distributions(study)}
    num_rungs = min(len(run.rungs) for run in runs)
    common["intermediate_values"] = {rung + 1: mean(run.rungs[rung] for run in runs) for rung in range(num_rungs)}
    names = {name for run in runs for name in run.constraints}
    common["constraints"] = {name: max(run.constraints.get(name, -math.inf) for run in runs) for name in sorted(names)}
    common["user_attrs"] = {"runs": [run.number for run in runs], "seeds": [run.seed for run in runs]}
    value = point_value(runs)
    if value is not None:
        return create_trial(state=TrialState.COMPLETE, value=value, **common)
    if all(run.settled for run in runs):
        return create_trial(state=TrialState.PRUNED, **common)
    state = TrialState.WAITING if all(run.state == "waiting" for run in runs) else TrialState.RUNNING
    return create_trial(state=state, **common)


def _running(study: StudySection, values: Mapping[str, Any]) -> FrozenTrial:
    return create_trial(state=TrialState.RUNNING, params=_params(study, values), distributions=distributions(study))


def importances(study: StudySection, records: Records) -> dict[str, float]:
    """Return how much each key matters for the best runs, by PED-ANOVA; nothing where too few have finished."""
    trials = [trial_of(study, runs) for runs in by_point(records.values()).values()]
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    varied = [key for key in study.values if len({json.dumps(trial.params[key]) for trial in complete}) > 1]
    if len(complete) < 4 or not varied:
        return {}
    asked = optuna.create_study(direction=_direction(study))
    asked.add_trials(complete)
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    found = optuna.importance.get_param_importances(asked, evaluator=evaluator, params=varied)
    return {key: float(found[key]) for key in found if math.isfinite(found[key])}


def _direction(study: StudySection) -> Literal["minimize", "maximize"]:
    return "minimize" if study.less_is_better else "maximize"


def optuna_study(study: StudySection, records: Records, name: str, storage: optuna.storages.BaseStorage) -> None:
    """Write the study as one of Optuna's into a storage."""
    written = optuna.create_study(storage=storage, study_name=name, direction=_direction(study))
    with warnings.catch_warnings():  # the name is for people; where Optuna drops it, the test of the export says so
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        written.set_metric_names([study.metric])
    for key, value in {"recipe": study.recipe, "method": study.method, **study.set}.items():
        written.set_user_attr(key, value)
    written.add_trials([trial_of(study, runs) for runs in by_point(records.values()).values()])
