"""Why a request would go where it would go: every rank with the terms of its cost. Nothing is booked.

python examples/python/explain.py [--router HOST:PORT] [--request-id ID | PROMPT]
"""

from __future__ import annotations

import argparse

import grpc

from rankway.v1 import generate_pb2, router_pb2, router_pb2_grpc


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--router", default="localhost:50051", help="host:port of the router's gRPC API")
    parser.add_argument("--request-id", help="explain what was decided for this recent request")
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    options = parser.parse_args()

    if options.request_id:
        question = router_pb2.ExplainRequest(request_id=options.request_id)
    else:
        question = router_pb2.ExplainRequest(request=generate_pb2.GenerateRequest(text=options.prompt))
    with grpc.insecure_channel(options.router) as channel:
        answer = router_pb2_grpc.RouterStub(channel).Explain(question, timeout=10)

    print(f"{answer.prompt_tokens} prompt tokens, block size {answer.block_size}; chosen: {answer.worker_id} {answer.dp_rank}")
    print(f"{'worker':<12} {'dp_rank':>7} {'cost':>9} = {answer.overlap_weight} * prefill + decode + recent; overlap, tree")
    for c in answer.candidates:
        if c.eligible:
            terms = f"{answer.overlap_weight} * {c.prefill_blocks:.3f} + {c.decode_blocks:.3f} + {c.recent:.3f}"
            print(f"{c.worker_id:<12} {c.dp_rank:>7} {c.cost:>9.3f} = {terms}; {c.overlap_blocks}, {c.tree_size}")
        else:
            print(f"{c.worker_id:<12} {c.dp_rank:>7} not eligible: {c.reason}")
    for remark in answer.remarks:
        print("remark:", remark)


if __name__ == "__main__":
    main()
