"""Tokenizers: text to token ids and back, as a whole and as tokens come."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest
import tokenizers
from harness.models import byte_level_bpe, sentencepiece_bpe
from hypothesis import given
from hypothesis import strategies as st

from rankway.chat_template import ChatTemplate
from rankway.tokenizer import Tokenizer

BYTES = Tokenizer.byte_level()
BPE = Tokenizer.from_files(byte_level_bpe())
SENTENCEPIECE = Tokenizer.from_files(sentencepiece_bpe())
REAL_BPE = tokenizers.Tokenizer.from_str(byte_level_bpe()["tokenizer.json"].decode())
REAL_SENTENCEPIECE = tokenizers.Tokenizer.from_str(sentencepiece_bpe()["tokenizer.json"].decode())

any_tokenizer = pytest.mark.parametrize("tokenizer", [BYTES, BPE, SENTENCEPIECE], ids=["bytes", "bpe", "sentencepiece"])
texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]))
USER = {"role": "user", "content": "hi"}


def streamed(tokenizer: Tokenizer, token_ids: list[int], *, at_start: bool = True) -> list[str]:
    decoder = tokenizer.stream(at_start=at_start)
    return [*(decoder.push([token_id]) for token_id in token_ids), decoder.flush()]


class TestByteLevel:
    def test_ids_are_bytes(self) -> None:
        """A text's ids are its UTF-8 bytes; nothing is put around it."""
        assert BYTES.encode("aé€") == array("I", b"a\0\0\0\xc3\0\0\0\xa9\0\0\0\xe2\0\0\0\x82\0\0\0\xac\0\0\0")
        assert BYTES.encode("a", add_special_tokens=True).tolist() == [97]

    def test_special_ids(self) -> None:
        """257 ends a sequence; ids from 256 up have no text and are no reason to fail."""
        assert BYTES.eos_token_ids == (257,)
        assert BYTES.vocab_size == 512
        assert BYTES.decode([72, 256, 257, 258, 511, 105]) == "Hi"
        assert BYTES.token_bytes(400) == b""

    def test_chat(self) -> None:
        """Each message is a line with its role and one with its content; the assistant's line ends the prompt."""
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": None}]
        assert BYTES.decode(BYTES.encode_chat(messages, {})) == "<|system|>\ns\n<|user|>\n\n<|assistant|>\n"

    def test_files(self) -> None:
        """It needs no files, and no files make it."""
        assert BYTES.files() == {}
        assert Tokenizer.from_files({}).fingerprint == BYTES.fingerprint == "bytes"

    @given(texts)
    def test_round_trip(self, text: str) -> None:
        """Decoding an encoded text gives the text."""
        assert BYTES.decode(BYTES.encode(text)) == text


class TestEncoding:
    @given(texts)
    def test_as_the_library_encodes(self, text: str) -> None:
        """Token ids are those of the tokenizers library, uncut and unpadded."""
        untouched = tokenizers.Tokenizer.from_str(REAL_BPE.to_str())
        untouched.no_truncation()
        untouched.no_padding()
        assert BPE.encode(text).tolist() == untouched.encode(text).ids

    def test_special_tokens_around_a_text(self) -> None:
        """A text gets the model's BOS, unless it is not wanted."""
        bos = REAL_BPE.token_to_id("<|bos|>")
        assert BPE.encode("hi").tolist() == [bos, *BPE.encode("hi", add_special_tokens=False)]

    @any_tokenizer
    def test_surrogates(self, tokenizer: Tokenizer) -> None:
        """A text that has no UTF-8 is a ValueError."""
        with pytest.raises(ValueError, match="surrogates"):
            tokenizer.encode("\ud800")

    @any_tokenizer
    def test_empty(self, tokenizer: Tokenizer) -> None:
        """An empty text without special tokens has no tokens."""
        assert tokenizer.encode("", add_special_tokens=False) == array("I")


