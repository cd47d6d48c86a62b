"""Site files: strict, without secrets, and with nothing in them that a shell or ssh could take for something else."""

from pathlib import Path

import pytest

from podium.errors import UserError
from podium.submit.site import SHIPPED_SITES, load_site, own_sites, read_site, site_from_tree

HOSTILE = ["a;id", "$(id)", "`id`", "a\nb", "-oProxyCommand=id", "a b", "", "a'b", 'a"b', "a|b", "../a", "a\x1b[2J"]


def site(folder: Path, text: str) -> Path:
    path = folder / "here.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", sorted(path.stem for path in SHIPPED_SITES.glob("*.yaml")))
def test_shipped_sites_are_read_and_come_back_equal_from_the_record_of_a_job(name):
    known = load_site(name, "slurm")
    assert known.node.cores
    assert site_from_tree(known.tree()) == known


def test_the_sites_of_a_user_come_first_and_one_is_taken_by_the_name_of_the_target():
    own_sites().mkdir(parents=True, exist_ok=True)
    mine = own_sites() / "slurm.yaml"
    mine.write_text("slurm: {partition: mine}")
    try:
        assert load_site(None, "slurm").slurm.partition == "mine"
        assert load_site("slurm", "ssh").slurm.partition == "mine"
        assert load_site(None, "ssh").slurm.partition is None
    finally:
        mine.unlink()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("slurm: {partiton: gpu}", "unknown key slurm.partiton (did you mean slurm.partition?)"),
        ("environment: {WANDB_API_KEY: abc}", "WANDB_API_KEY looks like a secret: name it in `secrets`"),
        ("slurm: {options: {output: /tmp/x}}", "output is set by the batch script itself"),
        ("slurm: {options: {'x;id': y}}", "expected names of long options"),
        ("container: {image: a, runtime: podman}", "expected one of apptainer, shifter, docker"),
        ("login: {ssh: 'ssh \"'}", "expected a command with its options"),
    ],
)
def test_a_mistake_is_one_sentence_with_the_file_and_the_key(text, sentence, tmp_path):
    with pytest.raises(UserError) as error:
        read_site(site(tmp_path, text))
    assert str(error.value).startswith(f"{tmp_path}/here.yaml: ")
    assert sentence in str(error.value)


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("key", ["login: {host: %s}", "slurm: {partition: %s}", "modules: [%s]", "secrets: [%s]"])
def test_a_name_that_could_mean_something_else_is_refused(key, text, tmp_path):
    import json

    with pytest.raises(UserError, match="expected"):
        read_site(site(tmp_path, key % json.dumps(text)))


@pytest.mark.parametrize("name", ["../sites/pod", "/etc/passwd", "", "no\nsuch"])
def test_a_site_is_found_by_its_name_alone(name):
    with pytest.raises(UserError, match="no such file"):
        load_site(name, "slurm")
