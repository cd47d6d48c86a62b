"""Folders of Hugging Face's libraries: each key of `config.json` that changes the model is honoured or refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from podium.checkpoints.huggingface import export
from podium.checkpoints.initial_weights import load_initial_weights
from podium.errors import UserError
from podium.recipe.loading import Recipe, load_recipe, recipe_from_tree
from podium.runs.folder import Run
from podium.workloads.registry import workload_class
from tests.support.processes import assert_user_error, podium_here

transformers = pytest.importorskip("transformers", reason="in the test extra")
pytestmark = pytest.mark.usefixtures("one_thread")

GPT2 = {"n_layer": 3, "n_embd": 16, "n_head": 2, "n_positions": 24, "vocab_size": 37}
BERT = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 40,
        "max_position_embeddings": 24, "vocab_size": 37}  # fmt: skip
DATA = {
    "gpt2": ["workload.data.source=generated", "workload.data.length=16"],
    "bert": ["workload.data.source=generated", "workload.data.length=16"],
}
NAME = {"gpt2": "gpt2/quick", "bert": "bert/quick"}


def written(folder, workload: str, **config):
    """A tiny model with random weights in a folder; their model."""
    torch.manual_seed(3)
    if workload == "gpt2":
        theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**GPT2, **config}))
    else:
        theirs = transformers.BertForPreTraining(transformers.BertConfig(**{**BERT, **config}))
    for param in theirs.parameters():  # biases and norms that make a difference
        nn.init.normal_(param, 0.5 if param.dim() == 1 else 0.0, 0.2)
    theirs.eval().save_pretrained(folder)
    return theirs


def recipe_of(workload: str, folder, *overrides: str) -> Recipe:
    return load_recipe(NAME[workload], [f"workload.init_from={folder}", *DATA[workload], *overrides])


def started(recipe: Recipe):
    """The workload of a recipe, and its model with the weights of its folder."""
    workload = workload_class(recipe.workload.name)(recipe.workload.model, recipe.workload.data)
    model = workload.build_model().eval()
    load_initial_weights(workload, model, recipe.workload.init_from)
    return workload, model


def logits(workload: str, model: nn.Module, theirs: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """What both models give on the same tokens."""
    tokens = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        if workload == "gpt2":
            return model(tokens), theirs(tokens).logits
        zeros, places = torch.zeros_like(tokens), torch.arange(16).expand(2, 16)
        words, _ = model(tokens, zeros, places, zeros + 1, places, zeros[:, :1])
        return words, theirs(input_ids=tokens).prediction_logits


#: what changes the function, with the keys of the recipe that it becomes
HONOURED = [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, {"scale_by_layer": True}),
    ("gpt2", {"scale_attn_weights": False}, {"scale_attention": False}),
    ("gpt2", {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True, "n_inner": 20}, {"inner": 20}),
    ("gpt2", {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True}, {}),
    ("gpt2", {"activation_function": "gelu"}, {"activation": "gelu"}),
    ("gpt2", {"activation_function": "relu", "layer_norm_epsilon": 0.1}, {"activation": "relu", "norm_eps": 0.1}),
    ("gpt2", {"tie_word_embeddings": False}, {"tied": False}),
    ("bert", {"tie_word_embeddings": False}, {"tied": False}),
    ("bert", {"hidden_act": "gelu_new"}, {"activation": "gelu_tanh"}),
    ("bert", {"hidden_act": "relu", "layer_norm_eps": 0.1}, {"activation": "relu", "norm_eps": 0.1}),
    ("bert", {"type_vocab_size": 3, "intermediate_size": 20}, {"segments": 3, "inner": 20}),
]


#: keys that change no output here, or the shapes of weights
SAME_OUTPUT = {"reorder_and_upcast_attn", "tie_word_embeddings", "n_inner", "type_vocab_size"}
#: less than what the two forms of GELU are apart
CLOSE = 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("workload", "config", "keys"), HONOURED)
def test_what_a_folder_says_is_taken_over_and_exported_again(workload, config, keys, tmp_path):
    theirs = written(tmp_path / "theirs", workload, **config)
    recipe = recipe_of(workload, tmp_path / "theirs")
    found = recipe.workload.model
    assert found.shape == ((3, 16, 2) if workload == "gpt2" else (2, 16, 2))
    assert found.vocabulary == 37
    assert {key: getattr(found, key) for key in keys} == keys
    assert recipe_from_tree(recipe.tree()) == recipe

    own, model = started(recipe)
    ours, expected = logits(workload, model, theirs)
    torch.testing.assert_close(ours, expected, rtol=0, atol=CLOSE)
    if not config.keys() & SAME_OUTPUT:  # the test would find a key that is passed over
        plain = written(tmp_path / "plain", workload)
        plain.load_state_dict(theirs.state_dict())
        assert (logits(workload, model, plain)[1] - expected).abs().max() > 3 * CLOSE

    export(own, model, workload, tmp_path / "again")
    kept = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {key: kept.get(key) for key in config if key != "reorder_and_upcast_attn"} == {
        key: value for key, value in config.items() if key != "reorder_and_upcast_attn"
    }
    kind = transformers.GPT2LMHeadModel if workload == "gpt2" else transformers.BertForPreTraining
    back, expected = logits(workload, model, kind.from_pretrained(tmp_path / "again").eval())
    torch.testing.assert_close(back, expected, rtol=0, atol=CLOSE)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """By workload, a folder of its plainest form."""
    made = {name: tmp_path_factory.mktemp("theirs") / name for name in ("gpt2", "bert")}
    for name, folder in made.items():
        written(folder, name)
    return made


def with_config(folder, to, **changes):
    """A copy of a folder with other values in its `config.json`; ... leaves a key out."""
    to.mkdir()
    (to / "model.safetensors").symlink_to(folder / "model.safetensors")
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    (to / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return to


@pytest.mark.parametrize(
    ("workload", "changes", "said"),
    [
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = true, which is not supported: expected false"),
        ("gpt2", {"activation_function": "silu"}, 'activation_function = "silu", which is not supported'),
        ("gpt2", {"activation_function": ["gelu"]}, "which is not supported"),
        ("gpt2", {"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ("gpt2", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("gpt2", {"auto_map": {"AutoModel": "code.Model"}}, "auto_map"),
        ("gpt2", {"n_layer": "many"}, "workload.model.layers"),
        ("gpt2", {"model_type": "llama"}, "the weights of a llama model, not of gpt2"),
        (
            "gpt2",
            {"n_positions": 32},
            "is 24 × 16, but the model needs 32 × 16",
        ),
        ("bert", {"is_decoder": True}, "is_decoder = true, which is not supported"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"hidden_act": "silu"}, 'hidden_act = "silu", which is not supported'),
        ("bert", {"is_encoder_decoder": True}, "is_encoder_decoder"),
        ("bert", {"model_type": "roberta"}, "model type 'roberta', expected 'bert'"),
    ],
)
def test_what_is_not_done_here_is_refused_in_one_sentence(folders, workload, changes, said, tmp_path):
    folder = with_config(folders[workload], tmp_path / "theirs", **changes)
    overrides = [f"workload.init_from={folder}", *DATA[workload], "--out", tmp_path / "run"]
    assert_user_error(podium_here("train", NAME[workload], *overrides), said)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("workload", ["gpt2", "bert"])
def test_whatever_a_config_file_holds_is_used_or_told(workload, folders, tmp_path):
    told = []
    known = json.loads((folders[workload] / "config.json").read_text())
    for key in known:
        for value in (None, [], {}, "x", -1, 0, 1.5, True, [[1]], 10**30):
            folder = tmp_path / f"{key}-{value}"
            with_config(folders[workload], folder, **{key: value})
            try:
                started(recipe_of(workload, folder))
            except UserError as error:
                told.append(str(error))
    assert len(told) > 5 * 8
    assert not any("\n" in sentence for sentence in told)


@pytest.mark.parametrize("workload", ["gpt2", "bert"])
def test_weights_with_a_head_of_their_own_do_not_go_into_a_tied_model(workload, tmp_path):
    written(tmp_path / "theirs", workload, tie_word_embeddings=False)
    with pytest.raises(UserError, match=r"of their own: set workload.model.tied=false"):
        started(recipe_of(workload, tmp_path / "theirs", "workload.model.tied=true"))
    # a file that does not say so is looked at
    silent = with_config(tmp_path / "theirs", tmp_path / "silent", tie_word_embeddings=...)
    with pytest.raises(UserError, match=r"of their own: set workload.model.tied=false"):
        started(recipe_of(workload, silent))


@pytest.mark.parametrize("workload", ["gpt2", "bert"])
def test_a_file_that_is_silent_means_the_library_s_own_values(workload, folders, tmp_path):
    sizes = {**GPT2, **BERT}.keys()
    config = json.loads((folders[workload] / "config.json").read_text())
    changes = {key: ... for key in config if key not in sizes and key != "model_type"}
    _, model = started(recipe_of(workload, with_config(folders[workload], tmp_path / "theirs", **changes)))
    _, plain = started(recipe_of(workload, folders[workload]))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize(("workload", "size"), [("gpt2", 24), ("bert", 24)])
def test_what_is_written_beside_the_folder_must_agree_with_it(workload, size, folders):
    assert recipe_of(workload, folders[workload], "workload.model.hidden=16").workload.model.shape[1] == 16
    with pytest.raises(UserError, match=r"hidden.*= 24.*16|has hidden_size = 16.*24"):
        started(recipe_of(workload, folders[workload], f"workload.model.hidden={size}"))
    # the dropout of the recipe stays, and what is told
    assert recipe_of(workload, folders[workload]).workload.model.dropout == 0


@pytest.mark.parametrize("workload", ["gpt2", "bert"])
def test_other_dropouts_unknown_keys_and_unused_tensors_are_told(workload, folders, tmp_path, capsys):
    folder = with_config(folders[workload], tmp_path / "theirs", sparkle=3)
    (folder / "model.safetensors").unlink()
    save_file(
        {**load_file(folders[workload] / "model.safetensors"), "adapter.weight": torch.ones(2)},
        folder / "model.safetensors",
    )
    started(recipe_of(workload, folder))
    said = " ".join(capsys.readouterr().err.split())
    assert "trained with resid_pdrop = 0.1" in said or "trained with hidden_dropout_prob = 0.1" in said
    assert "workload.model.dropout = 0" in said
    assert "keys not known here: sparkle" in said
    assert "adapter.weight" in said


def test_a_run_that_started_from_a_folder_resumes_without_it(folders, tmp_path):
    folder = with_config(folders["gpt2"], tmp_path / "theirs")
    short = ["train.length=2up", "batch.micro=2", "workload.data.samples=8", "workload.data.test_samples=4",
             "schedule.warmup=0", "valid.every=0", "checkpoint.every=1up", "log.report=false", "log.tensorboard=false",
             "engine.threads=1"]  # fmt: skip
    overrides = [f"workload.init_from={folder}", *DATA["gpt2"], *short, "--out", tmp_path / "run"]
    done = podium_here("train", "gpt2/quick", *overrides)
    assert done.returncode == 0, done.stderr
    before = Run(tmp_path / "run").summary()["weights_sha256"]
    (folder / "config.json").unlink()
    done = podium_here("resume", tmp_path / "run", "--checkpoint", "1")
    assert done.returncode == 0, done.stderr
    assert Run(tmp_path / "run").summary()["weights_sha256"] == before
