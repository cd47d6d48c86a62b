"""Two hosts, each with its own `podium … --join`, and the cable between them cut."""

import subprocess
import sys

import pytest

from podium.runs.folder import Run
from tests.support.hosts import HOSTS, SPREAD, both, ended, inside, ip, on_host
from tests.support.processes import num_records, sentence, until
from tests.support.recipes import eight, recipe_of

pytestmark = pytest.mark.slow


def test_two_hosts_train_to_the_same_weights_as_one_and_a_cut_link_leaves_the_first_one_to_go_on(
    hosts, tmp_path, weights_alone
):
    names, ends = hosts
    run = Run(tmp_path / "run")
    args = ["train", *recipe_of("mnist"), "launch.timeout=8", "--out", "run"]
    processes = both(names, tmp_path, *args)
    until(lambda: run.metrics_file.exists() and run.metrics_file.read_bytes().count(b"\n") >= 4, "records")
    listening = subprocess.run(inside(names[0], "ss", "-Hltn"), capture_output=True, text=True).stdout
    assert all(line.split()[3].startswith(HOSTS[0]) for line in listening.splitlines()), listening
    ip("-n", names[0], "link", "set", ends[0], "down")
    (first, errors), (second, other_errors) = [ended(process) for process in processes]
    assert (first, second) == (0, 3), (errors, other_errors)
    assert f"heard nothing from {HOSTS[1]}; the others go on without it (1 of 3)" in errors
    assert f"the connection to {HOSTS[0]} was lost" in sentence(other_errors)
    assert run.summary()["weights_sha256"] == weights_alone(recipe_of("mnist"))
    assert run.summary()["topology"]["hosts"] == 1


def test_hosts_with_different_numbers_of_instances_train_to_the_same_weights(hosts, tmp_path, weights_alone):
    names, _ = hosts
    recipe = [*eight("mnist"), "train.length=20up"]
    args = ["train", *recipe, "--hosts", f"{HOSTS[0]}:1,{HOSTS[1]}:3", "--join", "--out", "run"]
    results = [ended(process) for process in [on_host(name, tmp_path, *args) for name in names]]
    assert [code for code, _ in results] == [0, 0], results
    run = Run(tmp_path / "run")
    assert run.summary()["weights_sha256"] == weights_alone(recipe)
    assert run.summary()["topology"] == {"hosts": 2, "instances": 4, "replicas": 8, "stages": 1}


@pytest.mark.parametrize("killed_on", [0, 1])
def test_an_instance_with_a_part_of_the_state_that_is_lost_makes_both_hosts_start_again(
    killed_on, hosts, tmp_path, weights_alone
):
    names, _ = hosts
    run = Run(tmp_path / "run")
    processes = both(names, tmp_path, "train", *recipe_of("mnist"), "parallel.shard=optimiser", "--out", "run")
    until(lambda: num_records(run) >= 6 or processes[0].process.poll() is not None, "records")
    processes[killed_on].instances[killed_on].kill()
    results = [ended(process) for process in processes]
    assert [code for code, _ in results] == [0, 0], results
    assert f"instance {killed_on} on {HOSTS[killed_on]}: was killed by SIGKILL; restarting" in results[killed_on][1]
    assert all("restarting from the last checkpoint (1 of 3)" in errors for _, errors in results), results
    assert run.summary()["weights_sha256"] == weights_alone(recipe_of("mnist"))


def test_a_mistake_that_one_host_finds_ends_both_and_restarts_nothing(hosts, tmp_path):
    names, _ = hosts
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import podium.engine.update as u\n"
        "    from podium.errors import UserError\n"
        "    def collect(self):\n"
        "        raise UserError('there is no room here')\n"
        "    u.Engine.collect = collect\n"
    )
    args = ["train", *recipe_of("mnist"), *SPREAD, "--join", "--out", "run"]
    other = on_host(names[1], tmp_path, *args, env={"PYTHONPATH": str(tmp_path)}, before=())
    results = [ended(process) for process in (on_host(names[0], tmp_path, *args), other)]
    assert [code for code, _ in results] == [3, 2], results
    assert "there is no room here" in sentence(results[1][1])
    told = ("another host ended the run; see the messages there", "lost another instance")
    assert any(text in sentence(results[0][1]) for text in told), results


def test_a_host_that_never_joins_is_named(hosts, tmp_path):
    names, _ = hosts
    args = ["train", *recipe_of("mnist"), "launch.timeout=5", *SPREAD, "--join"]
    code, errors = ended(on_host(names[0], tmp_path, *args, "--out", "run"))
    assert code == 2, errors
    assert f"{HOSTS[1]} has not joined within 5 s" in sentence(errors)
    code, errors = ended(on_host(names[1], tmp_path, *args, "--out", "run"))
    assert code == 2
    assert f"{HOSTS[0]}:29400, where the hosts meet, did not answer within 5 s" in sentence(errors)
    assert not (tmp_path / "run").exists()


def test_the_first_host_named_keeps_the_run_whatever_its_address(hosts, tmp_path):
    names, _ = hosts
    spread = ["--hosts", ",".join(reversed(HOSTS)), "--instances", 2, "--join", "--out", "run"]
    folders = [tmp_path / letter for letter in "ab"]
    for folder in folders:
        folder.mkdir()
    args = ["train", *recipe_of("mnist"), "train.length=4up", *spread]
    processes = [on_host(name, folder, *args) for name, folder in zip(names, folders, strict=True)]
    results = [ended(process) for process in processes]
    assert [code for code, _ in results] == [0, 0], results
    assert Run(folders[1] / "run").summary()["state"] == "done"
    assert not Run(folders[0] / "run").recipe_file.exists()


def test_a_port_in_use_is_one_sentence(hosts, tmp_path):
    names, _ = hosts
    hold = "import socket; s=socket.create_server(('10.77.0.1', 29400)); print('held', flush=True); s.accept()"
    with subprocess.Popen(inside(names[0], sys.executable, "-c", hold), stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline()
            args = ["train", *recipe_of("mnist"), *SPREAD, "--join", "--out", "run"]
            code, errors = ended(on_host(names[0], tmp_path, *args))
        finally:
            holder.kill()
    assert code == 2, errors
    assert "port 29400 of 10.77.0.1 cannot be used (Address already in use)" in sentence(errors)
