"""BERT: the model against Hugging Face's, packing, the loss; rows have tests of their own."""

import numpy as np
import pytest
import torch
from torch import nn

from podium.checkpoints.huggingface import export, start_from
from podium.data.source import empty_buffers
from podium.engine.losses import PendingLosses
from podium.errors import UserError
from podium.optim.optimisers import build_optimiser
from podium.recipe.loading import load_recipe
from podium.recipe.sections.optim import OptimSection
from podium.training.build import build_training
from podium.workloads.bert import huggingface, predict
from podium.workloads.bert.corpus import SPECIAL
from podium.workloads.bert.model import Bert
from podium.workloads.bert.section import BertData, BertModel
from podium.workloads.bert.workload import Workload
from tests.support.recipes import TINY
from tests.support.texts import write_text

SMALL = {"size": "custom", "layers": 2, "hidden": 32, "heads": 4, "vocabulary": 60, "max_positions": 40}


def small_workload(**data) -> Workload:
    plain = {"dropout": 0.0, "attention_dropout": 0.0}
    return Workload(
        BertModel(**SMALL, **plain), BertData(**{"source": "generated", "length": 40, "samples": 64, **data})
    )


def small_model(workload: Workload, seed=1) -> nn.Module:
    torch.manual_seed(seed)
    model = workload.build_model()
    for param in model.parameters():  # biases and norms that make a difference
        nn.init.normal_(param, 0.5 if param.dim() == 1 else 0.0, 0.2)
    return model


def batch_of(workload: Workload, num=16, split="train") -> dict[str, torch.Tensor]:
    source = workload.source(split)
    out = empty_buffers(source.fields, num)
    source.gather(np.arange(num), out)
    return {name: torch.from_numpy(rows) for name, rows in out.items()}


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "published"), [("base", 110_106_428), ("large", 336_226_108)])
def test_published_sizes_have_as_many_parameters_as_those_of_hugging_face(size, published):
    with torch.device("meta"):
        model = Bert(BertModel(size=size), 30_522)
    assert sum(param.numel() for param in model.parameters()) == published


def reference(model: Bert):
    transformers = pytest.importorskip("transformers", reason="in the test extra")
    config, tensors = huggingface.to_huggingface(model)
    config = transformers.BertConfig(**{key: value for key, value in config.items() if key != "architectures"})
    theirs = transformers.BertForPreTraining(config).eval()
    missing, unexpected = theirs.load_state_dict(tensors, strict=False)
    assert not unexpected
    tied = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert set(missing) <= (tied if model.section.tied else set())
    theirs.tie_weights()
    if model.section.tied:
        assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in model.parameters())
    return theirs


@pytest.mark.parametrize("tied", [True, False])
def test_both_logits_are_those_of_hugging_face_with_the_same_weights(tied):
    workload = small_workload(short_share=0.5)
    torch.manual_seed(0)
    model = Bert(BertModel(**SMALL, tied=tied), 60).eval()
    for param in model.parameters():
        nn.init.normal_(param, 0.3 if param.dim() == 1 else 0.0, 0.2)
    theirs = reference(model)
    batch = batch_of(workload)
    assert (batch["sequence"] == 0).any()
    with torch.no_grad():
        words, pairs = model(*workload.inputs(batch))
        expected = theirs(
            input_ids=batch["tokens"].long(),
            attention_mask=batch["sequence"].long(),
            token_type_ids=batch["segment"].long(),
        )
    rows = torch.arange(len(words))[:, None]
    torch.testing.assert_close(words, expected.prediction_logits[rows, batch["masked"].long()], rtol=0, atol=1e-4)
    torch.testing.assert_close(pairs[:, 0], expected.seq_relationship_logits, rtol=0, atol=1e-4)


