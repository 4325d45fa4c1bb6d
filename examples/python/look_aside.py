"""Look-aside load balancing from Python: Route, stream straight from the worker, Release.

python examples/python/look_aside.py [ROUTER] [PROMPT]
"""

from __future__ import annotations

import sys

import grpc

from rankway.v1 import generate_pb2, generate_pb2_grpc, router_pb2, router_pb2_grpc, types_pb2


def main(router: str = "localhost:50051", prompt: str = "The capital of France is") -> None:
    sampling = types_pb2.SamplingParams(max_tokens=16, temperature=0)
    request = generate_pb2.GenerateRequest(text=prompt, sampling=sampling)
    with grpc.insecure_channel(router) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        route = stub.Route(router_pb2.RouteRequest(request=request), timeout=10)
        print(f"routed to {route.worker_id} dp_rank={route.dp_rank} at {route.endpoint}, overlap {route.overlap_blocks} blocks")
        try:
            stream_from_worker(route, sampling)
        finally:
            # Ends the booking now; without it the reservation would expire by itself after route.ttl_ms.
            stub.Release(router_pb2.ReleaseRequest(reservation_id=route.reservation_id), timeout=10)


def stream_from_worker(route: router_pb2.RouteResponse, sampling: types_pb2.SamplingParams) -> None:
    request = generate_pb2.GenerateRequest(
        request_id=route.request_id,
        reservation_id=route.reservation_id,
        token_ids=route.token_ids,  # tokenised once, by the router
        dp_rank=route.dp_rank,
        sampling=sampling,
    )
    with grpc.insecure_channel(route.endpoint) as channel:
        for response in generate_pb2_grpc.GenerationStub(channel).Generate(request, timeout=60):
            if response.HasField("delta"):
                print(response.delta.text, end="", flush=True)
            elif response.HasField("finished"):
                usage = response.finished.usage
                print(f"\n{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached")


if __name__ == "__main__":
    main(*sys.argv[1:])