class TestChat:
    def test_no_second_bos(self) -> None:
        """The template writes the special tokens: encoding adds none, and the generation prompt ends the text."""
        ids = BPE.encode_chat([USER], {})
        text = REAL_BPE.decode(ids.tolist(), skip_special_tokens=False)
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"

    def test_template_refuses(self) -> None:
        """What the template refuses with raise_exception is a ValueError with its words."""
        with pytest.raises(ValueError, match="the first message is not the assistant's"):
            BPE.encode_chat([{"role": "assistant", "content": "hi"}], {})

    def test_no_template(self) -> None:
        """A model without a chat template says so."""
        with pytest.raises(ValueError, match="no chat template"):
            SENTENCEPIECE.encode_chat([USER], {})

    def test_template_file_wins(self) -> None:
        """chat_template.jinja goes before tokenizer_config.json, and changes the fingerprint."""
        other = Tokenizer.from_files(byte_level_bpe() | {"chat_template.jinja": b"{{ messages[0].content }}!"})
        assert other.decode(other.encode_chat([USER], {})) == "hi!"
        assert other.fingerprint != BPE.fingerprint

    def test_named_templates(self) -> None:
        """Of a list of templates the one named default serves."""
        config = {"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "d"}]}
        other = Tokenizer.from_files(byte_level_bpe() | {"tokenizer_config.json": json.dumps(config).encode()})
        assert other.decode(other.encode_chat([USER], {})) == "d"

    @pytest.mark.parametrize(
        ("source", "kwargs", "expected"),
        [
            ("{{ bos_token }}{{ messages[0]['content'] }}", {}, "<s>hi"),
            ("{{ {'a': '<é>'} | tojson }}", {}, '{"a": "<é>"}'),
            ("{{ [1, 2] | tojson(indent=1) }}", {}, "[\n 1,\n 2\n]"),
            ("{% if tools is none and documents is none %}none{% endif %}", {}, "none"),
            ("{% if enable_thinking %}think{% endif %}", {"enable_thinking": True}, "think"),
            ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", {}, "01"),
            ("{% generation %}x{% endgeneration %}", {}, "x"),
            ("  {% if true %}\n  a\n  {% endif %}\nb", {}, "  a\nb"),
            ("{{ strftime_now('%%') }}", {}, "%"),
            ("{{ add_generation_prompt }}", {"add_generation_prompt": False}, "False"),
            ("{{ messages[0].role }}", {"messages": "mine"}, "user"),
        ],
    )
    def test_as_transformers_renders(self, source: str, kwargs: dict[str, object], expected: str) -> None:
        """Globals, filters, tags and white space of templates are those of transformers."""
        assert ChatTemplate(source, {"bos_token": "<s>"}).render([USER], kwargs) == expected

    @pytest.mark.parametrize(
        "source",
        ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ nothing.at.all }}", "{{ 1 / 0 }}", "{{ 1 + 'a' }}"],
    )
    def test_sandbox(self, source: str) -> None:
        """A template that reaches out of its sandbox, or breaks, is a ValueError."""
        with pytest.raises(ValueError, match="chat template"):
            ChatTemplate(source, {}).render([USER], {})

    def test_malformed_template(self) -> None:
        """A template that doesn't parse fails at load, not at the first request."""
        with pytest.raises(ValueError, match="chat template"):
            ChatTemplate("{% if %}", {})


