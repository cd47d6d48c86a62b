"""Jobs on hosts that ssh reaches: checked before anything starts, and hosts that could be taken for options refused."""

import json
import sys
import time

import pytest

from podium.errors import UserError
from podium.recipe.loading import load_recipe
from podium.submit.site import load_site
from podium.submit.ssh.checks import check_hosts
from podium.submit.ssh.hosts import HostPart, parse_hosts
from podium.submit.ssh.on_host import facts
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
    assert "warning: of 8 cores of me@b 1 are free, for 2 instances" in checked(free_cores=1.0, cores=8)
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
    from podium.runs.folder import Run

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
