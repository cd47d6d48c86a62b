"""Text from a trained model: token after token, each drawn from what the model expects. Called by `predict`.

Keys and values of tokens already read are kept, so that a new token costs one step and not the whole text again.
When the context is full, the model goes on from the last half of it.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from podium.data import draws
from podium.layers.transformer import SelfAttention
from podium.workloads.gpt2.model import Block, Gpt2, check_window


class Reader:
    """A model that has read some tokens; it is told further ones and says what it expects next."""

    def __init__(self, model: Gpt2, num_texts: int) -> None:
        layers, hidden, heads = model.section.shape
        weight = model.embedding.tokens.weight
        # (layer, keys and values, B, H, context, D)
        shape = (layers, 2, num_texts, heads, model.section.context, hidden // heads)
        self._kept = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        self._model, self._num_read = model, 0

    def read(self, tokens: Tensor) -> Tensor:
        """(B, S) further tokens; returns (B, V) logits of the one after the last."""
        model, first, last = self._model, self._num_read, self._num_read + tokens.shape[1]
        x = model.embedding(tokens, first)
        for kept, block in zip(self._kept, model.blocks, strict=True):
            assert isinstance(block, Block)
            x = x + self._attend(block.attention, block.attention_norm(x), kept, first)
            x = x + block.feed_forward(block.feed_forward_norm(x))
        self._num_read = last
        logits: Tensor = model.head(x[:, -1:])
        return logits[:, 0].float()

    def forget(self) -> None:
        """As new: nothing is read."""
        self._num_read = 0

    @property
    def num_read(self) -> int:
        return self._num_read

    @staticmethod
    def _attend(attention: SelfAttention, x: Tensor, kept: Tensor, first: int) -> Tensor:
        query, key, value = attention.queries_keys_values(x)
        last = first + x.shape[1]
        kept[0, :, :, first:last], kept[1, :, :, first:last] = key, value
        keys, values = kept[0, :, :, :last], kept[1, :, :, :last]
        # Several tokens are read only from the beginning on: one alone may look at all before it.
        assert first == 0 or x.shape[1] == 1
        return attention.joined(F.scaled_dot_product_attention(query, keys, values, is_causal=x.shape[1] > 1))


def generate(
    model: Gpt2,
    prompt: list[int],
    *,
    num_texts: int,
    num_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    end: int | None = None,
) -> list[list[int]]:
    """`num_texts` continuations of a prompt, at most `num_tokens` each; they stop at the token `end`.

    What text i draws at its place n depends on (seed, i, n) alone.
    """
    assert prompt
    context = model.section.context
    device = model.embedding.tokens.weight.device
    start = torch.tensor([prompt] * num_texts, device=device)
    check_window(start, context)
    stream = draws.key("sampled text", seed)
    chances = draws.uniforms(stream, np.arange(num_texts), num_tokens)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            reader = Reader(model, num_texts)
            texts, fresh = start, start
            for place in range(num_tokens):
                if reader.num_read + fresh.shape[1] > context:
                    reader.forget()
                    fresh = texts[:, -max(1, context // 2) :]
                logits = reader.read(fresh)
                fresh = _drawn(logits, torch.from_numpy(chances[:, place]).to(device), temperature, top_k)
                texts = torch.cat([texts, fresh], dim=1)
    finally:
        model.train(was_training)
    return [_until(row[len(prompt) :], end) for row in texts.tolist()]


def _drawn(logits: Tensor, chance: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """(B, 1) tokens, each where the chance in [0, 1) falls in the running sum of probabilities, likeliest first."""
    if temperature == 0:
        return logits.argmax(dim=1, keepdim=True)
    top_k = min(top_k or logits.shape[1], logits.shape[1])
    values, tokens = logits.topk(top_k, dim=1)
    sums = torch.softmax(values.double() / temperature, dim=1).cumsum(dim=1)
    index = torch.searchsorted(sums, (chance * sums[:, -1])[:, None], right=True).clamp_(max=top_k - 1)
    return tokens.gather(1, index)


def _until(tokens: list[int], end: int | None) -> list[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens
