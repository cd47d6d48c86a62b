"""BERT and GPT-2: matrix products, attention, and an optimiser with as much work as a layer.

Tokens are random: the speed does not depend on them. There are so few that the loss falls within ten updates (BERT:
eight), after which losses are compared: an update takes up to a second and a half. Podium's last encoder of BERT
computes only the rows that the heads read, which the share of the peak does not take into account.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.race.lane import Lane

_LR = 3e-4
_NO_TOKEN = -100  # what transformers calls a position without a label
_SHARED = (
    "workload.data.source=generated", "batch.micro=8", "optim.name=adamw", f"optim.lr={_LR}", "optim.betas=null",
    "optim.weight_decay=0.01", "optim.clip_norm=null", "engine.updates_per_call=5",
)  # fmt: skip


def optimiser(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=_LR, weight_decay=0.01)


def bert_loss(
    model: nn.Module,
    tokens: Tensor,
    segment: Tensor,
    position: Tensor,
    sequence: Tensor,
    masked: Tensor,
    target: Tensor,
    first: Tensor,
    follows: Tensor,
) -> Tensor:
    """Return the sum of the mean losses of words and of pairs; every row has the same number of masked words."""
    words, pairs = model(tokens, segment, position, sequence, masked, first)
    word_loss = F.cross_entropy(words.flatten(0, 1), target.flatten(), ignore_index=-1)
    return word_loss + F.cross_entropy(pairs.flatten(0, 1), follows.flatten())


def bert_for_transformers(fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the samples as `BertForPreTraining` takes them: each label at its position in the row."""
    masked, target = fields["masked"], fields["target"]
    labels = torch.full(fields["tokens"].shape, _NO_TOKEN)
    used = target >= 0
    rows = torch.arange(len(labels))[:, None].expand_as(masked)
    labels[rows[used], masked[used].long()] = target[used]
    return {
        "input_ids": fields["tokens"].long(),
        "token_type_ids": fields["segment"].long(),
        "attention_mask": (fields["sequence"] > 0).long(),
        "labels": labels,
        "next_sentence_label": fields["follows"][:, 0],
    }


def gpt2_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten().long())


def gpt2_for_transformers(fields: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the samples with labels already shifted: `GPT2LMHeadModel` itself would never predict the last token."""
    tokens = fields["tokens"].long()
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "shift_labels": tokens[:, 1:]}


LANES = [
    Lane(
        name="bert-8",
        title="BERT, 2 layers × 768, length 128, micro-batch 8",
        recipe="bert/quick",
        overrides=(
            *_SHARED, "workload.data.samples=64", "workload.data.length=128", "workload.data.mask_share=0.15",
            "workload.data.redraw=none", "workload.data.short_share=0", "workload.model.hidden=768",
            "workload.model.heads=12", "workload.model.vocabulary=30522", "workload.model.init_std=0.02",
            "workload.model.dropout=0.1", "workload.model.attention_dropout=0.1", "engine.updates_per_call=2",
        ),
        not_random=("workload.model.dropout=0", "workload.model.attention_dropout=0"),
        mean_loss=bert_loss,
        num_compared=8,
        least_updates=8,  # Podium's checkpoint is 458 MB
        optimiser=optimiser,
        for_transformers=bert_for_transformers,
        may_be_divided=True,
    ),
    Lane(
        name="gpt2-8",
        title="GPT-2, 4 layers × 256, length 256, micro-batch 8",
        recipe="gpt2/quick",
        overrides=(
            *_SHARED, "workload.data.samples=64", "workload.model.hidden=256", "workload.model.heads=8",
            "workload.model.context=256", "workload.model.vocabulary=8192", "workload.model.dropout=0.1",
        ),
        not_random=("workload.model.dropout=0",),
        mean_loss=gpt2_loss,
        num_compared=10,
        optimiser=optimiser,
        for_transformers=gpt2_for_transformers,
        may_be_divided=True,
        flax_model="gpt2",
    ),
]  # fmt: skip
