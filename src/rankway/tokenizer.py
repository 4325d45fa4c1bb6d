"""Tokenizers: the model's own from its files, or the built-in byte-level one. Text to token ids and back.

Encoding is blocking work of about 1 s for 2 to 10 MB of text, mostly without the GIL: long texts belong in a thread.
Text of output tokens is made from each token's bytes, so it can be decoded as it comes at a constant cost per token.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from rankway.blocks import unpack_tokens
from rankway.chat_template import ChatTemplate

BYTE_LEVEL = "bytes"
"""Fingerprint of the built-in tokenizer."""

_TOKENISING_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""What decides how text becomes tokens: the fingerprint covers these."""

_FILES = (*_TOKENISING_FILES, "generation_config.json", "config.json")
"""The others name end-of-sequence tokens and the size of the model's vocabulary."""


class Tokenizer(ABC):
    """Text to token ids and back. Safe to use from several threads."""

    vocab_size: int
    """Token ids are 0 … vocab_size-1."""
    eos_token_ids: tuple[int, ...]
    """Ids that end the output, ascending."""
    fingerprint: str
    """Equal fingerprints tokenise alike: hex, or "bytes"."""
    quick_chars: int
    """Texts up to this many characters take at most about 0.3 ms to encode: less than handing them to a thread is worth."""

    @staticmethod
    def byte_level() -> Tokenizer:
        """The built-in one: ids 0-255 are bytes, 256 begins, 257 ends a sequence; the chat template is `<|role|>` lines."""
        return _ByteTokenizer()

    @staticmethod
    def load(directory: str | Path) -> Tokenizer:
        """The tokenizer of a model's directory.

        Raises:
            OSError: a file can't be read, or there is no tokenizer.json.
            ValueError: a file isn't what it should be; the message names it.
        """
        folder = Path(directory)
        if not (folder / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{folder}: no tokenizer.json there (a tokenizer.model alone isn't enough: convert it)")
        return Tokenizer.from_files({name: (folder / name).read_bytes() for name in _FILES if (folder / name).is_file()})

    @staticmethod
    def from_files(files: Mapping[str, bytes]) -> Tokenizer:
        """The tokenizer of what `files` returned, here or in another process. No files: the byte-level one.

        Raises:
            ValueError: a file isn't what it should be; the message names it.
        """
        return _ModelTokenizer(files) if files else _ByteTokenizer()

    @abstractmethod
    def files(self) -> dict[str, bytes]:
        """File name to content: all that `from_files` needs."""

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> array[int]:
        """Token ids of a text as an `array('I')`. `add_special_tokens`: with what the model wants around it (a BOS …).

        Raises:
            ValueError: the text has surrogates, which no UTF-8 has.
        """

    @abstractmethod
    def encode_chat(self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]) -> array[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises:
            ValueError: the chat template refuses the conversation, or there is no template.
        """

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The token's text as UTF-8, which may be part of a character. A special token's name; empty for an unknown id."""

    @abstractmethod
    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of a whole sequence, without special tokens. Bytes that are no UTF-8 become U+FFFD."""

    @abstractmethod
    def stream(self, *, at_start: bool = False) -> IncrementalDecoder:
        """A decoder of tokens as they come. `at_start`: they begin a text, so a sentencepiece word loses its leading
        space; otherwise they go on after a prompt and keep it."""


class IncrementalDecoder:
    """Text of tokens as they come, whole characters only.

    What `push` returns, joined, is `Tokenizer.decode` of the tokens, except that a character which the last token leaves
    unfinished is never shown.
    """

    __slots__ = ("_strip", "_table", "_utf8")

    def __init__(self, table: _TokenBytes, strip: bool) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete. Unknown ids have no text."""
        data = b"".join(map(self._table.__getitem__, token_ids))
        if self._strip and data:
            data = data.removeprefix(b" ")
            self._strip = False
        return self._utf8.decode(data)

    def flush(self) -> str:
        """The end: forgets an unfinished character; a split character is no reason to show U+FFFD."""
        self._utf8.reset()
        return ""


class _TokenBytes(dict[int, bytes]):
    """Token id -> the bytes it adds to a text, worked out at first use."""

    def __init__(self, look_up: Callable[[int], bytes | None]) -> None:
        super().__init__()
        self._look_up = look_up

    def __missing__(self, token_id: int) -> bytes:
        data = self._look_up(token_id)
        if data is None:
            return b""  # not kept: unknown ids would grow the table
        self[token_id] = data
        return data


class _ByteTokenizer(Tokenizer):
    EOS = 257
    quick_chars = 65_536

    def __init__(self) -> None:
        self.vocab_size = 512
        self.eos_token_ids = (self.EOS,)
        self.fingerprint = BYTE_LEVEL
        self._table = _TokenBytes(lambda token_id: bytes((token_id,)) if 0 <= token_id < 256 else None)

    def files(self) -> dict[str, bytes]:
        return {}

    def encode(self, text: str, add_special_tokens: bool = True) -> array[int]:
        # Each byte as a little-endian uint32, in C: 5 MB in 10 ms.
        return unpack_tokens(text.encode().decode("latin-1").encode("utf-32-le"))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]) -> array[int]:
        lines = [f"<|{message['role']}|>\n{message.get('content') or ''}\n" for message in messages]
        return self.encode("".join(lines) + "<|assistant|>\n")

    def token_bytes(self, token_id: int) -> bytes:
        return self._table[token_id]

    def decode(self, token_ids: Iterable[int]) -> str:
        return b"".join(map(self._table.__getitem__, token_ids)).decode("utf-8", "replace")

    def stream(self, *, at_start: bool = False) -> IncrementalDecoder:
        return IncrementalDecoder(self._table, strip=False)