def test_weights_come_back_from_their_names_at_hugging_face():
    workload = small_workload()
    one, other = small_model(workload, 1), small_model(workload, 2)
    config, tensors = workload.to_huggingface(one)
    assert config["architectures"] == ["BertForPreTraining"]
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor for name, tensor in tensors.items()}
    workload.from_huggingface(other, config, old)
    for name, tensor in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gpt2"}, "model type 'gpt2', expected 'bert'"),
        ({"num_hidden_layers": 3}, "num_hidden_layers = 3.*set workload.model.layers"),
        ({"layer_norm_eps": 1e-5}, "set workload.model.norm_eps"),
        ({"hidden_act": "relu"}, "hidden_act = relu"),
    ],
)
def test_weights_that_do_not_fit_are_told_and_change_nothing(change, said):
    workload = small_workload()
    model = small_model(workload)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config, tensors = workload.to_huggingface(small_model(workload, 2))
    with pytest.raises(UserError, match=said):
        workload.from_huggingface(model, {**config, **change}, tensors)
    with pytest.raises(UserError, match=r"has no tensor bert\.pooler\.dense\.weight"):
        workload.from_huggingface(
            model, config, {name: tensor for name, tensor in tensors.items() if "pooler" not in name}
        )
    with pytest.raises(UserError, match=r"word_embeddings.weight is \[10, 32\]"):
        workload.from_huggingface(
            model, config, {name: t[:10] if "word_embeddings" in name else t for name, t in tensors.items()}
        )
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_running_the_stages_one_after_another_is_the_forward_pass():
    workload = small_workload()
    model = small_model(workload).eval()
    stages = workload.stages(model)
    assert [name for name, _ in stages] == ["Embedding", "Encoder 0", "Encoder 1", "Pooler", "Classifier"]
    batch = batch_of(workload)
    with torch.no_grad():
        passed = workload.inputs(batch)
        for _, stage in stages:
            passed = stage(*passed)
        for ours, theirs in zip(passed, model(*workload.inputs(batch)), strict=True):
            assert torch.equal(ours, theirs)


def test_the_tied_weight_is_kept_once_and_learns_from_both_of_its_uses():
    workload = small_workload()
    model = small_model(workload)
    assert sum("word" in name or name == "classifier.weight" for name in model.state_dict()) == 1
    batch = batch_of(workload)
    workload.loss(model, batch).sum.backward()
    unseen = sorted(set(range(60)) - set(batch["tokens"].flatten().tolist()))
    assert model.embedding.word.weight.grad.abs().sum() > 0
    assert not unseen or model.embedding.word.weight.grad[unseen].abs().min() > 0  # by the head alone


def test_lamb_leaves_biases_alone_and_decays_no_norm():
    workload = small_workload()
    model = small_model(workload)
    optimiser = build_optimiser(
        OptimSection(name="lamb", lr=0.1, bias_correction=False), model, workload.param_groups(model)
    )
    treated = {param: (group["weight_decay"] > 0, group["adapt"]) for group in optimiser.param_groups
               for param in group["params"]}  # fmt: skip
    for name, param in model.named_parameters():
        expected = (False, False) if name.endswith("bias") else (param.dim() > 1, True)
        assert treated[param] == expected, name


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["workload.model.size=large", "workload.model.layers=2"],
            "layers = 2: expected 24 with workload.model.size = large; custom takes any number",
        ),
        (["workload.model.heads=3"], "hidden = 128: expected a multiple of workload.model.heads = 3"),
        (["workload.model.layers=null"], "size = custom needs workload.model.layers"),
        (["workload.data.source=tfrecord", "workload.data.packed=true"], "packed = true: expected false"),
        (
            ["workload.data.source=generated", "workload.data.path=x"],
            "path does not apply to workload.data.source",
        ),
    ],
)
def test_what_contradicts_is_told(overrides, said):
    with pytest.raises(UserError, match=said):
        load_recipe("bert/quick", overrides)


def test_rows_longer_than_the_model_and_small_vocabularies_are_told():
    with pytest.raises(UserError, match=r"length = 64: expected at most workload\.model\.max_positions = 40"):
        small_workload(length=64)
    with pytest.raises(UserError, match="vocabulary = 5: expected at least the 6"):
        Workload(BertModel(**{**SMALL, "vocabulary": 5}), BertData(source="generated", length=40)).build_model()


# --- packing and the loss ---------------------------------------------------------------------------------------------


