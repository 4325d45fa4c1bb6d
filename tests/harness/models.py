"""Small real tokenizers, built on the spot."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CHATML = (
    "{% for message in messages %}{% if loop.first and message.role == 'assistant' %}"
    "{{ raise_exception('the first message is not the assistant\\'s') }}{% endif %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog barks at the fox.",
    "Rankway routes requests to the rank whose cache already holds the prompt.",
    "def encode(text: str) -> list[int]:\n    return [token for token in text]",
    "Grüße aus Zürich, 日本語のテキスト, привет мир, 🙂🙃.",
] * 5


def byte_level_bpe() -> dict[str, bytes]:
    """Files of a byte-level BPE (as GPT-2's, Llama 3's, Qwen's), with ChatML and a BOS before texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
    )
    # What a training run leaves behind, and must not matter.
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    config = {"bos_token": "<|bos|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML}
    return _files(tokenizer, config, {"generation_config.json": {"eos_token_id": [0, 2]}, "config.json": {"vocab_size": 640}})


def sentencepiece_bpe() -> dict[str, bytes]:
    """Files of a sentencepiece-style BPE with byte fallback (as Llama 2's): words carry their leading space."""
    alphabet = list("▁abcdefghijklmnopqrstuvwxyzTRG.,")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *alphabet, "th", "▁th", "▁the", "▁d", "▁do"]
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("▁", "d"), ("▁d", "o")]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in pieces[:3]])
    return _files(tokenizer, {"eos_token": "</s>"}, {"config.json": {"eos_token_id": 2}})


def _files(tokenizer: Tokenizer, config: Mapping[str, object], others: Mapping[str, object]) -> dict[str, bytes]:
    files = {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    return files | {name: json.dumps(value).encode() for name, value in others.items()}
