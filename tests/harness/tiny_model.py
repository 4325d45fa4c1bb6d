"""A Llama of two small layers with random weights, a tokenizer of bytes and a LoRA adapter: real to vLLM, seconds to load."""

from __future__ import annotations

import json
from pathlib import Path

VOCABULARY = 512
EOS = 257
MAX_MODEL_LEN = 2048
_HIDDEN = 64
_INTERMEDIATE = 128
_LAYERS = 2
_HEADS = 4
_KV_HEADS = 2
_HEAD_DIM = 32

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": _HIDDEN,
    "intermediate_size": _INTERMEDIATE,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": EOS,
}
MOE = {
    **CONFIG,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def write_config(directory: Path, config: dict[str, object] = CONFIG) -> Path:
    """A model directory without weights, for configurations and --load-format=dummy."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_model(directory: Path) -> Path:
    """A model directory with random weights, large enough that the likeliest token is clear."""
    import torch
    from safetensors.torch import save_file

    write_config(directory)
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.3).to(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": random(VOCABULARY, _HIDDEN), "lm_head.weight": random(VOCABULARY, _HIDDEN)}
    tensors["model.norm.weight"] = torch.ones(_HIDDEN, dtype=torch.bfloat16)
    shapes = {
        "self_attn.q_proj": (_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.k_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.v_proj": (_KV_HEADS * _HEAD_DIM, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD_DIM),
        "mlp.gate_proj": (_INTERMEDIATE, _HIDDEN),
        "mlp.up_proj": (_INTERMEDIATE, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INTERMEDIATE),
    }
    for layer in range(_LAYERS):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = random(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(_HIDDEN, dtype=torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_tokenizer(directory: Path) -> Path:
    """Byte-level: one token a byte, <|bos|> and <|eos|> as 256 and 257, and a plain chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|bos|>", "<|eos|>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def write_adapter(directory: Path, rank: int = 8) -> Path:
    """A LoRA adapter with random weights for the attention's q and v projections."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for layer in range(_LAYERS):
        for name, width in (("q_proj", _HEADS * _HEAD_DIM), ("v_proj", _KV_HEADS * _HEAD_DIM)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, _HIDDEN, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(width, rank, generator=generator)
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory
