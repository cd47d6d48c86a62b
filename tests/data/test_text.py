"""Text as tokens: documents, sentences, splits, tokenizers, and the folder they end up in."""

import hashlib
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from podium.data.text.documents import Document, assign_splits, documents_in, split_sentences, standard_library
from podium.data.text.folder import open_text
from podium.data.text.make import TextMake, make_text, standard_library_text, text_of
from podium.errors import UserError
from tests.support.processes import assert_user_error, podium_here, run_files

POEM = "The owl sat.  It sang!\nWho sang? The owl\nsang\n\nand sat\n"
CODE = "\n\ndef owl(x):\n    return x  # ü\n\n\n\nowl('✓')\n"


@pytest.fixture
def books(tmp_path):
    """Forty small files, one of them no text."""
    folder = tmp_path / "books"
    (folder / "deep").mkdir(parents=True)
    for number in range(30):
        (folder / f"poem{number:02d}.txt").write_text(POEM * (number % 3 + 1), encoding="utf-8")
        (folder / "deep" / f"code{number:02d}.py").write_text(CODE + f"x = {number}\r\n", encoding="utf-8")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\xff")
    (folder / ".hidden").write_text("never read")
    return folder


def made(books, kind, out="out", **options):
    return make_text(TextMake(out=books.parent / out, input=books, tokenizer=kind, **options))


@pytest.mark.parametrize(
    ("text", "prose", "sentences"),
    [
        (CODE, False, ["\n\ndef owl(x):\n", "    return x  # ü\n\n\n\n", "owl('✓')\n"]),
        (POEM, True, ["The owl sat.  ", "It sang!\n", "Who sang? ", "The owl\nsang\n\n", "and sat\n"]),
        ('He said "no." Then (yes!) he went', True, ['He said "no." ', "Then (yes!) ", "he went"]),
        ("3.14 is no end", True, ["3.14 is no end"]),
        ("a\n \t\n", False, ["a\n \t\n"]),
        (" \n\n", False, []),
        ("", True, []),
    ],
)
def test_sentences_keep_their_white_space_and_are_never_blank(text, prose, sentences):
    assert split_sentences(text, prose) == sentences


def test_documents_are_assigned_by_their_names_about_90_5_5():
    documents = [Document(f"file{number}.py", None) for number in range(4000)]
    splits = assign_splits(documents)
    assert [round(len(splits[name]) / 4000, 2) for name in ("train", "valid", "test")] == pytest.approx(
        [0.9, 0.05, 0.05], abs=0.01
    )
    assert sorted(document.name for part in splits.values() for document in part) == sorted(d.name for d in documents)
    fewer = assign_splits(documents[:3000])
    assert {d.name for d in fewer["test"]} <= {d.name for d in splits["test"]}  # others do not move


@pytest.mark.parametrize("number", range(3, 12))
def test_every_split_has_a_document(number):
    assert all(assign_splits([Document(f"{place}.txt", None) for place in range(number)]).values())


def test_a_single_document_is_cut_by_its_sentences(tmp_path):
    (tmp_path / "one.txt").write_text("".join(f"Sentence {number}. " for number in range(100)))
    splits = assign_splits(documents_in([tmp_path / "one.txt"]))
    sizes = {name: len(parts[0].sentences()) for name, parts in splits.items()}
    assert sizes == {"train": 90, "valid": 5, "test": 5}


SMALL = {
    "one line": {"one.py": "".join(f"word{number} " for number in range(400))},
    "one long file and two short ones": {"a.txt": "An owl sang. " * 500, "b.txt": "A. ", "c.txt": "B. "},
    "empty files": {"a.txt": "An owl sang. " * 100, "b.txt": "", "c.txt": "", "d.txt": ""},
}


@pytest.mark.parametrize("kind", ["char", "wordpiece"])
@pytest.mark.parametrize("files", SMALL.values(), ids=SMALL)
def test_a_small_corpus_is_cut_by_its_tokens(tmp_path, files, kind):
    (tmp_path / "in").mkdir()
    for name, content in files.items():
        (tmp_path / "in" / name).write_text(content)
    text = make_text(TextMake(out=tmp_path / "out", input=tmp_path / "in", tokenizer=kind, vocabulary=200))
    counts = [text.splits[split]["tokens"] for split in ("train", "valid", "test")]
    assert np.allclose(np.array(counts) / sum(counts), [0.9, 0.05, 0.05], atol=0.01)
    for split in ("train", "valid", "test"):
        sentences, documents = text.sentences(split), text.documents(split)
        assert (np.diff(sentences) > 0).all()
        assert (np.diff(documents) > 0).all()
        assert (sentences[0], documents[0], documents[-1]) == (0, 0, len(sentences) - 1)
    if kind == "char":
        given = "".join(text.tokenizer.decode(text.tokens(split).tolist()) for split in text.splits)
        assert sorted(given) == sorted("".join(files.values()))


def test_too_little_text_for_a_split_is_warned_of_and_training_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.txt").write_text("a")
    done = podium_here("data", "make", "text", "input=one.txt", "out=text", "tokenizer=char")
    assert done.returncode == 0, done.stderr
    assert "warning: there is too little text for valid and test" in " ".join(done.stderr.split())
    data = ["workload.data.source=text", "workload.data.path=text", "workload.data.vocabulary=null"]
    trained = podium_here("train", "gpt2/quick", *data, "engine.tune=off")
    assert_user_error(trained, "too few for one window", "provide more text")


def test_the_standard_library_has_no_tests_in_it():
    names = [document.name for document in standard_library()]
    assert "json/decoder.py" in names
    assert names == sorted(names)
    assert not any("/test" in name or name.startswith(("test/", "site-packages/")) for name in names)


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_tokens_put_together_give_the_text_back(books, kind):
    text = made(books, kind, vocabulary=None if kind == "char" else 300)
    for split in ("train", "valid", "test"):
        expected = [document.sentences() for document in assign_splits(documents_in([books]))[split]]
        tokens, sentences = text.tokens(split), text.sentences(split)
        assert tokens.max() < text.vocabulary
        given = [text.tokenizer.decode(tokens[a:b].tolist()) for a, b in pairwise(sentences)]
        assert given == [sentence for document in expected for sentence in document]
        documents = text.documents(split)
        expected = [document for document in expected if document]
        assert np.diff(documents).tolist() == [len(document) for document in expected]
        assert (tokens[sentences[documents[1:]] - 1] == text.special["<|endoftext|>"]).all()
        assert (tokens == text.special["<|endoftext|>"]).sum() == len(documents) - 1


def test_wordpiece_has_berts_special_tokens_first_and_none_in_sentences(books):
    text = made(books, "wordpiece", vocabulary=120)
    assert text.special == {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
    assert text.tokenizer.get_vocab_size() == text.vocabulary <= 120
    assert not np.isin(text.tokens("train"), [0, 2, 3, 4]).any()
    assert text.tokenizer.encode("The OWL sang").tokens == text.tokenizer.encode("the owl sang").tokens
    assert text.tokenizer.decode(text.tokenizer.encode("owl sat").ids) == "owl sat"
    cased = made(books, "wordpiece", "cased", vocabulary=120, lowercase=False)
    assert cased.tokenizer.encode("The").ids != cased.tokenizer.encode("the").ids


def test_wordpiece_keeps_the_most_frequent_characters_of_many(tmp_path):
    letters = [chr(0x4E00 + number) for number in range(600)]
    lines = "".join(f"{letter} " * (2 if place < 400 else 1) + "\n" for place, letter in enumerate(letters))
    (tmp_path / "one.py").write_text(lines + "a-b ]^\\\n" * 90, encoding="utf-8")
    text = make_text(TextMake(out=tmp_path / "out", input=tmp_path / "one.py", tokenizer="wordpiece", vocabulary=1100))
    found = [text.tokenizer.encode(letter).ids[0] != text.special["[UNK]"] for letter in letters[:540]]
    assert all(found[:400])
    assert 90 < sum(found[400:]) < 100  # 500 in all, with the seven in the last lines
    assert text.tokenizer.encode("a-b ]^\\").tokens == ["a", "-", "b", "]", "^", "\\"]


def test_unknown_characters_still_give_a_token(books):
    char = made(books, "char").tokenizer
    assert char.encode("o漢w").tokens == ["o", "<unk>", "w"]
    wordpiece = made(books, "wordpiece", "two", vocabulary=120).tokenizer
    assert wordpiece.encode("漢").tokens == ["[UNK]"]
    bpe = made(books, "bpe", "three", vocabulary=300).tokenizer
    assert bpe.decode(bpe.encode("o漢w").ids) == "o漢w"


def test_text_that_looks_like_a_special_token_is_text(tmp_path):
    (tmp_path / "one.py").write_text("a <|endoftext|> b\n" * 40)
    text = make_text(TextMake(out=tmp_path / "out", input=tmp_path / "one.py", tokenizer="char"))
    assert (text.tokens("train") == 0).sum() == 1


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "char"])
def test_same_text_gives_the_same_bytes(books, kind):
    """In another process too: the library's tables are in another order there."""
    script = """
import sys
from pathlib import Path
from podium.data.text.make import TextMake, make_text
make_text(TextMake(out=Path(sys.argv[1]), input=Path(sys.argv[2]), tokenizer=sys.argv[3], vocabulary=300))
"""
    made(books, kind, vocabulary=300)
    other = books.parent / "other"
    subprocess.run([sys.executable, "-c", script, other, books, kind], check=True, capture_output=True)
    digests = [
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
        for folder in (books.parent / "out", other)
    ]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 11


