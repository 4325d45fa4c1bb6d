#!/usr/bin/env bash
# Hybrid load balancing: one DP group of 8 ranks on two nodes with 4 GPUs each. One command a node:
#
#   HEAD=10.0.0.1 ./hybrid-two-nodes.sh 0       on the first node, which owns the global ranks 0-3
#   HEAD=10.0.0.1 ./hybrid-two-nodes.sh 1       on the second, which owns 4-7
#
# Rankway chooses the rank; a request that comes without one is balanced by vLLM inside its node. The two start in any order, and
# each waits for the other. HEAD also runs NATS, registry, indexer and router.
set -euo pipefail
node=${1:?which node: 0 or 1}
HEAD=${HEAD:-127.0.0.1}

exec ${RANKWAY:-rankway} worker --engine vllm --model "${MODEL:-Qwen/Qwen3-30B-A3B}" --dp-group qwen3 --worker-id "node-$node" \
  --nats-url "nats://$HEAD:4222" --registry-endpoints "$HEAD:50052" \
  --grpc-listen 0.0.0.0:50061 --metrics-listen 0.0.0.0:9100 \
  -- \
  --data-parallel-size 8 --data-parallel-size-local 4 --data-parallel-start-rank $((4 * node)) --data-parallel-hybrid-lb \
  --data-parallel-address "$HEAD" --data-parallel-rpc-port 13345 --enable-expert-parallel