class _ModelTokenizer(Tokenizer):
    quick_chars = 1_500

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = {name: bytes(files[name]) for name in _FILES if name in files}
        if "tokenizer.json" not in self._files:
            raise ValueError("tokenizer.json is missing")
        spec = self._json("tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(self._files["tokenizer.json"].decode())
        except Exception as error:  # noqa: BLE001  # the library raises plain Exceptions
            raise ValueError(f"tokenizer.json: {error}") from None
        # What training wants; a prompt is never cut or padded.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        to_bytes, self._strip = _piece_decoder(spec.get("decoder"))
        self._special = {
            token_id: token.content.encode()
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self._table = _TokenBytes(self._text_of(to_bytes))
        self._settings = self._json("tokenizer_config.json")
        config = self._json("config.json")
        self.vocab_size = max(self._highest_id() + 1, _vocab_size(config))
        self.eos_token_ids = self._eos_ids(config)
        self.fingerprint = self._hash_files()
        self._template = self._chat_template()

    def files(self) -> dict[str, bytes]:
        return dict(self._files)

    def encode(self, text: str, add_special_tokens: bool = True) -> array[int]:
        # The batch call, since it lets go of the GIL and computes no offsets.
        try:
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError:
            text.encode()  # the library calls surrogates a wrong type; Python says what is wrong
            raise
        return array("I", encoding.ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]) -> array[int]:
        if self._template is None:
            raise ValueError("the model has no chat template: use a text prompt")
        # The template writes the special tokens itself: a second BOS would never match the engine's cache.
        return self.encode(self._template.render(messages, template_kwargs), add_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        return self._special.get(token_id) or self._table[token_id]

    def decode(self, token_ids: Iterable[int]) -> str:
        data = b"".join(map(self._table.__getitem__, token_ids))
        return (data.removeprefix(b" ") if self._strip else data).decode("utf-8", "replace")

    def stream(self, *, at_start: bool = False) -> IncrementalDecoder:
        return IncrementalDecoder(self._table, strip=self._strip and at_start)

    def _json(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads(self._files.get(name, b"{}"))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{name}: not a JSON object")
        return value

    def _text_of(self, to_bytes: Callable[[str], bytes]) -> Callable[[int], bytes | None]:
        def look_up(token_id: int) -> bytes | None:
            if token_id in self._special:
                return b""
            piece = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            return None if piece is None else to_bytes(piece)

        return look_up

    def _highest_id(self) -> int:
        added = self._tokenizer.get_added_tokens_decoder()
        return max(self._tokenizer.get_vocab_size(with_added_tokens=True) - 1, *added, 0)

    def _eos_ids(self, config: Mapping[str, Any]) -> tuple[int, ...]:
        """generation_config.json's ids and the tokenizer's own; where neither names one, config.json's."""
        ids = set(_as_ids(self._json("generation_config.json").get("eos_token_id")))
        name = _token_text(self._settings.get("eos_token"))
        own = None if name is None else self._tokenizer.token_to_id(name)
        if own is not None:
            ids.add(own)
        if not ids:
            ids.update(_as_ids(config.get("eos_token_id")))
        return tuple(sorted(ids))

    def _hash_files(self) -> str:
        digest = hashlib.sha256()
        for name in _TOKENISING_FILES:
            data = self._files.get(name, b"")
            digest.update(f"{name}:{len(data)}:".encode() + data)
        return digest.hexdigest()[:32]

    def _chat_template(self) -> ChatTemplate | None:
        source: Any = self._settings.get("chat_template")
        if "chat_template.jinja" in self._files:
            source = self._files["chat_template.jinja"].decode()
        elif isinstance(source, list):
            source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
        if source is None:
            return None
        special = {name: _token_text(value) for name, value in self._settings.items() if name.endswith("_token")}
        return ChatTemplate(source, {name: text for name, text in special.items() if text is not None})


def _piece_decoder(spec: Mapping[str, Any] | None) -> tuple[Callable[[str], bytes], bool]:
    """From tokenizer.json's `decoder`: what turns a vocabulary entry into bytes, and whether a text loses one leading space.

    Raises:
        ValueError: a kind of decoder that has no text per token.
    """
    if spec is None:
        return (lambda piece: b" " + piece.encode()), True  # the library joins such tokens with spaces
    steps = spec.get("decoders", []) if spec.get("type") == "Sequence" else [spec]
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level_piece, False
    unknown = kinds - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if unknown:
        raise ValueError(f"tokenizer.json: decoder {', '.join(map(str, sorted(unknown, key=str)))} isn't supported")
    replacements = [
        (step["replacement"], " ") if step["type"] == "Metaspace" else (step["pattern"].get("String", ""), step["content"])
        for step in steps
        if step["type"] in ("Replace", "Metaspace")
    ]
    byte_fallback = "ByteFallback" in kinds

    def to_bytes(piece: str) -> bytes:
        if byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        for old, new in replacements:
            if old:
                piece = piece.replace(old, new)
        return piece.encode()

    strip = any(
        (step["type"] == "Strip" and step.get("start", 0) > 0)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )
    return to_bytes, strip


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: character -> byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level_piece(piece: str) -> bytes:
    try:
        return bytes(map(_ALPHABET.__getitem__, piece))
    except KeyError:
        return piece.encode()  # an added token, written as it is


def _token_text(value: Any) -> str | None:
    """A token of tokenizer_config.json: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _as_ids(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value or [])


def _vocab_size(config: Mapping[str, Any]) -> int:
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size", 0))
    return size if isinstance(size, int) else 0
