#!/usr/bin/env bash
# Internal load balancing: one process owns all four ranks of the DP group.
#
#   ./internal.sh
#
# The simplest set-up on one host with four GPUs. One process feeds every rank, so it is also the first to become the limit; hybrid
# load balancing with several processes is the way on from here.
set -euo pipefail
HEAD=${HEAD:-127.0.0.1}

exec ${RANKWAY:-rankway} worker --engine vllm --model "${MODEL:-Qwen/Qwen3-8B}" --dp-group qwen3 --worker-id all-ranks \
  --nats-url "nats://$HEAD:4222" --registry-endpoints "$HEAD:50052" \
  -- \
  --data-parallel-size 4
