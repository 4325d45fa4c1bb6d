#!/usr/bin/env bash
# External load balancing of a mixture-of-experts model: one process a rank, for example one pod a rank. Four of them:
#
#   for rank in 0 1 2 3; do HEAD=10.0.0.1 CUDA_VISIBLE_DEVICES=$rank ./external-moe.sh $rank & done; wait
#
# The ranks still share their experts: vLLM waits until all are there, and runs idle ranks along with busy ones. HEAD is the host of
# rank 0, and here of NATS, registry, indexer and router.
set -euo pipefail
rank=${1:?global rank: 0 to 3}
HEAD=${HEAD:-127.0.0.1}

exec ${RANKWAY:-rankway} worker --engine vllm --model "${MODEL:-Qwen/Qwen3-30B-A3B}" --dp-group qwen3 --worker-id "rank-$rank" \
  --nats-url "nats://$HEAD:4222" --registry-endpoints "$HEAD:50052" \
  -- \
  --data-parallel-size 4 --data-parallel-rank "$rank" --data-parallel-external-lb \
  --data-parallel-address "$HEAD" --data-parallel-rpc-port 13345 --enable-expert-parallel
