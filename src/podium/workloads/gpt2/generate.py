"""Text from a trained model, sampled token by token. Called by `predict`.

Keys and values of previous tokens are cached, so that a new token costs one step instead of the whole text again.
When the context is full, the model continues from its last half.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from podium.layers.transformer import SelfAttention
from podium.machine import counter_rng
from podium.machine.device import has_float64
from podium.workloads.gpt2.model import Block, Gpt2, check_window


class Reader:
    """A model with a cache of the tokens read so far; given more tokens, it returns the logits of the next."""

    def __init__(self, model: Gpt2, num_texts: int) -> None:
        layers, hidden, heads = model.section.shape
        weight = model.embedding.tokens.weight
        # (layer, keys and values, B, H, context, D)
        shape = (layers, 2, num_texts, heads, model.section.context, hidden // heads)
        self._kept = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        self._model, self._num_read = model, 0

    def read(self, tokens: Tensor) -> Tensor:
        """Read (B, S) more tokens; return (B, V) logits of the one after the last."""
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
        """Clear the cache, as if nothing had been read."""
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
        # Several tokens are read only at the start; a single one may attend to all before it without a mask.
        assert first == 0 or x.shape[1] == 1
        causal = x.shape[1] > 1
        return attention.joined(
            F.scaled_dot_product_attention(query, keys, values, is_causal=causal, scale=attention.scale)
        )


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
    """Return `num_texts` continuations of a prompt, of at most `num_tokens` each; they stop at the token `end`.

    The draw for text i at position n depends only on (seed, i, n).
    """
    assert prompt
    context = model.section.context
    device = model.embedding.tokens.weight.device
    start = torch.tensor([prompt] * num_texts, device=device)
    check_window(start, context)
    stream = counter_rng.key("sampled text", seed)
    chances = counter_rng.uniforms(stream, np.arange(num_texts), num_tokens)
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
    """Return (B, 1) tokens, each where `chance` in [0, 1) falls in the cumulative probabilities, most likely first."""
    if temperature == 0:
        return logits.argmax(dim=1, keepdim=True)
    top_k = min(top_k or logits.shape[1], logits.shape[1])
    values, tokens = logits.topk(top_k, dim=1)
    wide = values.double() if has_float64(values.device) else values.cpu().double()
    sums = torch.softmax(wide / temperature, dim=1).cumsum(dim=1)
    places = (chance.to(sums) * sums[:, -1])[:, None]
    index = torch.searchsorted(sums, places, right=True).clamp_(max=top_k - 1)
    return tokens.gather(1, index.to(tokens.device))


def _until(tokens: list[int], end: int | None) -> list[int]:
    return tokens[: tokens.index(end)] if end in tokens else tokens
