"""Rows for BERT: pairs, masks, packing, the published files."""

import dataclasses

import numpy as np
import pytest

from podium.data.formats.tfrecord import build_example, write_records
from podium.data.source import empty_buffers
from podium.data.text.folder import open_text
from podium.errors import UserError
from podium.workloads.bert.corpus import SPECIAL, open_corpus, random_corpus
from podium.workloads.bert.section import BertData, BertModel
from podium.workloads.bert.text_rows import Layout, TextRows
from podium.workloads.bert.workload import Workload
from tests.support.texts import NUM_DOCUMENTS, write_text

CLS, SEP, MASK = SPECIAL["[CLS]"], SPECIAL["[SEP]"], SPECIAL["[MASK]"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return open_text(write_text(tmp_path_factory.mktemp("text") / "folder"))


def rows_of(text, layout=None, split="train", **options) -> TextRows:
    return TextRows(open_corpus(text, split), layout or Layout(64), split, **options)


def gathered(source, samples, places=None) -> dict[str, np.ndarray]:
    samples = np.asarray(samples)
    out = empty_buffers(source.fields, len(samples))
    for rows in out.values():
        rows.view(np.uint8)[...] = 99  # what a buffer held before must not show
    source.gather(samples, out, None if places is None else np.asarray(places))
    return out


def whole(rows: dict[str, np.ndarray]) -> np.ndarray:
    """The tokens before anything was hidden."""
    tokens = rows["tokens"].copy()
    row, slot = np.nonzero(rows["target"] >= 0)
    tokens[row, rows["masked"][row, slot]] = rows["target"][row, slot]
    return tokens


LAYOUTS = [Layout(64), Layout(64, 3), Layout(128, 3), Layout(8)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_sequences_are_what_they_should_be(text, layout):
    source = rows_of(text, layout, short_share=0.3, num_rows=300)
    rows = gathered(source, np.arange(300))
    tokens = whole(rows)
    seen = {0: 0, 1: 0}
    for row in range(300):
        numbers = rows["sequence"][row]
        num = int(numbers.max())
        used = int((numbers > 0).sum())
        assert 1 <= num <= layout.max_sequences
        assert (numbers[:used] > 0).all()
        assert (np.diff(numbers[:used].astype(int)) >= 0).all()
        assert (tokens[row, used:] == 0).all()
        assert (rows["follows"][row, num:] == -1).all()
        for number in range(1, num + 1):
            inside = np.flatnonzero(numbers == number)
            assert rows["first"][row, number - 1] == inside[0]
            assert np.array_equal(rows["position"][row, inside], np.arange(len(inside)))
            sequence, segment = tokens[row, inside], rows["segment"][row, inside]
            assert sequence[0] == CLS
            (middle, last) = np.flatnonzero(sequence == SEP)
            assert last == len(sequence) - 1
            assert np.array_equal(segment, np.arange(len(sequence)) > middle)
            a, b = sequence[1:middle], sequence[middle + 1 : last]
            assert min(len(a), len(b)) >= 1
            documents = [set(((part - 5) // 50).tolist()) for part in (a, b)]
            assert all(len(document) == 1 for document in documents)
            follows = int(rows["follows"][row, number - 1])
            seen[follows] += 1
            assert (documents[0] == documents[1]) == (follows == 0)
            for part in (a, b):  # as they stand in the text, one after the other
                assert ((np.diff(part) == 1) | (np.diff(part) == -49)).all()
            if follows == 0:
                assert b[0] - a[-1] in (1, -49)
    assert 0.4 < seen[1] / sum(seen.values()) < 0.6


@pytest.mark.parametrize("length", [8, 16, 32, 128])
def test_half_of_the_pairs_follow_each_other_whatever_the_length_of_rows(length):
    """Rows of 16 tokens rarely hold two sentences of 8 to 40: 97 % of the windows would have to pair at random."""
    rows = gathered(TextRows(random_corpus(1000, 0, "train"), Layout(length), "train", num_rows=4000), np.arange(4000))
    assert rows["follows"].mean() == pytest.approx(0.5, abs=0.02)


def test_documents_of_one_sentence_make_random_pairs_only():
    corpus = random_corpus(1000, 0, "train")
    documents = np.arange(len(corpus.sentences))
    single = TextRows(dataclasses.replace(corpus, documents=documents), Layout(32), "train", num_rows=50)
    assert (gathered(single, np.arange(50))["follows"] == 1).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_masks_hide_what_they_should(text, layout):
    source = rows_of(text, layout, short_share=0.3)
    rows = gathered(source, np.arange(400) % len(source), np.arange(400))
    plain, used = whole(rows), rows["target"] >= 0
    for row in range(400):
        places = rows["masked"][row][used[row]]
        assert len(set(places.tolist())) == len(places)
        assert not np.isin(plain[row, places], [CLS, SEP]).any()
        assert (rows["masked"][row][~used[row]] == 0).all()
        owners = rows["sequence"][row, places]
        for number in range(1, int(rows["sequence"][row].max()) + 1):
            length = int((rows["sequence"][row] == number).sum())
            assert (owners == number).sum() == max(1, round(0.15 * length)) or used[row].all()
    # what is not chosen is as it was
    changed = rows["tokens"] != plain
    chosen = np.zeros_like(changed)
    row, slot = np.nonzero(used)
    chosen[row, rows["masked"][row, slot]] = True
    assert not (changed & ~chosen).any()


def test_eight_of_ten_are_masked_one_is_another_word_and_one_stays():
    source = TextRows(random_corpus(1000, 0, "train"), Layout(128), "train", num_rows=4000)
    rows = gathered(source, np.arange(4000))
    row, slot = np.nonzero(rows["target"] >= 0)
    shown, target = rows["tokens"][row, rows["masked"][row, slot]], rows["target"][row, slot]
    masked, same = (shown == MASK).mean(), (shown == target).mean()
    assert masked == pytest.approx(0.8, abs=0.01)
    assert same == pytest.approx(0.1, abs=0.01)
    other = shown[(shown != MASK) & (shown != target)]
    assert other.min() >= len(SPECIAL)
    assert len(set(other.tolist())) > 900
    # any place of a row is as likely as any other
    places = np.bincount(rows["masked"][row, slot], minlength=128)[5:120]
    assert places.std() / places.mean() < 0.1


def test_published_rows_have_the_published_numbers_of_slots():
    assert Layout(128).num_slots == 20
    assert Layout(512).num_slots == 76
    assert Layout(128, 3).num_slots == 22
    assert Layout(256).num_slots == 39
    assert Layout(128, slots=30).num_slots == 30


def test_a_tenth_of_the_sequences_is_short(text):
    long = random_corpus(1000, 0, "train")
    rows = gathered(TextRows(long, Layout(128), "train", num_rows=3000), np.arange(3000))
    lengths = (rows["sequence"] > 0).sum(axis=1)
    assert 0.07 < (lengths < 128).mean() < 0.13
    assert lengths[lengths < 128].mean() == pytest.approx(66, abs=8)
    full = gathered(TextRows(long, Layout(128), "train", num_rows=500, short_share=0), np.arange(500))
    assert (full["sequence"] > 0).mean() > 0.99  # a first part that was cut short may come to its document's end


def test_packed_rows_are_full_where_single_ones_are_not(text):
    single, packed = (
        gathered(rows_of(text, Layout(128, most), short_share=0.5), np.arange(len(rows_of(text, Layout(128)))))
        for most in (1, 3)
    )
    assert (single["sequence"] > 0).mean() < 0.8
    assert (packed["sequence"] > 0).mean() > 0.95
    assert (packed["follows"] >= 0).sum(axis=1).max() == 3


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_a_row_depends_on_its_number_its_place_and_the_seed_alone(text, layout):
    source = rows_of(text, layout)
    samples, places = np.arange(40), np.arange(40) + 1000
    some = np.array([30, 3, 17])
    rows, again = gathered(source, samples, places), gathered(source, some, some + 1000)
    for name, values in rows.items():
        assert np.array_equal(values[some], again[name]), name
    assert not np.array_equal(gathered(rows_of(text, layout, seed=1), some)["tokens"], gathered(source, some)["tokens"])
    valid = gathered(rows_of(text, layout, "valid"), some)
    assert not np.array_equal(valid["masked"], gathered(source, some)["masked"])


@pytest.mark.parametrize("redraw", ["masks", "pairs", "none"])
def test_every_epoch_draws_anew_what_it_should(text, redraw):
    source = rows_of(text, redraw=redraw)
    samples = np.arange(40)
    first, second = (gathered(source, samples, samples + 40 * epoch) for epoch in (0, 1))
    assert np.array_equal(first["masked"], second["masked"]) == (redraw == "none")
    assert np.array_equal(whole(first), whole(second)) == (redraw != "pairs")
    valid = [gathered(source, samples) for _ in range(2)]
    assert all(np.array_equal(valid[0][name], valid[1][name]) for name in valid[0])


def test_rows_go_through_all_of_the_text(text):
    source = rows_of(text, Layout(64), short_share=0)
    tokens = whole(gathered(source, np.arange(len(source))))
    assert len(source) == len(source.corpus.tokens) // 61
    share = np.isin(np.arange(5, source.corpus.vocabulary), tokens).mean()
    assert share > 0.99
    few = rows_of(text, Layout(64), max_rows=24)
    assert len(few) == 24
    documents = {int(row[1] - 5) // 50 for row in whole(gathered(few, np.arange(24)))}
    assert len(documents) == NUM_DOCUMENTS


def test_what_is_wrong_with_text_is_told(tmp_path):
    folder = write_text(tmp_path / "one", num_documents=1)
    with pytest.raises(UserError, match="fewer than two documents"):
        open_corpus(open_text(folder), "train")
    folder = write_text(tmp_path / "bpe", special={"<|endoftext|>": 0})
    with pytest.raises(UserError, match="tokenizer=wordpiece"):
        open_corpus(open_text(folder), "train")
    folder = write_text(tmp_path / "damaged")
    sentences = np.load(folder / "train.sentences.npy")
    sentences[3] = sentences[5]
    np.save(folder / "train.sentences.npy", sentences)
    with pytest.raises(UserError, match=r"train\.sentences\.npy is damaged"):
        open_corpus(open_text(folder), "train")
    model = BertModel(vocabulary=100)
    with pytest.raises(UserError, match="vocabulary = 100: expected at least the 605"):
        Workload(model, BertData(path=folder)).build_model()


# --- the published files ----------------------------------------------------------------------------------------------


def published(rows: dict[str, np.ndarray], row: int) -> bytes:
    target = rows["target"][row]
    return build_example(
        {
            "input_ids": rows["tokens"][row].tolist(),
            "input_mask": rows["sequence"][row].tolist(),
            "segment_ids": rows["segment"][row].tolist(),
            "masked_lm_positions": rows["masked"][row].tolist(),
            "masked_lm_ids": np.maximum(target, 0).tolist(),
            "masked_lm_weights": [float(value >= 0) for value in target],
            "next_sentence_labels": rows["follows"][row].tolist(),
        }
    )


def test_published_files_give_the_rows_they_hold(text, tmp_path):
    rows = gathered(rows_of(text, Layout(64), short_share=0.5), np.arange(60))
    for number, part in enumerate((range(25), range(25, 60))):
        write_records(tmp_path / f"wiki_{number}.tfrecord", [published(rows, row) for row in part])
    workload = Workload(BertModel(), BertData(source="tfrecord", path=tmp_path, length=64))
    train, valid = workload.source("train"), workload.source("valid")
    assert (len(train), len(valid)) == (57, 3)
    some = np.array([40, 3, 24, 25])
    found = gathered(train, some, some + 1000)
    expected = {name: values[some] for name, values in rows.items()}
    inside = expected["sequence"] > 0
    assert np.array_equal(found.pop("position")[inside], expected.pop("position")[inside])
    for name, values in found.items():
        assert np.array_equal(values, expected[name]), name
    assert np.array_equal(gathered(valid, np.arange(3))["tokens"], rows["tokens"][57:])


def test_what_is_wrong_with_published_files_is_told(text, tmp_path):
    def rows(**data):
        model = BertModel(vocabulary=data.pop("vocabulary", None))
        workload = Workload(model, BertData(source="tfrecord", length=64, **data))
        return gathered(workload.source("train"), np.arange(2))

    with pytest.raises(UserError, match=r"workload.data.path is missing"):
        rows()
    with pytest.raises(UserError, match=r"no files that end in \.tfrecord"):
        rows(path=tmp_path)
    good = gathered(rows_of(text, Layout(64)), np.arange(4))
    file = tmp_path / "a.tfrecord"
    write_records(file, [published(good, row) for row in range(4)])
    with pytest.raises(UserError, match=r"record 0.*token \d+ is outside the vocabulary of 50"):
        rows(path=tmp_path, vocabulary=50)
    with pytest.raises(UserError, match=r"masked_lm_positions has 10 numbers, expected 12.*masked_slots"):
        rows(path=tmp_path, masked_slots=12)
    write_records(file, [build_example({"image": [1]})] * 4)
    with pytest.raises(UserError, match="it has no input_ids"):
        rows(path=tmp_path)
