"""Rankway: routes LLM requests to the vLLM engine rank whose KV cache already holds the prompt."""

__version__ = "0.1.0"
