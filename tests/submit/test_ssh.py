"""Jobs on hosts that ssh reaches: checked before anything starts, and hosts that could be taken for options refused."""

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from podium.errors import UserError
from podium.recipe.loading import load_recipe
from podium.runs.folder import Run
from podium.submit.site import load_site
from podium.submit.ssh.checks import check_hosts
from podium.submit.ssh.hosts import HostPart, parse_hosts
from podium.submit.ssh.on_host import facts
from podium.submit.ssh.study import shares
from podium.submit.target import Request, Wishes
from tests.support.hosts import HOSTS, ended, on_host
from tests.support.processes import assert_user_error, num_records, podium_here, until
from tests.support.ssh import RECIPE


@pytest.mark.parametrize(
    "text", ["-oProxyCommand=id:4", "a;id", "$(id)", "a b:2", "a:0", "a:x", "a:-1", ",", "a\nb", "@a"]
)
def test_hosts_that_ssh_or_a_shell_could_misread_are_refused(text):
    with pytest.raises(UserError, match="--hosts"):
        parse_hosts(text, load_site(None, "ssh"))
    assert_user_error(podium_here("submit", "ssh", "mnist", "--hosts", text, "--dry-run"), "--hosts")


def test_hosts_that_do_not_fit_are_named_with_what_differs():
    recipe, parts = (
        load_recipe("mnist", ["workload.data.source=generated"]),
        parse_hosts("a:2,me@b:2", load_site(None, "ssh")),
    )
    assert parts == [HostPart("a", 2), HostPart("me@b", 2)]
    mine = facts({"recipe": json.dumps(recipe.tree())}) | {"asked": time.time() - 1, "answered": time.time() + 1}

    def checked(**changes):
        return check_hosts(recipe, parts, {"a": mine | {"free_cores": 2, "cores": 2}, "me@b": mine | changes}, 5.0)

    assert "a: 2 of 2 cores are free" in checked()[0]
    assert "warning: me@b has 1 free cores of 8, for 2 instances" in checked(free_cores=1.0, cores=8)
    for changes, sentence in (
        ({"podium": "0.0"}, "me@b: Podium differs: 0.0 there"),
        ({"torch": "1.0"}, "me@b: torch differs"),
        ({"recipe_sha256": "f" * 64}, "me@b: the recipe, or the code of its workload, differs"),
        ({"data": "/data/mnist"}, "me@b: the data is not there: /data/mnist"),
        ({"time": time.time() + 60}, "its clock differs by 5"),
        ({"time": time.time() - 60}, "its clock differs by 5"),
    ):
        with pytest.raises(UserError, match="me@b") as error:
            checked(**changes)
        assert sentence in str(error.value)


def test_data_that_is_not_there_is_found(tmp_path):
    recipe = load_recipe("mnist", [f"workload.data.path={tmp_path}/none"])
    assert facts({"recipe": json.dumps(recipe.tree())})["data"] == f"{tmp_path}/none"


@pytest.mark.slow
def test_a_job_goes_on_by_itself_on_two_hosts_and_is_watched_and_ended_together(door, tmp_path, weights_alone):
    env = {"PODIUM_STATE": str(tmp_path / "state"), "WANDB_API_KEY": "a-key-that-nobody-may-read"}
    (tmp_path / "site.yaml").write_text(
        json.dumps({"ssh": {"ssh": door.ssh(), "folder": str(tmp_path)}, "secrets": ["WANDB_API_KEY"],
                    "podium": f"{sys.executable} -m podium"})
    )  # fmt: skip

    def here(*args: object) -> tuple[int, str]:
        return ended(on_host(door.names[0], tmp_path, *args, env=env))

    def submitted(out: str, *more: str) -> Run:
        words = ["submit", "ssh", *RECIPE, *more, "--hosts", ",".join(HOSTS), "--site", "site.yaml", "--out", out]
        code, errors = here(*words)
        assert code == 0, errors
        assert "same Podium, torch and recipe" in errors or "cores" in errors
        return Run(tmp_path / out)

    run = submitted("run")
    until(lambda: run.summary().get("state") == "done", "the end")
    door.until_empty()
    assert run.summary()["weights_sha256"] == weights_alone(RECIPE)
    assert run.summary()["topology"]["hosts"] == 2
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"nobody-may-read" in path.read_bytes()]

    again = submitted("again", "train.length=100000up")
    until(lambda: num_records(again) >= 3, "records")
    assert here("cancel", "again")[0] == 0
    until(lambda: again.summary()["state"] == "interrupted", "that it has saved")
    door.until_empty()
    lead = tmp_path / "again" / "job" / f"exit-code-{HOSTS[0]}"
    until(lambda: lead.exists() and lead.read_text(), "its exit code")
    assert lead.read_text() == "75"
    assert here("status", "again")[0] == 0

    (tmp_path / "wrong.yaml").write_text(
        json.dumps({"ssh": {"ssh": door.ssh("stranger"), "folder": str(tmp_path)}})
    )  # fmt: skip
    code, errors = here("submit", "ssh", *RECIPE, "--hosts", ",".join(HOSTS), "--site", "wrong.yaml", "--out", "no")
    assert code == 2
    assert f"{HOSTS[1]} cannot be reached by ssh" in errors
    assert not (tmp_path / "no").exists()