def test_nothing_half_written_stays(books, monkeypatch):
    import podium.data.text.tokenizers as text_tokenizers

    def failing(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(text_tokenizers, "train_tokenizer", failing)
    before = run_files(books.parent)
    with pytest.raises(KeyboardInterrupt):
        made(books, "bpe")
    assert run_files(books.parent) == before


def test_the_command_shows_a_table_and_info_the_same(books, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = books.parent / "tokens"
    done = podium_here("data", "make", "text", f"input=[{books}]", f"out={out}", "tokenizer=char")
    assert done.returncode == 0, done.stderr
    assert "sentences" in done.stdout
    text = open_text(out)
    assert f"{text.splits['train']['tokens']:,}" in done.stdout
    info = podium_here("data", "info", out)
    assert info.stdout.splitlines()[1:] == done.stdout.splitlines()[1 : len(info.stdout.splitlines())]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["input=nowhere", "out=x"], ["no file or folder nowhere"]),
        (["tokenizer=words"], ["tokenizer", "wordpiece, bpe, char"]),
        (["inputs=a"], ["unknown key inputs", "did you mean input?"]),
        (["input=books", "out=x", "vocabulary=200"], ["`vocabulary` is 200", "257"]),
        (["input=books/picture.png", "out=x"], ["none of the files is UTF-8 text"]),
        (["--force"], ["`--force`", "`out=FOLDER`"]),
    ],
)
def test_mistakes_are_told_in_one_sentence(books, monkeypatch, options, parts):
    monkeypatch.chdir(books.parent)
    assert_user_error(podium_here("data", "make", "text", *options), *parts)
    assert not (books.parent / "x").exists()


def test_a_text_without_a_folder_to_write_goes_to_the_cache_by_what_it_holds(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "play.txt"
    file.write_text("To be, or not to be.\n" * 40)
    places = []
    for _ in range(2):
        done = podium_here("data", "make", "text", f"input={file}", "tokenizer=char")
        assert done.returncode == 0, done.stderr
        places.append(Path(done.stdout.splitlines()[-1]))
    assert places[0] == places[1]
    assert "kept as tokens in" in " ".join(done.stderr.split())
    assert all(counts["tokens"] > 0 for counts in open_text(places[0]).splits.values())
    file.write_text("To be, or not to bee.\n" * 40)
    assert text_of((file,), "char").path != places[0]


def test_damaged_folders_are_told(books):
    text = made(books, "char")
    (text.path / "valid.bin").write_bytes(b"123")
    with pytest.raises(UserError, match=r"valid.bin is damaged: it does not hold the [\d,]+ tokens"):
        text.tokens("valid")
    np.save(text.path / "train.sentences.npy", np.arange(3))
    with pytest.raises(UserError, match=r"train.sentences.npy is damaged"):
        text.sentences("train")
    (text.path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer.json holds no tokenizer"):
        open_text(text.path).tokenizer  # noqa: B018
    (text.path / "text.json").write_text("{}")
    with pytest.raises(UserError, match=r"text.json is damaged"):
        open_text(text.path)
    with pytest.raises(UserError, match=r"not a folder of text"):
        open_text(books)


@pytest.mark.slow
def test_the_standard_library_is_made_once_and_kept():
    first = standard_library_text("bpe", 1024)
    assert first.vocabulary == 1024
    assert first.splits["train"]["tokens"] > 10 * first.splits["test"]["tokens"] > 0
    stamp = (first.path / "text.json").stat().st_mtime_ns
    assert standard_library_text("bpe", 1024).path == first.path
    assert (first.path / "text.json").stat().st_mtime_ns == stamp