class TestDecoding:
    @given(texts)
    def test_streamed_text_is_the_text(self, text: str) -> None:
        """Pushed one by one, the tokens of a text give the text, and no piece ever ends inside a character."""
        for tokenizer in (BYTES, BPE, SENTENCEPIECE):
            ids = tokenizer.encode(text, add_special_tokens=False).tolist()
            pieces = streamed(tokenizer, ids)
            assert "".join(pieces) == tokenizer.decode(ids)
            assert "\ufffd" not in "".join(pieces) or "\ufffd" in text or tokenizer is SENTENCEPIECE

    @given(st.data())
    def test_any_tokens(self, data: st.DataObject) -> None:
        """Whatever the tokens, and however they are grouped, the pieces are the whole decode but for an unfinished end."""
        tokenizer = data.draw(st.sampled_from([BYTES, BPE, SENTENCEPIECE]))
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
        cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
        decoder = tokenizer.stream(at_start=True)
        pieces = [decoder.push(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
        text = "".join(pieces) + decoder.flush()
        assert tokenizer.decode(ids) in (text, text + "\ufffd")

    @given(st.lists(st.integers(0, 599), max_size=40))
    def test_as_the_library_decodes(self, ids: list[int]) -> None:
        """A byte-level model's text is the library's, special tokens left out, unknown bytes as U+FFFD."""
        assert BPE.decode(ids) == REAL_BPE.decode(ids)

    @given(texts)
    def test_sentencepiece_as_the_library(self, text: str) -> None:
        """A sentencepiece model's text is the library's, byte fallback and the leading space included."""
        ids = SENTENCEPIECE.encode(text).tolist()
        assert SENTENCEPIECE.decode(ids) == REAL_SENTENCEPIECE.decode(ids)

    def test_split_character(self) -> None:
        """A character split over tokens comes with its last one; one that is never finished never comes."""
        smile = BYTES.encode("🙂").tolist()
        assert streamed(BYTES, smile) == ["", "", "", "🙂", ""]
        assert streamed(BYTES, smile[:3]) == ["", "", "", ""]
        assert BYTES.decode(smile[:3]) == "\ufffd"

    def test_byte_fallback(self) -> None:
        """Byte tokens of a sentencepiece model join to characters."""
        ids = SENTENCEPIECE.encode("é").tolist()
        assert "".join(streamed(SENTENCEPIECE, ids)) == "é"
        assert b"".join(SENTENCEPIECE.token_bytes(token_id) for token_id in ids) == " é".encode()

    def test_leading_space(self) -> None:
        """A sentencepiece word loses its space at the start of a text and keeps it after a prompt."""
        ids = SENTENCEPIECE.encode("the dog").tolist()
        assert "".join(streamed(SENTENCEPIECE, ids)) == "the dog"
        assert "".join(streamed(SENTENCEPIECE, ids, at_start=False)) == " the dog"
        assert "".join(streamed(SENTENCEPIECE, [1, *ids])) == "the dog"

    def test_special_tokens(self) -> None:
        """Special tokens are no text of the output, but have a name for log probabilities."""
        ids = REAL_BPE.encode("<|im_end|>", add_special_tokens=False).ids[:1]
        assert BPE.decode(ids) == "".join(streamed(BPE, ids)) == ""
        assert BPE.token_bytes(ids[0]) == b"<|im_end|>"

    def test_unknown_ids_are_not_kept(self) -> None:
        """Ids outside the vocabulary have no text and leave nothing behind."""
        before = len(BPE._table)  # type: ignore[attr-defined]
        assert BPE.decode([10**6, 2**32 - 1]) == ""
        assert len(BPE._table) == before  # type: ignore[attr-defined]

    def test_decoder_without_a_kind(self) -> None:
        """A tokenizer with no decoder joins its tokens with spaces, as the library does."""
        real = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
        tokenizer = Tokenizer.from_files({"tokenizer.json": real.to_str().encode()})
        assert tokenizer.decode([0, 1, 1]) == "".join(streamed(tokenizer, [0, 1, 1])) == real.decode([0, 1, 1])


class TestFiles:
    def test_what_ids_end_the_output(self) -> None:
        """generation_config.json's and the tokenizer's own end tokens count; config.json's where neither names one."""
        assert BPE.eos_token_ids == (0, 2)
        assert SENTENCEPIECE.eos_token_ids == (2,)
        files = sentencepiece_bpe() | {"tokenizer_config.json": b"{}", "config.json": b'{"eos_token_id": 7}'}
        assert Tokenizer.from_files(files).eos_token_ids == (7,)

    def test_vocabulary_of_the_model(self) -> None:
        """A model whose embedding is larger than the tokenizer's vocabulary takes all of its ids."""
        assert BPE.vocab_size == 640
        assert BPE.decode([639]) == ""

    def test_shipping(self) -> None:
        """`from_files(files())` tokenises alike and has the same fingerprint; files that don't matter don't change it."""
        copy = Tokenizer.from_files({**BPE.files(), "README.md": b"x"})
        assert copy.fingerprint == BPE.fingerprint
        assert copy.encode("the dog") == BPE.encode("the dog")
        assert set(copy.files()) == {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"}
        moved = Tokenizer.from_files(BPE.files() | {"config.json": b'{"vocab_size": 9999}'})
        assert moved.fingerprint == BPE.fingerprint

    def test_directory(self, tmp_path: Path) -> None:
        """A model's directory is read; one without tokenizer.json is an OSError that says so."""
        with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
            Tokenizer.load(tmp_path)
        for name, data in byte_level_bpe().items():
            (tmp_path / name).write_bytes(data)
        assert Tokenizer.load(tmp_path).fingerprint == BPE.fingerprint

    @pytest.mark.parametrize(
        ("name", "data"),
        [
            ("tokenizer.json", b"{"),
            ("tokenizer.json", b"[]"),
            ("tokenizer.json", b"{}"),
            ("tokenizer_config.json", b"\xff"),
            ("generation_config.json", b"nope"),
        ],
    )
    def test_broken_file(self, name: str, data: bytes) -> None:
        """A file that isn't what it should be is a ValueError that names it."""
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            Tokenizer.from_files(byte_level_bpe() | {name: data})

    def test_unknown_decoder(self) -> None:
        """A decoder whose tokens have no text of their own is refused by name."""
        spec = json.loads(byte_level_bpe()["tokenizer.json"]) | {
            "decoder": {"type": "CTC", "pad_token": "x", "word_delimiter_token": "|", "cleanup": True}
        }
        with pytest.raises(ValueError, match="decoder CTC"):
            Tokenizer.from_files({"tokenizer.json": json.dumps(spec).encode()})