STUDY = "recipe: base.yaml\nvalues: {optim.lr: [1.0e-3, 2.0e-3, 4.0e-3, 8.0e-3]}\nmethod: grid\n"


#: an observer that keeps runs of a study from ending before its folder has the file `quick`
PACE = """\
import time


class Pace:
    def on_record(self, run, record):
        if not (run.parents[1] / "quick").exists():
            time.sleep(0.5)
"""


def write_study(folder: Path, *more: str) -> None:
    name, *overrides = RECIPE
    (folder / "base.yaml").write_text(podium_here("show", name, *overrides, *more).stdout)
    (folder / "study.yaml").write_text(STUDY)


def states_of(folder: Path) -> list[str]:
    table = folder / "table.csv"
    return [line.split(",")[1] for line in table.read_text().splitlines()[1:]] if table.exists() else []


@pytest.mark.slow
def test_hosts_of_a_study_take_its_runs_one_after_the_other_until_none_is_left(door, tmp_path):
    env = {"PODIUM_STATE": str(tmp_path / "state"), "WANDB_API_KEY": "a-key-that-nobody-may-read"}
    (tmp_path / "site.yaml").write_text(
        json.dumps({"ssh": {"ssh": door.ssh(), "folder": str(tmp_path)}, "secrets": ["WANDB_API_KEY"],
                    "podium": f"{sys.executable} -m podium"})
    )  # fmt: skip

    def here(*args: object) -> tuple[int, str]:
        return ended(on_host(door.names[0], tmp_path, *args, env=env))

    def submitted(out: str) -> Path:
        hosts = ",".join(f"{host}:1" for host in HOSTS)
        code, errors = here("submit", "ssh", "study", "study.yaml", "--hosts", hosts, "--site", "site.yaml",
                            "--out", out)  # fmt: skip
        assert code == 0, errors
        assert f"{HOSTS[1]}: 1 run at a time" in errors
        return tmp_path / out

    write_study(tmp_path, "train.length=20up")
    sweep = submitted("sweep")
    until(lambda: states_of(sweep) == ["finished"] * 4, "the end of all runs")
    door.until_empty()
    taken = [(sweep / "job" / "taken" / f"{number:04d}").read_text() for number in range(4)]
    assert set(taken) == set(HOSTS)
    for host in HOSTS:
        until(lambda: (sweep / "job" / f"exit-code-{host}").exists(), "its exit code")  # noqa: B023
        assert (sweep / "job" / f"exit-code-{host}").read_text() == "0"
    alone = on_host(door.names[0], tmp_path, "train", "sweep/recipes/0002.yaml", "--out", "alone", env=env)
    assert ended(alone)[0] == 0
    weights = [Run(path).summary()["weights_sha256"] for path in (sweep / "runs" / "0002", tmp_path / "alone")]
    assert weights[0] == weights[1]
    assert here("status", "sweep")[0] == 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"nobody-may-read" in path.read_bytes()]

    # What is cancelled saves on all hosts, and is continued by one command.
    (tmp_path / "pace.py").write_text(PACE)
    write_study(tmp_path, "train.length=300up", f"log.observers=[{tmp_path / 'pace.py'}:Pace]")
    again = submitted("again")
    runs = [Run(again / "runs" / f"{number:04d}") for number in (0, 1)]
    until(lambda: all(num_records(run) > 2 for run in runs), "records of both hosts")
    assert here("cancel", "again")[0] == 0
    door.until_empty()
    until(lambda: [run.summary()["state"] for run in runs] == ["interrupted"] * 2, "that they have saved")
    for host in HOSTS:
        until(lambda: (again / "job" / f"exit-code-{host}").exists(), "its exit code")  # noqa: B023
        assert (again / "job" / f"exit-code-{host}").read_text() == "75"
    (again / "quick").touch()
    assert here("study", "again")[0] == 0
    assert states_of(again) == ["finished"] * 4