def unpacked(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same sequences, each in a row of its own."""
    rows = []
    length, num_slots = batch["tokens"].shape[1], batch["target"].shape[1]
    for row in range(len(batch["tokens"])):
        numbers = batch["sequence"][row]
        for number in range(1, int(numbers.max()) + 1):
            inside = (numbers == number).nonzero().flatten()
            start, size = int(inside[0]), len(inside)
            new = {name: torch.zeros(length, dtype=batch[name].dtype) for name in ("tokens", "segment", "position")}
            for name, tensor in new.items():
                tensor[:size] = batch[name][row, inside]
            new["sequence"] = (torch.arange(length) < size).to(torch.uint8)
            masked, target = batch["masked"][row].long(), batch["target"][row]
            own = (target >= 0) & (numbers[masked] == number)
            new["masked"] = torch.zeros(num_slots, dtype=torch.int32)
            new["target"] = torch.full((num_slots,), -1)
            new["masked"][: own.sum()] = (masked[own] - start).int()
            new["target"][: own.sum()] = target[own]
            new["first"] = torch.zeros(1, dtype=torch.int32)
            new["follows"] = batch["follows"][row, number - 1 : number]
            rows.append(new)
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def test_packed_rows_have_the_losses_and_gradients_of_single_ones():
    workload = small_workload(packed=True, short_share=0.9)
    packed = batch_of(workload, 12)
    single = unpacked(packed)
    assert len(single["tokens"]) > 14
    found = []
    for batch in (packed, single):
        model = small_model(workload)
        loss = workload.loss(model, batch)
        (loss.sum / loss.count).backward()
        metrics = workload.loss(model.eval(), batch).metrics
        found.append((loss, metrics, {name: param.grad for name, param in model.named_parameters()}))
    (one, one_metrics, one_grads), (two, two_metrics, two_grads) = found
    assert one.count == two.count
    assert one.sum.item() == pytest.approx(two.sum.item(), rel=1e-5)
    for name, (total, count) in one_metrics.items():
        assert count == two_metrics[name][1]
        assert total.item() == pytest.approx(two_metrics[name][0].item(), rel=1e-5)
    for name, grad in one_grads.items():
        torch.testing.assert_close(grad, two_grads[name], rtol=1e-4, atol=1e-5)


def test_the_loss_is_mean_plus_mean_where_all_sequences_have_as_many_masks():
    workload = small_workload(short_share=0.0)
    model = small_model(workload).eval()
    batch = batch_of(workload)
    assert len(set((batch["target"] >= 0).sum(1).tolist())) == 1
    with torch.no_grad():
        loss = workload.loss(model, batch)
        words, pairs = model(*workload.inputs(batch))
    word, pair = torch.log_softmax(words.double(), -1), torch.log_softmax(pairs.double(), -1)
    target, follows = batch["target"], batch["follows"]
    used = target >= 0
    mlm = -word[used].gather(1, target[used][:, None]).mean()
    nsp = -pair[:, 0].gather(1, follows).mean()
    assert float(loss.sum) / loss.count == pytest.approx(float(mlm + nsp), rel=1e-5)
    sums = PendingLosses()
    sums.add(loss)
    means = sums.collect().means()
    assert means["mlm_loss"] == pytest.approx(float(mlm), rel=1e-5)
    assert means["nsp_loss"] == pytest.approx(float(nsp), rel=1e-5)
    assert means["mlm_accuracy"] == pytest.approx(float((word.argmax(-1)[used] == target[used]).double().mean()))
    assert means["nsp_accuracy"] == pytest.approx(float((pair[:, 0].argmax(-1) == follows[:, 0]).double().mean()))


def test_parts_of_uneven_counts_add_up_to_the_loss_of_the_whole():
    workload = small_workload(packed=True, short_share=0.7)
    model = small_model(workload).eval()
    batch = batch_of(workload)
    with torch.no_grad():
        whole = workload.loss(model, batch)
        parts = [
            workload.loss(model, {name: rows[start : start + 4] for name, rows in batch.items()})
            for start in range(0, 16, 4)
        ]
    assert len({part.count for part in parts}) > 1
    assert sum(part.count for part in parts) == whole.count
    assert float(sum(part.sum for part in parts)) == pytest.approx(float(whole.sum), rel=1e-6)
    for name, (total, count) in whole.metrics.items():
        assert sum(part.metrics[name][1] for part in parts) == count
        assert float(sum(part.metrics[name][0] for part in parts)) == pytest.approx(float(total), rel=1e-5)


def test_a_random_model_knows_nothing():
    workload = Workload(BertModel(**{**SMALL, "vocabulary": None}), BertData(source="generated", length=40))
    torch.manual_seed(0)
    model = workload.build_model().eval()
    with torch.no_grad():
        metrics = workload.loss(model, workload.example(8)).metrics
    assert float(metrics["mlm_loss"][0]) / metrics["mlm_loss"][1] == pytest.approx(np.log(30_522), rel=0.01)
    assert float(metrics["nsp_loss"][0]) / metrics["nsp_loss"][1] == pytest.approx(np.log(2), rel=0.1)


def test_an_exported_model_is_read_by_hugging_face_and_gives_the_same(tmp_path):
    transformers = pytest.importorskip("transformers", reason="in the test extra")
    workload = small_workload()
    model = small_model(workload).eval()
    export(workload, model, "bert", tmp_path / "out")
    theirs = transformers.BertForPreTraining.from_pretrained(tmp_path / "out").eval()
    batch = batch_of(workload, 4)
    with torch.no_grad():
        words, _ = model(*workload.inputs(batch))
        expected = theirs(input_ids=batch["tokens"].long(), attention_mask=batch["sequence"].long(),
                          token_type_ids=batch["segment"].long()).prediction_logits  # fmt: skip
    rows = torch.arange(4)[:, None]
    torch.testing.assert_close(words, expected[rows, batch["masked"].long()], rtol=0, atol=1e-4)
    again = small_model(workload, 2)
    start_from(workload.from_huggingface, again, tmp_path / "out")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


# --- after training ---------------------------------------------------------------------------------------------------


class Words:
    """Names tokens, as a tokenizer does."""

    def id_to_token(self, token: int) -> str:
        special = {number: name for name, number in SPECIAL.items()}
        return special.get(token, f"##{token}" if token % 7 == 0 else f"w{token}")

    def token_to_id(self, name: str) -> int:
        return SPECIAL[name]


@pytest.mark.parametrize("tokenizer", [Words(), None])
def test_prediction_counts_and_names_the_words(tokenizer, tmp_path):
    workload = small_workload(packed=True)
    batch = batch_of(workload, 20)
    target = batch["target"]
    # Right at every second mask, and with the second guess at the others.
    best = torch.where(torch.arange(target.shape[1]) % 2 == 0, target.clamp(min=0), (target.clamp(min=0) + 1) % 60)
    logits = torch.nn.functional.one_hot(best, 60) * 9.0 + torch.nn.functional.one_hot(target.clamp(min=0), 60) * 5.0
    pairs = torch.nn.functional.one_hot(batch["follows"].clamp(min=0), 2).float()
    got = {name: tensor.numpy() for name, tensor in predict.best_words((logits, pairs)).items()}
    prediction = predict.predict({name: rows.numpy() for name, rows in batch.items()}, got, tokenizer, tmp_path)
    examples, summary = prediction.tables
    used = target >= 0
    right = 100 * float((used & (torch.arange(target.shape[1]) % 2 == 0)).sum() / used.sum())
    assert summary.rows[0] == ["best guess", f"{right:.1f} %"]
    assert summary.rows[1] == ["among the best 3", "100.0 %"]
    assert summary.rows[-1] == ["next sentence or not", "100.0 %"]
    assert len(examples.rows) > 5
    for text, word, guesses in examples.rows:
        assert "▁▁▁" in text
        assert "[" not in text
        assert any(guess.startswith(f"{word} ") for guess in guesses.split(", "))
    assert all(picture.path.stat().st_size > 1000 for picture in prediction.pictures)


@pytest.mark.slow
def test_every_shipped_recipe_trains_an_update_on_generated_tokens():
    """At a size that fits: two layers, one small micro-batch."""
    from podium.recipe.shipped import shipped_recipes
    from podium.training.feeding import build_engine

    names = [name for name, _ in shipped_recipes() if name.startswith("bert/")]
    assert len(names) == 16
    small = ["workload.data.source=generated", "workload.data.path=null", "workload.data.samples=16",
             "workload.model.size=custom", "workload.model.layers=2", "workload.model.hidden=64",
             "workload.model.heads=4", "batch.micro=2", "batch.accumulation=1", "batch.replicas=2",
             "train.length=1up", "engine.threads=1", "precision.half=bf16", "schedule.warmup=0"]  # fmt: skip
    for name in names:
        training = build_training(load_recipe(name, small))
        samples = {
            field: rows.view(2, 1, 2, *rows.shape[1:]) for field, rows in training.task.workload.example(4).items()
        }
        engine = build_engine(training)
        engine.update(0, samples, 1e-3)
        assert np.isfinite(engine.collect().means()["loss"])


@pytest.mark.slow
def test_a_small_model_learns_from_text(tmp_path):
    """Words that follow from their neighbours, and documents with words of their own: both heads have to learn."""
    from podium.train import train

    write_text(tmp_path / "text", num_documents=40, regular=True)
    recipe = load_recipe(TINY["bert"][0], [
        *TINY["bert"][1:], "workload.data.source=text", f"workload.data.path={tmp_path / 'text'}",
        "workload.model.vocabulary=null", "workload.data.redraw=pairs", "workload.model.dropout=0",
        "workload.model.attention_dropout=0", "workload.model.hidden=64", "batch.micro=16", "train.length=500up",
        "valid.every=0",
    ])  # fmt: skip
    valid = train(recipe, tmp_path / "run").summary()["valid"]["last"]
    assert valid["mlm_accuracy"] > 0.22  # 1/24 by chance, 1/6 once the kind of document is seen
    assert valid["nsp_accuracy"] > 0.75
