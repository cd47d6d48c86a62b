"""Tokens made for tests, in the files that `podium data make text` writes."""

import json
from pathlib import Path

import numpy as np

from podium.workloads.bert.corpus import SPECIAL

NUM_DOCUMENTS = 12


def write_text(
    folder: Path, num_documents=NUM_DOCUMENTS, num_sentences=40, regular=False, special: dict | None = None
) -> Path:
    """A folder as `podium data make text` writes it. Token = 5 + 50 · document + place, so that rows tell where they
    come from; `regular`: six words in their order, others in each of four kinds of documents."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    splits = {}
    for split in ("train", "valid", "test"):
        sentences = [rng.integers(2, 12, num_sentences) for _ in range(num_documents)]
        lengths = np.concatenate(sentences)
        documents = np.repeat(np.arange(num_documents), num_sentences)
        owner = np.repeat(documents, lengths)
        place = np.concatenate([np.arange(part.sum()) for part in sentences])
        tokens = 5 + (6 * (owner % 4) + place % 6 if regular else 50 * owner + place % 50)
        tokens.astype("<u2").tofile(folder / f"{split}.bin")
        np.save(folder / f"{split}.sentences.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
        np.save(folder / f"{split}.documents.npy", np.arange(num_documents + 1, dtype=np.int64) * num_sentences)
        splits[split] = {"tokens": len(tokens), "sentences": len(lengths), "documents": num_documents}
    about = {
        "format": 1,
        "tokenizer": "wordpiece",
        "vocabulary": 5 + 50 * num_documents,
        "dtype": "uint16",
        "special": SPECIAL if special is None else special,
        "splits": splits,
        "source": "test",
    }
    (folder / "text.json").write_text(json.dumps(about))
    return folder