def test_hosts_of_a_study_that_do_not_share_its_folder_are_told_and_nothing_is_left(tmp_path, monkeypatch):
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root gives a stand-in for a host a folder of its own")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PODIUM_STATE", str(tmp_path / "state"))
    folder = tmp_path / "there"
    folder.mkdir()
    stand_in = tmp_path / "ssh"
    stand_in.write_text(
        '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\n'
        f'[ "$2" = other ] || exec sh -c "$3"\nexec unshare -m sh -c \'mount -t tmpfs none "$0" && exec sh -c "$1"\' '
        f'{folder} "$3"\n'
    )
    stand_in.chmod(0o700)
    Path("site.yaml").write_text(
        json.dumps({"ssh": {"ssh": str(stand_in), "folder": str(folder)}, "podium": f"{sys.executable} -m podium"})
    )
    write_study(tmp_path)
    done = podium_here("submit", "ssh", "study", "study.yaml", "--hosts", "one:1,other:1", "--site", "site.yaml",
                       "--out", "sweep")  # fmt: skip
    assert_user_error(done, f"other does not see {folder}/sweep of one: the hosts of a study share its folder")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("hosts", "more", "sentence"),
    [
        ("a:1", {"instances": 2}, "a has 1 instances, and a run of the study needs 2 of them"),
        ("a:4", {"method": "tpe", "budget": {"runs": 4}}, "with tpe, runs are chosen by the results of others"),
    ],
)
def test_studies_that_hosts_cannot_share_are_refused(hosts, more, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = {"recipe": "mnist", "set": {"workload.data.source": "generated", "batch.replicas": 2},
             "values": {"optim.lr": [1e-3, 2e-3]}, **more}  # fmt: skip
    Path("study.yaml").write_text(json.dumps(study))
    assert_user_error(podium_here("submit", "ssh", "study", "study.yaml", "--hosts", hosts, "--dry-run"), sentence)


def test_runs_of_a_study_are_dealt_to_hosts_by_turns_up_to_the_limit(tmp_path):
    (tmp_path / "study.yaml").write_text("recipe: mnist\nvalues: {optim.lr: [1.0e-3, 2.0e-3]}\ninstances: 2\n")
    site = load_site(None, "ssh")
    a, b, c = parse_hosts("a:6,b:3,c:2", site)

    def dealt(at_once: int | None) -> dict[HostPart, int]:
        recipe = load_recipe("mnist", ["batch.replicas=2"])
        wishes = Wishes(at_once=at_once)
        return shares(Request("study", str(tmp_path / "study.yaml"), (), recipe, site, wishes), [a, b, c])

    assert dealt(None) == {a: 3, b: 1, c: 1}
    assert dealt(4) == {a: 2, b: 1, c: 1}
    assert dealt(2) == {a: 1, b: 1}
    assert dealt(9) == {a: 3, b: 1, c: 1}


def test_what_docker_runs_would_not_outlive_its_command(tmp_path):
    (tmp_path / "site.yaml").write_text("container: {runtime: docker, image: podium}\n")
    done = podium_here("submit", "ssh", "mnist", "--hosts", "a", "--site", tmp_path / "site.yaml", "--dry-run")
    assert_user_error(done, "what docker runs ends with the command that started it")
