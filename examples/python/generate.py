"""Generate through the router, from Python: prints the text as it comes, then where it ran and what it cost.

python examples/python/generate.py [--router HOST:PORT] [--dp-rank N] [--worker-id NAME] [PROMPT]
"""

from __future__ import annotations

import argparse
import sys

import grpc

from rankway.v1 import generate_pb2, generate_pb2_grpc, types_pb2


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--router", default="localhost:50051", help="host:port of the router's (or a worker's) gRPC API")
    parser.add_argument("--dp-rank", type=int, help="pin to this global rank")
    parser.add_argument("--worker-id", default="", help="pin to this worker")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    options = parser.parse_args()

    request = generate_pb2.GenerateRequest(
        text=options.prompt,
        sampling=types_pb2.SamplingParams(max_tokens=options.max_tokens, temperature=0),
        worker_id=options.worker_id,
        dp_rank=options.dp_rank,  # None leaves it absent; 0 is a rank
    )
    with grpc.insecure_channel(options.router) as channel:
        try:
            for response in generate_pb2_grpc.GenerationStub(channel).Generate(request, timeout=60):
                match response.WhichOneof("event"):
                    case "routed":
                        routed = response.routed
                    case "delta":
                        print(response.delta.text, end="", flush=True)
                    case "finished":
                        usage = response.finished.usage
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    print(f"\n{routed.worker_id} dp_rank={routed.dp_rank} cost={routed.cost:.3f} overlap={routed.overlap_blocks} blocks")
    print(f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached; {usage.completion_tokens} generated")
    return 0


if __name__ == "__main__":
    sys.exit(main())
