"""The official openai client against Rankway, unchanged: a chat, streamed, and where it ran.

python examples/python/openai_client.py [BASE_URL]
"""

from __future__ import annotations

import sys

from openai import OpenAI


def main(base_url: str = "http://localhost:8000/v1") -> None:
    client = OpenAI(base_url=base_url, api_key="any")
    model = client.models.list().data[0].id
    messages = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Name three rivers."}]

    chat = client.chat.completions.with_raw_response.create(model=model, messages=messages, max_tokens=16)
    print(f"ran on {chat.headers['x-rankway-worker-id']} dp_rank={chat.headers['x-rankway-dp-rank']}")
    print(chat.parse().choices[0].message.content)

    stream = client.chat.completions.create(
        model=model, messages=messages, max_tokens=16, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.prompt_tokens_details.cached_tokens} cached")


if __name__ == "__main__":
    main(*sys.argv[1:])
