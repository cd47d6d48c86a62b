"""GPT-2: the network, its tokens, what it writes, and its weights in Hugging Face's form."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from podium.checkpoints import huggingface
from podium.data.source import empty_buffers
from podium.data.text.make import TextMake, make_text
from podium.errors import UserError
from podium.recipe.loading import load_recipe, shipped_recipes
from podium.runs.folder import Run
from podium.train import train
from podium.workloads.gpt2.generate import generate
from podium.workloads.gpt2.model import Gpt2
from podium.workloads.gpt2.section import Gpt2Data, Gpt2Model
from podium.workloads.gpt2.workload import Workload
from tests.support.processes import assert_user_error, podium_here
from tests.support.recipes import TINY

SMALL = {"layers": 2, "hidden": 32, "heads": 4, "context": 16}


pytestmark = pytest.mark.usefixtures("one_thread")


def network(vocabulary=50, seed=1, **model) -> Gpt2:
    torch.manual_seed(seed)
    return Gpt2(Gpt2Model(**{**SMALL, **model}), vocabulary)


def num_parameters(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


# --- the network ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "published"),
    [("small", 124_439_808), ("medium", 354_823_168), ("large", 774_030_080), ("xl", 1_557_611_200)],
)
def test_published_sizes_have_the_published_number_of_parameters(size, published):
    with torch.device("meta"):
        assert num_parameters(Gpt2(Gpt2Model(size=size), 50_257)) == published


@pytest.mark.slow
@pytest.mark.parametrize("size", ["small", "medium", "large", "xl"])
def test_published_sizes_have_as_many_parameters_as_those_of_hugging_face(size):
    transformers = pytest.importorskip("transformers", reason="in the test extra")
    with torch.device("meta"):
        ours = Gpt2(Gpt2Model(size=size), 50_257)
        layers, hidden, heads = ours.section.shape
        config = transformers.GPT2Config(n_layer=layers, n_embd=hidden, n_head=heads)
        assert num_parameters(ours) == num_parameters(transformers.GPT2LMHeadModel(config))


def test_weights_begin_as_published():
    model = network(vocabulary=400, hidden=128, layers=8, context=64)
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            assert not param.any()
        elif "norm" in name:
            assert (param == 1).all()
        else:
            last = name.endswith(("attention.out.weight", "feed_forward.out.weight"))
            assert param.std().item() == pytest.approx(0.02 / math.sqrt(16) if last else 0.02, rel=0.05), name
            assert abs(param.mean().item()) < 0.002


def test_a_token_changes_nothing_before_it():
    model = network().eval()
    one = torch.arange(16)[None] % 50
    two = one.clone()
    two[0, 9] = 40
    ours, theirs = model(one), model(two)
    assert torch.equal(ours[:, :9], theirs[:, :9])
    assert not torch.allclose(ours[:, 9:], theirs[:, 9:])


def test_filling_the_vocabulary_up_changes_no_prediction():
    plain, padded = network(vocabulary=50).eval(), network(vocabulary=50, pad_vocabulary_to=64).eval()
    assert padded.embedding.tokens.num_embeddings == 64
    state = {name: tensor for name, tensor in plain.state_dict().items() if tensor.shape[0] != 50}
    padded.load_state_dict(state, strict=False)
    with torch.no_grad():
        padded.embedding.tokens.weight[:50] = plain.embedding.tokens.weight
    tokens = torch.arange(32).reshape(2, 16)
    assert padded(tokens).shape == (2, 16, 50)
    torch.testing.assert_close(padded(tokens), plain(tokens))


def test_a_tied_head_is_one_parameter_with_the_embedding():
    tied, free = network(), network(tied=False)
    assert tied.head.out.weight is tied.embedding.tokens.weight
    assert num_parameters(free) == num_parameters(tied) + 50 * 32


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"size": "custom", "layers": 2}, "needs workload.model.hidden and workload.model.heads"),
        ({"size": "small", "layers": 2}, "layers does not apply to workload.model.size = small"),
        ({"layers": 2, "hidden": 30, "heads": 4}, "hidden = 30: expected a multiple of workload.model.heads = 4"),
    ],
)
def test_sizes_that_do_not_fit_together_are_told(model, message):
    with pytest.raises(ValueError, match=message):
        Gpt2Model(**model)


# --- the workload ---------------------------------------------------------------------------------------------------


def generated(**data) -> Workload:
    return Workload(Gpt2Model(**SMALL, vocabulary=50), Gpt2Data(source="generated", samples=40, **data))


def rows(source, samples):
    out = empty_buffers(source.fields, len(samples))
    source.gather(np.array(samples), out)
    return out["tokens"]


def test_the_loss_is_the_sum_over_tokens_of_minus_the_log_of_their_probability():
    workload = generated()
    model = workload.build_model().eval()
    batch = {"tokens": torch.from_numpy(rows(workload.source("train"), [0, 1, 2]))}
    loss = workload.loss(model, batch)
    tokens = batch["tokens"].long()
    shares = F.log_softmax(model(tokens[:, :-1]).double(), dim=-1)
    expected = -sum(shares[b, s, tokens[b, s + 1]] for b in range(3) for s in range(16))
    assert loss.count == 48
    assert loss.sum.item() == pytest.approx(expected.item(), rel=1e-6)
    right, count = loss.metrics["accuracy"]
    assert (right.item(), count) == ((shares.argmax(-1) == tokens[:, 1:]).sum().item(), 48)
    assert loss.sum.item() / 48 == pytest.approx(math.log(50), rel=0.05)
    assert workload.loss(model.train(), batch).metrics == {}


def test_generated_samples_depend_on_their_number_and_the_seed_alone():
    one, two = generated().source("train"), generated().source("train")
    together = rows(one, range(40))
    assert (rows(two, [7, 3]) == together[[7, 3]]).all()
    assert together.max() < 50
    assert (rows(generated(sample_seed=1).source("train"), range(40)) != together).any()
    assert (rows(generated().source("test"), range(40)) != rows(generated().source("valid"), range(40))).any()


def test_a_flat_file_is_divided_among_the_splits(tmp_path):
    np.arange(1000, dtype="<u2").tofile(tmp_path / "all.bin")
    data = Gpt2Data(source="files", path=tmp_path / "all.bin", held_out=0.1, stride=1, valid_stride=1)
    workload = Workload(Gpt2Model(**SMALL, vocabulary=1000), data)
    spans = {}
    for split in ("train", "valid", "test"):
        found = rows(workload.source(split), range(len(workload.source(split))))
        spans[split] = (found.min(), found.max())
    assert spans == {"train": (0, 799), "valid": (800, 899), "test": (900, 999)}


def test_a_folder_of_files_is_found_by_names(tmp_path):
    for name, first in {"train": 0, "val": 100}.items():
        np.arange(first, first + 100, dtype="<u4").tofile(tmp_path / f"{name}.bin")
    data = Gpt2Data(source="files", path=tmp_path, dtype="uint32", length=8)
    workload = Workload(Gpt2Model(**SMALL, vocabulary=200), data)
    assert rows(workload.source("train"), [1]).tolist() == [list(range(8, 17))]
    assert rows(workload.source("valid"), [0]).tolist() == [list(range(100, 109))]
    assert workload.example()["tokens"].shape == (2, 9)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"source": "files"}, "workload.data.path is missing"),
        ({"source": "files", "path": "nowhere"}, "no file of tokens nowhere.bin"),
        ({"source": "text", "path": "."}, "is not a folder of text"),
        ({"source": "generated", "length": 17}, "expected at most workload.model.context = 16"),
    ],
)
def test_data_that_cannot_be_had_is_told(data, message):
    with pytest.raises(UserError, match=message):
        Workload(Gpt2Model(**SMALL), Gpt2Data(**data)).source("train")


def test_stages_are_the_embedding_the_blocks_and_the_head_and_make_the_model():
    workload = generated()
    model = workload.build_model().eval()
    stages = workload.stages(model)
    assert [name for name, _ in stages] == ["embedding", "block 0", "block 1", "head"]
    x = tokens = torch.arange(32).reshape(2, 16)
    for _, stage in stages:
        x = stage(x)
    assert torch.equal(x, model(tokens))


# --- text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", [{}, {"scale_by_layer": True}, {"scale_attention": False}])
def test_kept_keys_and_values_give_what_the_whole_text_gives(scaling):
    model = network(**scaling).eval()
    with torch.no_grad():
        model.embedding.tokens.weight.mul_(20)
    (written,) = generate(model, [1, 2, 3], num_texts=1, num_tokens=13, temperature=0)
    text = torch.tensor([[1, 2, 3]])
    for _ in range(13):
        text = torch.cat([text, model(text)[:, -1:].argmax(-1)], dim=1)
    assert written == text[0, 3:].tolist()


def test_sampled_text_is_a_function_of_seed_and_number_also_beyond_the_context():
    model = network()
    settings = {"num_tokens": 40, "temperature": 1.3, "top_k": 20}
    texts = generate(model, [1], num_texts=3, seed=5, **settings)
    torch.manual_seed(99)
    assert generate(model, [1], num_texts=3, seed=5, **settings) == texts
    assert generate(model, [1], num_texts=2, seed=5, **settings) == texts[:2]
    assert generate(model, [1], num_texts=3, seed=6, **settings) != texts
    assert len({tuple(text) for text in texts}) == 3
    assert all(len(text) == 40 for text in texts)
    assert model.training


def test_tokens_are_drawn_as_often_as_the_model_expects_them():
    model = network(vocabulary=5, hidden=8, heads=1)
    with torch.no_grad():
        model.embedding.tokens.weight.mul_(40)
    drawn = generate(model, [1], num_texts=4000, num_tokens=1)
    shares = torch.softmax(model.eval()(torch.tensor([[1]]))[0, 0].double(), 0)
    found = np.bincount([text[0] for text in drawn], minlength=5) / 4000
    assert found == pytest.approx(shares.tolist(), abs=0.03)
    assert shares.max() > 0.3
    best = set(shares.topk(2).indices.tolist())
    assert {text[0] for text in generate(model, [1], num_texts=200, num_tokens=1, top_k=2)} == best


def test_texts_end_where_a_document_does():
    model = network(vocabulary=5)
    whole = generate(model, [1], num_texts=4, num_tokens=30)
    ended = generate(model, [1], num_texts=4, num_tokens=30, end=2)
    assert any(2 in text for text in whole)
    for long, short in zip(whole, ended, strict=True):
        assert short == (long[: long.index(2)] if 2 in long else long)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Run:
    """A model that has learnt a text by heart."""
    folder = tmp_path_factory.mktemp("gpt2")
    (folder / "counting.py").write_text("one two three four\nfive six seven eight\n" * 200)
    make_text(TextMake(out=folder / "text", input=folder / "counting.py", tokenizer="char"))
    overrides = [f"workload.data.path={folder / 'text'}", "workload.data.vocabulary=null", "batch.micro=16"]
    overrides += ["workload.data.stride=7"]  # else a place in the window gives the phase of the text away
    overrides += ["workload.model.layers=2", "workload.model.hidden=32", "workload.model.context=24"]
    overrides += ["optim.lr=1e-2", "train.length=200up", "log.tensorboard=false", "engine.threads=1", "valid.every=0"]
    overrides += ["workload.data.sample.tokens=40", "workload.data.sample.texts=1", "checkpoint.every=0"]
    overrides += ["workload.data.sample.temperature=0", "workload.data.sample.prompt=one "]
    return train(load_recipe("gpt2/quick", overrides), folder / "run")


def test_a_trained_model_writes_what_it_has_learnt(trained):
    assert trained.summary()["valid"]["last"]["loss"] < 0.5
    assert (trained.pictures / "samples.txt").read_text().startswith("one two three four\nfive six seven eight\n")
    kept = json.loads((trained.pictures / "prediction.json").read_text())
    rows = dict(kept["tables"][0]["rows"])
    assert float(rows["perplexity"]) == pytest.approx(math.exp(float(rows["loss"])), rel=0.01)
    assert 'class="text"' in trained.report_file.read_text()


def test_predict_takes_settings_of_its_own(trained):
    done = podium_here("predict", trained.path, "workload.data.sample.prompt=five ", "workload.data.sample.tokens=9")
    assert done.returncode == 0, done.stderr
    assert (trained.pictures / "samples.txt").read_text() == "five six seven\n"
    assert "perplexity" in done.stdout
    assert "five six seven" in done.stdout
    assert_user_error(podium_here("predict", trained.path, "optim.lr=1"), "optim.lr cannot be changed after training")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["16.16", "16.32"])
def test_half_precision_and_recomputation_leave_prediction_and_export_working(mode, tmp_path):
    extra = [f"precision={mode}", "parallel.recompute=true", "log.report=true", "train.length=5up"]
    run = train(load_recipe(TINY["gpt2"][0], [*TINY["gpt2"][1:], *extra]), tmp_path / "run")
    assert len((run.pictures / "samples.txt").read_text().split()) >= 60
    assert podium_here("export", run.path).returncode == 0
    assert (run.path / "huggingface" / "model.safetensors").is_file()


# --- Hugging Face ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_weights_go_to_hugging_face_and_back(tied, tmp_path):
    transformers = pytest.importorskip("transformers", reason="in the test extra")
    workload = Workload(Gpt2Model(**SMALL, vocabulary=50, pad_vocabulary_to=8, tied=tied), Gpt2Data(source="generated"))
    torch.manual_seed(1)
    model = workload.build_model().eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    files = huggingface.export(workload, model, "gpt2", tmp_path / "out")
    assert [path.name for path in files] == ["config.json", "model.safetensors"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(theirs).__name__ == "GPT2LMHeadModel"
    tokens = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
        for param in theirs.parameters():
            param.add_(0.1 * torch.randn_like(param))
        theirs.save_pretrained(tmp_path / "theirs")
        huggingface.start_from(workload.from_huggingface, model, tmp_path / "theirs")
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)


def test_weights_of_another_model_are_refused(tmp_path):
    workload = generated()
    huggingface.export(workload, workload.build_model(), "gpt2", tmp_path / "out")

    def refused(**model):
        other = Workload(Gpt2Model(**{**SMALL, "vocabulary": 50, **model}), Gpt2Data(source="generated"))
        with pytest.raises(UserError) as told:
            huggingface.start_from(other.from_huggingface, other.build_model(), tmp_path / "out")
        return str(told.value)

    assert "layers = 3" in refused(layers=3)
    assert "vocabulary = 60" in refused(vocabulary=60)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    assert "the weights of a bert model, not of gpt2" in refused()
    (tmp_path / "out" / "config.json").write_text(json.dumps({**config, "activation_function": "relu"}))
    assert "activation_function = relu" in refused()
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    (tmp_path / "out" / "model.safetensors").write_bytes(b"nothing")
    assert "model.safetensors cannot be read" in refused()
    (tmp_path / "out" / "model.safetensors").unlink()
    assert "no file model.safetensors" in refused()


def test_export_and_init_from_join_two_trainings(trained, tmp_path):
    done = podium_here("export", trained.path, "--format", "huggingface", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert_user_error(podium_here("export", trained.path, "--out", tmp_path / "out"), "already exists")
    assert_user_error(podium_here("export", trained.path, "--format", "pickle"), "expected one of")
    tree = tmp_path / "again.yaml"
    tree.write_text(trained.recipe_file.read_text())
    start = [f"workload.init_from={tmp_path / 'out'}", "optim.lr=1e-9", "train.length=1up", "log.report=false"]
    again = train(load_recipe(str(tree), start), tmp_path / "again")
    loss = trained.summary()["valid"]["last"]["loss"]
    assert again.summary()["valid"]["last"]["loss"] == pytest.approx(loss, rel=1e-4)
    bad = podium_here("train", tree, f"workload.init_from={tmp_path}", "--out", tmp_path / "bad")
    assert_user_error(bad, "expected a run, a checkpoint, a safetensors file or a folder in Hugging Face's format")
    assert not (tmp_path / "bad").exists()


def test_every_recipe_can_be_read():
    names = [name for name, _ in shipped_recipes() if name.startswith("gpt2/")]
    assert set(names) >= {f"gpt2/{name}" for name in ("small", "medium", "large", "xl", "quick", "char")}
    for name in names:
        load_recipe(name)
