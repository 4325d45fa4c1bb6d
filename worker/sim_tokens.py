"""What the simulator answers: words, chosen by a hash of all tokens before and the seed.

The token at an output position depends on nothing else, so a request that moves to another instance in mid-stream goes on
exactly as it would have, and two runs of a prompt with one seed give one text.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import xxhash

from rankway.worker.engine import Logprob

_TEXT = (
    "the of and to in is that it for on with as at by from this be are not have or one all more when time out some what"
    " up other into over new only work first cache block prompt token rank engine router worker index prefix stream batch"
    " reads holds keeps finds sends moves shares counts waits serves long short warm cold next last same still every each"
    " request answer memory queue choice load cost window group lease event"
)
WORDS = tuple(_TEXT.split())
"""What the answers are made of."""

NO_EOS = -1

_MASK63 = 2**63 - 1


@dataclass(slots=True)
class _Node:
    """A place inside a word: the tokens that may follow, and where each leads (None: the word is complete)."""

    tokens: list[int] = field(default_factory=list)
    next: dict[int, _Node | None] = field(default_factory=dict)


class Vocabulary:
    """The words that the simulator knows, as token sequences none of which begins another.

    Args:
        words: token ids of each word.
        vocab_size: words with an id beyond are left out; if none is left, every id up to 256 is a word.
        eos_token_id: what ends the output; NO_EOS: nothing does.
        eos_probability: 0 … 1, that a word's end is followed by the end of the output. 0: only max_tokens ends it.
    """

    def __init__(
        self, words: Sequence[Sequence[int]], vocab_size: int, eos_token_id: int = NO_EOS, eos_probability: float = 0.0
    ) -> None:
        self.root = _Node()
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id
        self.eos_below = int(eos_probability * 2**31) if eos_token_id != NO_EOS else 0
        usable = [tuple(word) for word in words if word and max(word) < vocab_size]
        for word in sorted(set(usable), key=len) or _single_tokens(vocab_size, eos_token_id):
            self._add(word)

    def _add(self, word: tuple[int, ...]) -> None:
        node = self.root
        for token in word[:-1]:
            if token not in node.next:
                node.tokens.append(token)
                node.next[token] = _Node()
            following = node.next[token]
            if following is None:
                return  # a shorter word begins this one
            node = following
        if word[-1] not in node.next:
            node.tokens.append(word[-1])
            node.next[word[-1]] = None


def _single_tokens(vocab_size: int, eos_token_id: int) -> list[tuple[int, ...]]:
    return [(token,) for token in range(min(vocab_size, 256)) if token != eos_token_id]


class TokenSource:
    """The output tokens of one request, one after the other.

    Args:
        tokens: the prompt and, after `prompt_len` of them, the output so far.
    """

    __slots__ = ("_digest", "_hasher", "_node", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, tokens: array[int], prompt_len: int, seed: int) -> None:
        self._vocabulary = vocabulary
        self._hasher = xxhash.xxh64(_little_endian(tokens), seed=seed & (2**64 - 1))
        self._digest = 0
        self._node = vocabulary.root
        for token in tokens[prompt_len:]:
            self._walk(token)

    def next(self, may_end: bool) -> int:
        """The next token; the end of sequence only if `may_end`."""
        vocabulary = self._vocabulary
        digest = self._digest = self._hasher.intdigest()
        node = self._node
        if may_end and node is vocabulary.root and digest >> 33 < vocabulary.eos_below:
            token = vocabulary.eos_token_id
        else:
            token = node.tokens[digest % len(node.tokens)]
        self._hasher.update(token.to_bytes(4, "little"))
        self._walk(token)
        return token

    def logprob(self, token: int, alternatives: int) -> Logprob:
        """Plausible log probabilities of the token that `next` has just returned: it is the most probable one."""
        best = 0.3 + 0.6 * (self._digest & _MASK63) / 2**63
        top = [(token, math.log(best))] if alternatives else []
        rest = 1.0 - best
        for k in range(1, min(alternatives, self._vocabulary.vocab_size)):
            rest /= 2
            top.append(((token + k) % self._vocabulary.vocab_size, math.log(rest)))
        return Logprob(token, math.log(best), tuple(top))

    def _walk(self, token: int) -> None:
        # A token that no word has here (another engine's, the end of sequence) begins a new word.
        self._node = self._node.next.get(token) or self._vocabulary.root


def _little_endian(tokens: array[int]) -> bytes:
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()
